//! Tensors as the backends see them: a view of memory that torch or a caller owns, and its rows.
//!
//! `view` holds the one SAFETY contract. Nothing here depends on a backend, torch or Python.

#[cfg(feature = "python")]
mod blocks;
mod rows;
mod view;

#[cfg(feature = "python")]
pub use blocks::Block;
pub use rows::{Rows, RowsMut, prefetch};
#[cfg(feature = "torch")]
pub use view::dtypes_of;
pub(crate) use view::of_dtype;
pub use view::{Device, Dtype, Element, Tensor};
