//! Deep Delta Learning residuals, X' = X + β k̂ (v − k̂ᵀX)ᵀ, as fused operators.
//!
//! [`problem`] says what is asked and checks it once; [`cpu`] or [`cuda`] does it; [`tensor`] borrows
//! torch's memory and holds the one SAFETY contract; [`python`] is the thin module `ddl._native` over them.

pub mod cpu;
pub mod cuda;
pub mod error;
pub mod problem;
pub mod python;
pub mod tensor;
