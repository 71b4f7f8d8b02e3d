//! The one eigenvalue of a rewrite that differs from 1: products over depth, and regimes.

use super::tokens::{for_each_token, sum_of_tokens};
use super::view::View;
use crate::error::{Error, Result};

/// Most by which |k̂| may exceed 1: directions that were rounded to bfloat16 are longer by up to 0.4 %.
pub const NORM_TOLERANCE: f64 = 0.01;

/// A range of eigenvalues, by name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Regime {
    pub name: &'static str,
    pub lower: f64,
    pub upper: f64,
}

/// The regimes, from identity to reflection. A bound between two of them belongs to the one nearer to 0.
pub const REGIMES: [Regime; 5] = [
    Regime { name: "near-identity", lower: 0.9, upper: f64::INFINITY },
    Regime { name: "interpolating", lower: 0.1, upper: 0.9 },
    Regime { name: "near-projection", lower: -0.1, upper: 0.1 },
    Regime { name: "near-reflection", lower: -0.9, upper: -0.1 },
    Regime { name: "reflection", lower: f64::NEG_INFINITY, upper: -0.9 },
];

/// Returns the place of an eigenvalue's regime in [`REGIMES`].
pub fn regime_of(eigenvalue: f64) -> usize {
    let inside = |regime: &Regime| {
        let above = if regime.lower > 0.0 { eigenvalue > regime.lower } else { eigenvalue >= regime.lower };
        above && if regime.upper < 0.0 { eigenvalue < regime.upper } else { eigenvalue <= regime.upper }
    };
    REGIMES.iter().position(inside).expect("the regimes cover all numbers")
}

/// Writes λ = 1 − β|k̂|² to `output` (N, L), for gates β and norms |k̂|, both (N, L, 1).
pub fn eigenvalues(gates: &View, norms: &View, threads: usize, output: &mut [f64]) -> Result<()> {
    let [tokens, rewrites, _] = gates.shape();
    norms.require_shape(gates.shape())?;
    let work = |norm: &mut Vec<f64>, token: usize, eigenvalues: &mut [f64]| {
        gates.load_column(token, 0, eigenvalues)?;
        norms.load_column(token, 0, norm)?;
        for (eigenvalue, norm) in eigenvalues.iter_mut().zip(norm) {
            if *norm < 0.0 || *norm > 1.0 + NORM_TOLERANCE {
                return Err(norms.refuse(token, "be norms of k̂ = k/√(|k|² + ε_k²), from 0 to 1", *norm));
            }
            *eigenvalue = 1.0 - *eigenvalue * *norm * *norm;
        }
        Ok(())
    };
    for_each_token(tokens, threads, output, || vec![0.0; rewrites], work)
}

/// Writes the product over L of `eigenvalues` (N, L, 1) to `output` (N,).
pub fn determinants(eigenvalues: &View, threads: usize, output: &mut [f64]) -> Result<()> {
    let [tokens, rewrites, _] = eigenvalues.shape();
    let work = |row: &mut Vec<f64>, token: usize, determinant: &mut [f64]| {
        eigenvalues.load_column(token, 0, row)?;
        determinant[0] = row.iter().product();
        Ok(())
    };
    for_each_token(tokens, threads, output, || vec![0.0; rewrites], work)
}

/// Returns the share of `eigenvalues` (N, L, 1) in each regime, in the order of [`REGIMES`]. There has to be one.
pub fn regime_shares(eigenvalues: &View, threads: usize) -> Result<[f64; REGIMES.len()]> {
    let [tokens, rewrites, _] = eigenvalues.shape();
    if tokens * rewrites == 0 {
        return Err(Error::Argument("`eigenvalues` must have at least one element, got none".into()));
    }
    let work = |row: &mut Vec<f64>, token: usize, counts: &mut [f64]| {
        eigenvalues.load_column(token, 0, row)?;
        row.iter().for_each(|eigenvalue| counts[regime_of(*eigenvalue)] += 1.0);
        Ok(())
    };
    let mut shares = [0.0; REGIMES.len()];
    sum_of_tokens(tokens, threads, &mut shares, || vec![0.0; rewrites], work)?;
    Ok(shares.map(|count| count / (tokens * rewrites) as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_belong_to_the_regime_nearer_to_zero() {
        for (at, bound) in [(1, 0.9), (2, 0.1), (2, -0.1), (3, -0.9)] {
            assert_eq!(regime_of(bound), at);
        }
        assert_eq!([1.0, 0.5, 0.0, -0.5, -1.0, 7.0, -7.0].map(regime_of), [0, 1, 2, 3, 4, 0, 4]);
        assert_eq!([0.9_f64.next_up(), (-0.9_f64).next_down()].map(regime_of), [0, 4]);
        assert_eq!([0.1_f64.next_up(), (-0.1_f64).next_down()].map(regime_of), [1, 3]);
    }
}
