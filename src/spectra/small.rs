//! Decompositions of one token's matrices: the triangular factor and the singular values.
//!
//! A matrix is a slice with its columns one after another. Neither decomposition squares the matrix, as a Gram matrix
//! would, so that errors stay in the order of float64's rounding relative to the largest singular value, for parallel and
//! zero columns, too.

use super::rows::dot_within;
use crate::cpu::simd::dispatch::{WithSimd, dispatch};
use crate::cpu::simd::interleaved::Interleaved;
use crate::cpu::simd::row::{add_scaled, some_dots};

/// The R of K = QR for K (height, columns), by Householder reflections (Golub and Van Loan, Matrix Computations, 4th
/// edition, algorithm 5.2.1). Overwrites K. Writes R, (min(height, columns), columns) with zeros below the diagonal, to
/// the beginning of `factor`, which it also returns.
pub fn triangular_factor<'f>(matrix: &mut [f64], height: usize, factor: &'f mut [f64]) -> &'f mut [f64] {
    let columns = matrix.len().checked_div(height).unwrap_or(0);
    let rows = height.min(columns);
    dispatch(Triangular { matrix, height, rows });
    let factor = &mut factor[..rows * columns];
    for (column, to) in factor.chunks_exact_mut(rows.max(1)).enumerate() {
        let kept = rows.min(column + 1);
        to[..kept].copy_from_slice(&matrix[column * height..][..kept]);
        to[kept..].fill(0.0);
    }
    factor
}

struct Triangular<'a> {
    matrix: &'a mut [f64],
    height: usize,
    rows: usize,
}

impl WithSimd for Triangular<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Interleaved>(self, simd: S) {
        let Triangular { matrix, height, rows } = self;
        for at in 0..rows {
            let (done, rest) = matrix.split_at_mut((at + 1) * height);
            let mirror = &mut done[at * height + at..];
            let norm = dot_within(simd, mirror, mirror).sqrt();
            if norm == 0.0 {
                continue;
            }
            // The reflection I − 2uuᵀ/|u|² takes the column x to −sign(x₀)|x| e₀, where u = x + sign(x₀)|x| e₀.
            let diagonal = -norm.copysign(mirror[0]);
            let scale = -1.0 / (norm * (norm + mirror[0].abs())); // −2/|u|²
            mirror[0] -= diagonal;
            for column in rest.chunks_exact_mut(height) {
                let column = &mut column[at..];
                let product = dot_within(simd, mirror, column);
                add_scaled(column, scale * product, mirror);
            }
            mirror[0] = diagonal;
        }
    }
}

/// Fewer sweeps than these are needed in practice: 4 to 10.
const MOST_SWEEPS: usize = 40;

/// Writes the singular values of a matrix, descending, to `values`: one for each column. There may not be more columns
/// than rows. Overwrites the matrix.
///
/// One-sided Jacobi rotations (Demmel and Veselić, SIAM J. Matrix Anal. Appl. 13(4), 1992): they make the columns
/// orthogonal in pairs, and the norms that remain are the singular values.
pub fn singular_values(matrix: &mut [f64], values: &mut [f64]) {
    if values.is_empty() {
        return;
    }
    let height = matrix.len() / values.len();
    assert!(values.len() <= height, "more columns than rows");
    dispatch(Jacobi { matrix, height, values });
    values.sort_unstable_by(|a, b| b.total_cmp(a));
}

struct Jacobi<'a> {
    matrix: &'a mut [f64],
    height: usize,
    values: &'a mut [f64],
}

impl WithSimd for Jacobi<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Interleaved>(self, simd: S) {
        let Jacobi { matrix, height, values } = self;
        let tolerance = f64::EPSILON * (height as f64).sqrt();
        for _ in 0..MOST_SWEEPS {
            let mut rotated = false;
            for p in 0..values.len() {
                let (before, rest) = matrix.split_at_mut((p + 1) * height);
                let first = &mut before[p * height..];
                for second in rest.chunks_exact_mut(height) {
                    let [product, square] = some_dots(simd, first, [&*second, &*first]);
                    let other = dot_within(simd, second, second);
                    if product.abs() > tolerance * square.sqrt() * other.sqrt() {
                        rotate(first, second, square, other, product);
                        rotated = true;
                    }
                }
            }
            if !rotated {
                break;
            }
        }
        for (value, column) in values.iter_mut().zip(matrix.chunks_exact(height)) {
            *value = dot_within(simd, column, column).sqrt();
        }
    }
}

/// Makes two columns orthogonal, given their squares and their product; the longer one becomes the first.
#[inline(always)]
fn rotate(first: &mut [f64], second: &mut [f64], square: f64, other: f64, product: f64) {
    if other > square {
        first.swap_with_slice(second);
    }
    let ratio = (square - other).abs() / (2.0 * product); // cot 2θ
    let tangent = 1.0_f64.copysign(ratio) / (ratio.abs() + ratio.hypot(1.0));
    let cosine = 1.0 / tangent.hypot(1.0);
    let sine = tangent * cosine;
    for (a, b) in first.iter_mut().zip(second) {
        (*a, *b) = (cosine * *a + sine * *b, cosine * *b - sine * *a);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_close(got: &[f64], expected: &[f64]) {
        assert_eq!(got.len(), expected.len());
        for (got, expected) in got.iter().zip(expected) {
            assert!((got - expected).abs() < 1e-14 * expected.abs().max(1.0), "{got} is not {expected}");
        }
    }

    fn values_of(matrix: &[f64], columns: usize) -> Vec<f64> {
        let mut values = vec![0.0; columns];
        singular_values(&mut matrix.to_vec(), &mut values);
        values
    }

    /// The products of all pairs of columns.
    fn gram(matrix: &[f64], height: usize) -> Vec<f64> {
        let columns = || matrix.chunks_exact(height);
        columns().flat_map(|a| columns().map(|b| a.iter().zip(b).map(|(a, b)| a * b).sum())).collect()
    }

    #[test]
    fn singular_values_are_those_known() {
        assert_close(&values_of(&[3.0, 4.0], 1), &[5.0]);
        assert_close(&values_of(&[3.0, 4.0, 0.0, 5.0], 2), &[45.0_f64.sqrt(), 5.0_f64.sqrt()]);
        assert_close(&values_of(&[0.0, 2.0, -3.0, 0.0], 2), &[3.0, 2.0]);
        assert_close(&values_of(&[1.0; 12], 3), &[12.0_f64.sqrt(), 0.0, 0.0]); // equal columns
        assert_close(&values_of(&[0.0; 9], 3), &[0.0; 3]);
        assert_close(&values_of(&[], 0), &[]);
    }

    #[test]
    fn the_triangular_factor_has_the_products_of_the_columns() {
        for (height, columns) in [(7, 3), (3, 7), (4, 4), (1, 5), (5, 1), (40, 24)] {
            let mut matrix: Vec<f64> = (0..height * columns).map(|i| (i as f64 * 1.7).sin()).collect();
            matrix[..height].fill(0.0); // a column of zeros
            if columns > 3 {
                matrix.copy_within(2 * height..3 * height, 3 * height); // parallel ones
            }
            let expected = gram(&matrix, height);
            let mut factor = vec![f64::NAN; columns * columns.min(height)];
            let rows = height.min(columns);
            let factor = triangular_factor(&mut matrix, height, &mut factor);
            assert_close(&gram(factor, rows), &expected);
            for (column, numbers) in factor.chunks_exact(rows).enumerate() {
                assert!(numbers.iter().skip(column + 1).all(|number| *number == 0.0));
            }
        }
    }
}
