//! Arithmetic on rows of float64, with the widest vectors of the machine.

use fearless_simd::prelude::*;

use crate::cpu::simd::dispatch::{WithSimd, dispatch};
use crate::cpu::simd::interleaved::Interleaved;
use crate::cpu::simd::row::some_dots;

/// a · b, for code that is compiled for `S` already.
#[inline(always)]
pub fn dot_within<S: Simd>(simd: S, a: &[f64], b: &[f64]) -> f64 {
    let [product] = some_dots(simd, a, [b]);
    product
}

/// a · b
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    dispatch(Dot { a, b })
}

struct Dot<'a> {
    a: &'a [f64],
    b: &'a [f64],
}

impl WithSimd for Dot<'_> {
    type Output = f64;
    #[inline(always)]
    fn run<S: Interleaved>(self, simd: S) -> f64 {
        dot_within(simd, self.a, self.b)
    }
}

/// Divides a row by its norm; zeros stay. The squares of its numbers may overflow or underflow.
pub fn normalise(row: &mut [f64]) {
    scale_to_one(row);
    let norm = dot(row, row).sqrt();
    if norm > 0.0 {
        row.iter_mut().for_each(|number| *number /= norm);
    }
}

/// Divides numbers by the largest absolute value; zeros stay.
pub fn scale_to_one(numbers: &mut [f64]) {
    let largest = numbers.iter().fold(0.0, |largest: f64, number| largest.max(number.abs()));
    if largest > 0.0 {
        numbers.iter_mut().for_each(|number| *number /= largest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_any_size_are_normalised() {
        for scale in [1e-300, 1.0, 1e300] {
            let mut row = [3.0 * scale, 0.0, -4.0 * scale];
            normalise(&mut row);
            assert!(row.iter().zip([0.6, 0.0, -0.8]).all(|(got, expected)| (got - expected).abs() < 1e-15));
        }
        let mut zeros = [0.0; 5];
        normalise(&mut zeros);
        assert_eq!(zeros, [0.0; 5]);
    }
}
