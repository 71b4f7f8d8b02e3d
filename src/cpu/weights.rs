//! Parameters of a read, widened once per call, and the sums of their gradients.

use super::buffer::{Buffer, Result};
use super::convert::Accum;
use super::simd::{load, store};
use crate::problem::{Read, Sizes};
use crate::tensor::Tensor;

/// A read's parameters in the accumulation type, every one a run of contiguous rows of d.
pub struct Weights<A> {
    /// [K][m][d]; None: identity
    pub compress: Option<Buffer<A>>,
    /// [d], ones where there is no weight
    pub norm: Buffer<A>,
    /// [d]
    pub gate: Option<Buffer<A>>,
    pub gate_bias: A,
    /// [m][d]
    pub value: Option<Buffer<A>>,
    /// [m]
    pub value_bias: Buffer<A>,
    /// γ ⊙ w_β: the logit is linear in x, so γ is folded in once
    pub gate_folded: Buffer<A>,
    /// γ ⊙ W_v, or W_v where v reads x
    pub value_folded: Buffer<A>,
}

impl<A: Accum> Weights<A> {
    pub fn new(read: &Read, sizes: Sizes) -> Result<Weights<A>> {
        let Sizes { d, m, .. } = sizes;
        let norm = widen_or(&read.norm_weight, d, A::from_f64(1.0))?;
        let folded = |weight: &Option<Tensor>, by_norm: bool| -> Result<Buffer<A>> {
            let mut rows = weight.as_ref().map_or(Buffer::zeros(0), widen)?;
            for row in rows.chunks_exact_mut(d).filter(|_| by_norm) {
                row.iter_mut().zip(&norm).for_each(|(weight, norm)| *weight = *weight * *norm);
            }
            Ok(rows)
        };
        let taps = |weight| taps_outermost(weight, sizes, read.taps());
        Ok(Weights {
            compress: read.compress.as_ref().map(taps).transpose()?,
            gate: read.gate_weight.as_ref().map(widen).transpose()?,
            gate_bias: widen_or(&read.gate_bias, 1, A::default())?[0],
            value: read.value_weight.as_ref().map(widen).transpose()?,
            value_bias: widen_or(&read.value_bias, m, A::default())?,
            gate_folded: folded(&read.gate_weight, true)?,
            value_folded: folded(&read.value_weight, !read.value_from_compressed)?,
            norm,
        })
    }
}

/// (d, m, K) → [K][m][d]: the kernels walk one tap after the other, each a contiguous row per channel.
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

/// All elements of a tensor in the accumulation type.
fn widen<A: Accum>(tensor: &Tensor) -> Result<Buffer<A>> {
    let mut values = Buffer::zeros(tensor.len())?;
    load(tensor.rows(tensor.len()), 0, 1, &mut values);
    Ok(values)
}

/// The same, or `len` times `otherwise` without a tensor.
fn widen_or<A: Accum>(tensor: &Option<Tensor>, len: usize, otherwise: A) -> Result<Buffer<A>> {
    if let Some(tensor) = tensor {
        return widen(tensor);
    }
    let mut values = Buffer::zeros(len)?;
    values.fill(otherwise);
    Ok(values)
}

/// Sums of parameter gradients over the tokens of one part, in the layout of [`Weights`].
pub struct Sums<A> {
    pub compress: Buffer<A>,
    pub norm: Buffer<A>,
    pub gate: Buffer<A>,
    pub gate_bias: A,
    pub value: Buffer<A>,
    pub value_bias: Buffer<A>,
}

impl<A: Accum> Sums<A> {
    pub fn zeros(read: &Read, sizes: Sizes) -> Result<Sums<A>> {
        let zeros = |tensor: &Option<Tensor>| Buffer::zeros(tensor.as_ref().map_or(0, Tensor::len));
        Ok(Sums {
            compress: zeros(&read.compress)?,
            norm: zeros(&read.norm_weight)?,
            gate: zeros(&read.gate_weight)?,
            gate_bias: A::default(),
            value: zeros(&read.value_weight)?,
            value_bias: Buffer::zeros(if read.value_weight.is_some() { sizes.m } else { 0 })?,
        })
    }

    pub fn add(&mut self, other: &Sums<A>) {
        for (to, from) in [
            (&mut self.compress, &other.compress),
            (&mut self.norm, &other.norm),
            (&mut self.gate, &other.gate),
            (&mut self.value, &other.value),
            (&mut self.value_bias, &other.value_bias),
        ] {
            to.iter_mut().zip(from).for_each(|(to, from)| *to += *from);
        }
        self.gate_bias += other.gate_bias;
    }
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
