//! The operators on plain slices, on the CPU: no torch, no Python.
//!
//! An operator is a struct whose fields are its inputs. [`forward`](RewriteRead::forward) computes the outputs,
//! [`vjp`](RewriteRead::vjp) the gradients of the inputs from those of the outputs (the vector–Jacobian product), and
//! [`cached_step`](RewriteRead::cached_step) the outputs for the next tokens of a sequence. Arrays are contiguous, the last axis innermost; a
//! shape is the one that the operator has in Python (`ddl.functional`). [`records`](crate::records) describes the fields.
//!
//! A state X of two features and three value channels, into which β = 1 writes the value (1, 2, 3) along the first
//! feature:
//!
//! ```
//! use ddl::slices::{Array, Erase, Incoming, RewriteRead, Write};
//!
//! let state = [0.5, 0.5, 0.5, 4.0, 5.0, 6.0];
//! let inputs = RewriteRead {
//!     rewrite: Some(Write {
//!         direction: Array::new(&[2.0, 0.0], &[1, 2]),
//!         value: Array::new(&[1.0, 2.0, 3.0], &[1, 3]),
//!         gate: Array::new(&[1.0], &[1]),
//!         eps_k: 1e-6,
//!         erase: Erase::Tied,
//!     }),
//!     ..RewriteRead::new(Array::new(&state, &[1, 2, 3]))
//! };
//! let forward = inputs.forward()?;
//! let expected = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
//! assert!(forward.new_state.iter().zip(expected).all(|(x, y): (&f64, _)| (x - y).abs() < 1e-9));
//!
//! let incoming = Incoming { grad_new_state: Some(&[1.0; 6]), ..Incoming::default() };
//! let gradients = inputs.vjp(&forward, &incoming)?;
//! assert!((gradients.value[0] - 1.0).abs() < 1e-9); // ∂X'/∂v is β k̂
//! # Ok::<(), ddl::error::Error>(())
//! ```

mod array;
mod expand;
mod memory;
mod rewrite_read;

pub use crate::cpu::state::Stored as Number;
pub use array::Array;
pub use expand::{Expand, ExpandGradients, Expanded};
pub use rewrite_read::{Forward, Gradients, Incoming, Link, Read, RewriteRead, Write};

pub use crate::records::Erase;
