//! Limits of the operators' arguments; Python has them from `ddl._native`.

/// Smallest ε_k and norm ε. If k or x is 0, only ε_k² or ε is under the root, so float32 must represent both with a
/// margin on every backend, even if subnormal numbers are flushed to zero.
pub const LEAST_EPS_K: f64 = 1e-18;
pub const LEAST_NORM_EPS: f64 = 1e-36;

/// Most rewrites between two reads: each has m + 1 sums over the features, which a GPU keeps in registers.
pub const MOST_REWRITES: usize = 8;
