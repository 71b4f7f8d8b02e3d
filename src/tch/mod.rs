//! The operators on the tensors of the crate tch, on the CPU and on NVIDIA GPUs, without copies.
//!
//! An operator is a struct whose fields are its inputs. [`forward`](RewriteRead::forward) computes the outputs,
//! [`vjp`](RewriteRead::vjp) the gradients of the inputs from those of the outputs (the vector–Jacobian product), and
//! [`cached_step`](RewriteRead::cached_step) the outputs for the next tokens of a sequence. Tch's own memory is used; only a tensor
//! whose elements are not contiguous is copied first. Shapes and dtypes are those of `ddl.functional` in Python: v, β and
//! what is saved are float32, or float64 for a float64 state. [`records`](crate::records) describes the fields.
//!
//! libtorch's autograd does not see these calls: their outputs are leaves. A training step runs the sublayers' own autograd
//! and these products in turn; `examples/train.rs` shows how.
//!
//! ```no_run
//! use ddl::tch::{Erase, Incoming, RewriteRead, Write};
//! use tch::{Device, Kind, Tensor};
//!
//! let options = (Kind::Float, Device::Cpu);
//! let (state, direction) = (Tensor::randn([2, 8, 4], options), Tensor::randn([2, 8], options));
//! let (value, gate) = (Tensor::randn([2, 4], options), Tensor::rand([2], options) * 2.0);
//! let rewrite = Write { direction: &direction, value: &value, gate: &gate, eps_k: 1e-6, erase: Erase::Tied };
//! let inputs = RewriteRead { rewrite: Some(rewrite), ..RewriteRead::new(&state) };
//! let forward = inputs.forward()?;
//!
//! let grad = Tensor::ones_like(&state);
//! let gradients = inputs.vjp(&forward, &Incoming { grad_new_state: Some(&grad), ..Incoming::default() })?;
//! println!("{:?}", gradients.direction);
//! # Ok::<(), ddl::error::Error>(())
//! ```

mod call;
mod expand;
mod rewrite_read;

pub use expand::{Expand, ExpandGradients, Expanded};
pub use rewrite_read::{Forward, Gradients, Incoming, Link, Read, RewriteRead, Write};

pub use crate::records::Erase;
