//! Deep Delta Learning residuals, X' = X + β k̂ (vᵀ − k̂ᵀX), as fused operators.
//!
//! Three doors lead to them. Without features, [`slices`] has the operators on plain slices, and [`spectra`] the
//! diagnostics. The feature `tch` adds them on the tensors of the crate tch, on the CPU and on GPUs. The default feature,
//! `python`, is the extension module of the Python package.
//!
//! Each module may use those before it: [`error`], [`environment`], `library`, [`tensor`] (a view of somebody's memory and
//! the one SAFETY contract), [`problem`] (each operator's inputs and outputs, checked once), [`cpu`] and `cuda` (which
//! never import each other), [`spectra`] (diagnostics of arrays, without torch), [`slices`], `torch` (the operators as
//! its dispatcher calls them), and `python` and `tch`.

pub mod cpu;
#[cfg(feature = "torch")]
pub mod cuda;
pub mod environment;
pub mod error;
#[cfg(feature = "torch")]
mod library;
pub mod problem;
#[cfg(feature = "python")]
pub mod python;
pub mod slices;
pub mod spectra;
#[cfg(feature = "tch")]
pub mod tch;
pub mod tensor;
#[cfg(feature = "torch")]
pub mod torch;

/// The examples of docs/rust.md, as tests.
#[cfg(doctest)]
#[doc = include_str!("../docs/rust.md")]
struct Docs;
