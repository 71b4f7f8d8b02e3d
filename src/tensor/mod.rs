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
pub use view::{Device, Dtype, Element, Tensor};

/// Evaluates an expression with the Rust type `T` of a dtype of numbers.
macro_rules! of_dtype {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::tensor::Dtype::F32 => {
                type $T = f32;
                $body
            }
            $crate::tensor::Dtype::F64 => {
                type $T = f64;
                $body
            }
            $crate::tensor::Dtype::Bf16 => {
                type $T = half::bf16;
                $body
            }
            $crate::tensor::Dtype::F16 => {
                type $T = half::f16;
                $body
            }
            $crate::tensor::Dtype::Bool => unreachable!("a mask is refused where numbers are expected"),
        }
    };
}
pub(crate) use of_dtype;
