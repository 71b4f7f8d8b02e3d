//! Widens whole parameters, once per call, and stores their gradients.

use super::buffer::{Buffer, Result};
use super::simd::convert::Accum;
use super::simd::features::{load, store};
use crate::problem::Sizes;
use crate::tensor::Tensor;

/// (d, m, K) → [K][d][m], so that each tap has a row like the state's.
pub fn taps_outermost<A: Accum>(weight: &Tensor, sizes: Sizes, taps: usize) -> Result<Buffer<A>> {
    let elements = widen(weight)?;
    if taps == 1 { Ok(elements) } else { transpose(&elements, sizes.d * sizes.m) }
}

/// (a, b) → (b, a), of which the first is `rows`.
pub fn transpose<A: Accum>(from: &[A], rows: usize) -> Result<Buffer<A>> {
    let columns = from.len() / rows.max(1);
    let mut to = Buffer::zeros(from.len())?;
    for (column, to) in to.chunks_exact_mut(rows.max(1)).enumerate() {
        to.iter_mut().zip(from[column..].iter().step_by(columns)).for_each(|(to, from)| *to = *from);
    }
    Ok(to)
}

/// Returns all elements of a tensor in the accumulation type.
pub fn widen<A: Accum>(tensor: &Tensor) -> Result<Buffer<A>> {
    let mut values = Buffer::zeros(tensor.len())?;
    load(tensor.rows(tensor.len()), 0, &mut values);
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
        store(&mut rows, 0, values);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_are_exchanged_and_back() {
        let from: Vec<f64> = (0..24).map(f64::from).collect();
        let to = transpose(&from, 6).unwrap();
        assert_eq!(to[..8], [0.0, 4.0, 8.0, 12.0, 16.0, 20.0, 1.0, 5.0]);
        assert_eq!(*transpose(&to, 4).unwrap(), *from);
    }
}
