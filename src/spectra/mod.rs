//! Diagnostics of the rewrites X' = (I − β k̂k̂ᵀ)X + β k̂vᵀ of N tokens over L sublayers.
//!
//! Inputs are [`view`]s of arrays of float32 or float64 with any strides, which are read token by token and never
//! copied as a whole; all arithmetic is in float64. Outputs are contiguous slices, in the order of the tokens. Directions
//! are k̂ = k/√(|k|² + ε_k²), so that |k̂| ≤ 1.
//!
//! `rows` has the arithmetic on rows, [`small`] the decompositions of one token's matrices, and `tokens` divides the
//! tokens among threads: results do not depend on how many. The others are the diagnostics; `ddl.lab.analysis.spectra` is
//! their interface in Python.

pub mod coherence;
pub mod eigenvalues;
pub mod product;
pub mod rank;
mod rows;
pub mod small;
pub mod survival;
mod tokens;
pub mod view;
