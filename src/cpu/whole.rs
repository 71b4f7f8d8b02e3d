//! Widens whole parameters, once per call, and stores their gradients.

use super::buffer::{Buffer, Result};
use super::simd::channels::{load, store};
use super::simd::convert::Accum;
use crate::problem::Sizes;
use crate::tensor::Tensor;

/// (d, m, K) → [K][m][d], so that each tap has a contiguous row per channel.
pub fn taps_outermost<A: Accum>(weight: &Tensor, sizes: Sizes, taps: usize) -> Result<Buffer<A>> {
    reverse_axes(&widen(weight)?, [sizes.d, sizes.m, taps])
}

/// [a][b][c] → [c][b][a]
pub fn reverse_axes<A: Accum>(from: &[A], [a, b, c]: [usize; 3]) -> Result<Buffer<A>> {
    let mut to = Buffer::zeros(from.len())?;
    for (row, to) in to.chunks_exact_mut(a).enumerate() {
        let (j, i) = (row / b, row % b);
        to.iter_mut().zip(from[i * c + j..].iter().step_by(b * c)).for_each(|(to, from)| *to = *from);
    }
    Ok(to)
}

/// Returns all elements of a tensor in the accumulation type.
pub fn widen<A: Accum>(tensor: &Tensor) -> Result<Buffer<A>> {
    let mut values = Buffer::zeros(tensor.len())?;
    load(tensor.rows(tensor.len()), 0, 1, &mut values);
    Ok(values)
}

/// Returns the same, or `len` times `otherwise` without a tensor.
pub fn widen_or<A: Accum>(tensor: &Option<Tensor>, len: usize, otherwise: A) -> Result<Buffer<A>> {
    if let Some(tensor) = tensor {
        return widen(tensor);
    }
    let mut values = Buffer::zeros(len)?;
    values.fill(otherwise);
    Ok(values)
}

/// Stores a whole gradient, rounded to the parameter's dtype.
pub fn store_all<A: Accum>(output: &mut Option<Tensor>, values: &[A]) {
    let Some(tensor) = output else { return };
    let width = tensor.len();
    if let Some(mut rows) = tensor.split_rows(width, &[0, 1]).pop() {
        store(&mut rows, 0, 1, values);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_are_reversed_and_back() {
        let from: Vec<f64> = (0..24).map(f64::from).collect();
        let to = reverse_axes(&from, [2, 3, 4]).unwrap();
        assert_eq!(to[..8], [0.0, 12.0, 4.0, 16.0, 8.0, 20.0, 1.0, 13.0]);
        assert_eq!(*reverse_axes(&to, [4, 3, 2]).unwrap(), *from);
    }
}
