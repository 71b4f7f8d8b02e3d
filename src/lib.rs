//! Deep Delta Learning residuals, X' = X + β k̂ (vᵀ − k̂ᵀX), as fused operators.
//!
//! Each module may use those before it: [`error`], [`environment`], `library`, [`tensor`] (a view of torch's memory and the
//! one SAFETY contract), [`problem`] (each operator's inputs and outputs, checked once), [`cpu`] and [`cuda`] (which
//! never import each other), [`spectra`] (diagnostics of arrays, without torch), [`torch`] (the operators as its dispatcher
//! calls them), and [`python`] (the module `ddl._native`).

pub mod cpu;
pub mod cuda;
pub mod environment;
pub mod error;
mod library;
pub mod problem;
pub mod python;
pub mod spectra;
pub mod tensor;
pub mod torch;
