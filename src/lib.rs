//! Deep Delta Learning residuals, X' = X + β k̂ (vᵀ − k̂ᵀX), as fused operators.
//!
//! There are three interfaces. [`slices`] has the operators on plain slices and needs no feature. With the feature
//! `tch`, the module `tch` has them on the tensors of the crate tch, on CPUs and GPUs. The default feature, `python`,
//! builds the extension module of the Python package. [`records`] has what an operator takes and returns, for all three.
//!
//! Each module may use those before it: [`error`], `environment`, `library`, [`records`], `tensor` (a view of somebody's memory and
//! the one SAFETY contract), `problem` (each operator's inputs and outputs, checked once), `cpu` and `cuda` (which
//! never import each other), `execute` (a checked problem on either), [`slices`], `torch` (the operators as its dispatcher calls them), and `python` and `tch`.

mod cpu;
#[cfg(feature = "torch")]
mod cuda;
#[cfg(feature = "python")]
mod delta_rule;
mod environment;
pub mod error;
mod execute;
#[cfg(feature = "torch")]
mod library;
mod problem;
#[cfg(feature = "python")]
mod python;
pub mod records;
pub mod slices;
#[cfg(feature = "tch")]
pub mod tch;
mod tensor;
#[cfg(feature = "torch")]
mod torch;

/// The examples of docs/rust.md, as tests.
#[cfg(doctest)]
#[doc = include_str!("../docs/rust.md")]
struct Docs;
