//! Tensors as the backends see them: a view of torch's memory, and its rows.
//!
//! `view` holds the one SAFETY contract. Nothing here depends on a backend, torch or Python.

mod rows;
mod view;

pub use rows::{Ahead, Rows, RowsMut};
pub use view::{Device, Dtype, Element, Tensor};
