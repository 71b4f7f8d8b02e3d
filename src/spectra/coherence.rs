//! Cosines between the directions of one token.

use super::rows::{dot, normalise};
use super::tokens::{for_each_token, sum_of_tokens};
use super::view::View;
use crate::error::Result;

/// Writes the cosines of successive directions, with their signs, to `output` (N, L − 1). `directions` (N, L, d) may have
/// any norm; a zero direction has cosine 0 with all others.
pub fn coherence(directions: &View, threads: usize, output: &mut [f64]) -> Result<()> {
    let [tokens, rewrites, d] = directions.shape();
    let work = |rows: &mut Vec<f64>, token: usize, cosines: &mut [f64]| {
        load_unit_rows(directions, token, rows)?;
        for (at, cosine) in cosines.iter_mut().enumerate() {
            *cosine = cosine_of(row(rows, at, d), row(rows, at + 1, d));
        }
        Ok(())
    };
    for_each_token(tokens, threads, output, || vec![0.0; rewrites * d], work)
}

/// Writes the mean over tokens of |cos| between all pairs of directions to `output` (L, L). There has to be a token.
pub fn coherence_matrix(directions: &View, threads: usize, output: &mut [f64]) -> Result<()> {
    let [tokens, rewrites, d] = directions.shape();
    let work = |rows: &mut Vec<f64>, token: usize, cosines: &mut [f64]| {
        load_unit_rows(directions, token, rows)?;
        for a in 0..rewrites {
            for b in 0..=a {
                let cosine = cosine_of(row(rows, a, d), row(rows, b, d)).abs();
                cosines[a * rewrites + b] = cosine;
                cosines[b * rewrites + a] = cosine;
            }
        }
        Ok(())
    };
    sum_of_tokens(tokens, threads, output, || vec![0.0; rewrites * d], work)?;
    output.iter_mut().for_each(|sum| *sum /= tokens as f64);
    Ok(())
}

fn load_unit_rows(directions: &View, token: usize, rows: &mut [f64]) -> Result<()> {
    let [_, rewrites, d] = directions.shape();
    directions.load_rows(token, rows)?;
    (0..rewrites).for_each(|at| normalise(&mut rows[at * d..][..d]));
    Ok(())
}

fn row(rows: &[f64], at: usize, d: usize) -> &[f64] {
    &rows[at * d..][..d]
}

/// The cosine of two unit rows, which rounding could move beyond 1.
fn cosine_of(a: &[f64], b: &[f64]) -> f64 {
    dot(a, b).clamp(-1.0, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cosines_have_signs_and_zeros_have_none() {
        let rows = [3.0, 0.0, 1.0, 1.0, -2.0, -2.0, 0.0, 0.0];
        let directions = View::of_slice("directions", [1, 4, 2], &rows).unwrap();
        let mut cosines = [f64::NAN; 3];
        coherence(&directions, 1, &mut cosines).unwrap();
        let half = 0.5_f64.sqrt();
        assert!(cosines.iter().zip([half, -1.0, 0.0]).all(|(got, expected)| (got - expected).abs() < 1e-15));
        let mut matrix = [f64::NAN; 16];
        coherence_matrix(&directions, 1, &mut matrix).unwrap();
        assert!((matrix[4 + 2] - 1.0).abs() < 1e-15 && (matrix[2] - half).abs() < 1e-15);
        assert_eq!((matrix[0], matrix[15]), (1.0, 0.0));
    }
}
