//! The effective rank of a state.

use super::rows::scale_to_one;
use super::small::{singular_values, triangular_factor};
use super::tokens::for_each_token;
use super::view::View;
use crate::error::Result;

/// Writes exp(H) to `output` (N,), where H is the entropy of σ/Σσ and σ are the singular values of a state of `states`
/// (N, d, m); 0 for a state of zeros. Source: Roy and Vetterli, EUSIPCO 2007, "The effective rank".
pub fn effective_rank(states: &View, threads: usize, output: &mut [f64]) -> Result<()> {
    let [tokens, d, m] = states.shape();
    let (rank, longer) = (d.min(m), d.max(m));
    let scratch = || (vec![0.0; d * m], vec![0.0; rank * rank], vec![0.0; rank]);
    let work =
        |(state, factor, values): &mut (Vec<f64>, Vec<f64>, Vec<f64>), token, effective: &mut [f64]| {
            if m <= d {
                states.load_columns(token, state)?
            } else {
                states.load_rows(token, state)?
            }
            scale_to_one(state); // the rank does not depend on the scale, and no square overflows
            singular_values(triangular_factor(state, longer, factor), values);
            effective[0] = exponential_entropy(values);
            Ok(())
        };
    for_each_token(tokens, threads, output, scratch, work)
}

/// exp(−Σ p ln p) for p = values/Σ values; 0 if all are 0.
fn exponential_entropy(values: &[f64]) -> f64 {
    let sum: f64 = values.iter().sum();
    if sum == 0.0 {
        return 0.0;
    }
    let shares = values.iter().map(|value| value / sum).filter(|share| *share > 0.0);
    shares.map(|share| -share * share.ln()).sum::<f64>().exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_singular_values_count_and_zeros_do_not() {
        for (values, rank) in
            [(&[2.0, 2.0, 2.0][..], 3.0), (&[5.0, 0.0], 1.0), (&[0.0, 0.0], 0.0), (&[], 0.0)]
        {
            assert!((exponential_entropy(values) - rank).abs() < 1e-15);
        }
    }
}
