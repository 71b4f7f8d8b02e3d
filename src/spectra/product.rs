//! Singular values of the product A_L…A_1 of the operators A_l = I − β_l k̂_l k̂_lᵀ.
//!
//! With K = [k̂_1 … k̂_L] = QR, every A_l is I − β_l Q r_l r_lᵀ Qᵀ, where r_l is the l-th column of R. So the product is
//! Q S Qᵀ + (I − QQᵀ) with S = Π (I − β_l r_l r_lᵀ) of size min(L, d), and its singular values are those of S and ones.

use super::eigenvalues::NORM_TOLERANCE;
use super::rows::dot;
use super::small::{singular_values, triangular_factor};
use super::tokens::for_each_token;
use super::view::View;
use crate::cpu::simd::row::add_scaled;
use crate::error::Result;

/// Writes the singular values of the product, descending, to `output` (N, min(L, d)). The others are exactly 1,
/// because no direction reaches their vectors. `directions` (N, L, d) are k̂, `gates` (N, L, 1) are β.
pub fn product_singular_values(
    directions: &View,
    gates: &View,
    threads: usize,
    output: &mut [f64],
) -> Result<()> {
    let [tokens, rewrites, d] = directions.shape();
    gates.require_shape([tokens, rewrites, 1])?;
    let scratch = || Scratch::new(rewrites, d);
    let work = |scratch: &mut Scratch, token: usize, values: &mut [f64]| {
        load_rewrites(directions, gates, token, &mut scratch.directions, &mut scratch.gates)?;
        let factor = triangular_factor(&mut scratch.directions, d, &mut scratch.factor);
        multiply(factor, &scratch.gates, &mut scratch.product);
        singular_values(&mut scratch.product, values);
        Ok(())
    };
    for_each_token(tokens, threads, output, scratch, work)
}

struct Scratch {
    directions: Vec<f64>,
    gates: Vec<f64>,
    factor: Vec<f64>,
    product: Vec<f64>,
}

impl Scratch {
    fn new(rewrites: usize, d: usize) -> Scratch {
        let size = rewrites.min(d);
        Scratch {
            directions: vec![0.0; rewrites * d],
            gates: vec![0.0; rewrites],
            factor: vec![0.0; size * rewrites],
            product: vec![0.0; size * size],
        }
    }
}

/// Loads the directions and the gates of a token; refuses directions that are longer than 1.
pub fn load_rewrites(
    directions: &View,
    gates: &View,
    token: usize,
    rows: &mut [f64],
    betas: &mut [f64],
) -> Result<()> {
    let [_, rewrites, d] = directions.shape();
    directions.load_rows(token, rows)?;
    gates.load_column(token, 0, betas)?;
    for at in 0..rewrites {
        let row = &rows[at * d..][..d];
        let norm = dot(row, row).sqrt();
        if norm > 1.0 + NORM_TOLERANCE {
            return Err(directions.refuse(token, "be k̂ = k/√(|k|² + ε_k²), of norm 1 or less", norm));
        }
    }
    Ok(())
}

/// S = (I − β_L r_L r_Lᵀ) … (I − β_1 r_1 r_1ᵀ), where r are the columns of `factor`.
fn multiply(factor: &[f64], gates: &[f64], product: &mut [f64]) {
    let size = product.len().isqrt();
    product.fill(0.0);
    product.iter_mut().step_by(size + 1).for_each(|diagonal| *diagonal = 1.0);
    for (at, (direction, gate)) in factor.chunks_exact(size.max(1)).zip(gates).enumerate() {
        let reach = size.min(at + 1); // r_l is 0 below its l-th element, so S is still I beyond
        for column in product.chunks_exact_mut(size).take(reach) {
            let readout = dot(&direction[..reach], &column[..reach]);
            add_scaled(&mut column[..reach], -gate * readout, &direction[..reach]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers between −1 and 1 without a pattern.
    fn numbers(count: usize, seed: f64) -> Vec<f64> {
        (0..count).map(|i| ((i as f64 + seed) * 12.9898).sin() * 43_758.545_3 % 1.0).collect()
    }

    fn normalised(mut rows: Vec<f64>, d: usize) -> Vec<f64> {
        rows.chunks_exact_mut(d).for_each(super::super::rows::normalise);
        rows
    }

    /// A_L…A_1 (d, d) in columns, one rewrite after another.
    fn dense(directions: &[f64], gates: &[f64], d: usize) -> Vec<f64> {
        let mut product = vec![0.0; d * d];
        product.iter_mut().step_by(d + 1).for_each(|diagonal| *diagonal = 1.0);
        for (direction, gate) in directions.chunks_exact(d).zip(gates) {
            for column in product.chunks_exact_mut(d) {
                let readout = dot(direction, column);
                add_scaled(column, -gate * readout, direction);
            }
        }
        product
    }

    /// I − K C Kᵀ, the compact WY form (Schreiber and Van Loan, 1989): C is lower triangular, and its l-th row is
    /// β_l (e_l − Σ_j k̂_l·k̂_j C_j).
    fn compact_wy(directions: &[f64], gates: &[f64], d: usize) -> Vec<f64> {
        let rewrites = gates.len();
        let direction = |l: usize| &directions[l * d..][..d];
        let mut c = vec![vec![0.0; rewrites]; rewrites];
        for l in 0..rewrites {
            let (earlier, row) = c.split_at_mut(l);
            row[0][l] = gates[l];
            for (j, other) in earlier.iter().enumerate() {
                add_scaled(&mut row[0], -gates[l] * dot(direction(l), direction(j)), other);
            }
        }
        let mut product = vec![0.0; d * d];
        product.iter_mut().step_by(d + 1).for_each(|diagonal| *diagonal = 1.0);
        for (l, row) in c.iter().enumerate() {
            for (i, weight) in row.iter().enumerate() {
                for (column, scale) in product.chunks_exact_mut(d).zip(direction(i)) {
                    add_scaled(column, -weight * scale, direction(l));
                }
            }
        }
        product
    }

    #[test]
    fn the_small_product_has_the_singular_values_of_the_dense_one_and_of_its_compact_form() {
        for (rewrites, d) in [(1, 1), (1, 6), (5, 9), (9, 5), (6, 6), (24, 40)] {
            let mut directions = normalised(numbers(rewrites * d, 0.5), d);
            if rewrites > 4 {
                directions[..d].fill(0.0);
                directions.copy_within(d..2 * d, 3 * d); // parallel
            }
            let mut gates: Vec<f64> = numbers(rewrites, 7.5).iter().map(|x| 1.0 + x).collect();
            gates[rewrites / 2] = 2.0;
            gates[rewrites - 1] = 0.0;
            let directions_view = View::of_slice("directions", [1, rewrites, d], &directions).unwrap();
            let gates_view = View::of_slice("gates", [1, rewrites, 1], &gates).unwrap();
            let mut values = vec![f64::NAN; rewrites.min(d)];
            product_singular_values(&directions_view, &gates_view, 1, &mut values).unwrap();
            values.resize(d, 1.0);
            values.sort_by(|a, b| b.total_cmp(a));
            for mut product in [dense(&directions, &gates, d), compact_wy(&directions, &gates, d)] {
                let mut expected = vec![0.0; d];
                singular_values(&mut product, &mut expected);
                for (got, expected) in values.iter().zip(&expected) {
                    assert!((got - expected).abs() < 1e-13, "{rewrites} in {d}: {got} is not {expected}");
                }
            }
        }
    }
}
