//! Parameters of a read, widened once per call, and the sums of their gradients.

use super::buffer::Buffer;
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
    pub value_bias: Vec<A>,
    /// γ ⊙ w_β: the logit is linear in x, so γ is folded in once
    pub gate_folded: Buffer<A>,
    /// γ ⊙ W_v, or W_v where v reads x
    pub value_folded: Buffer<A>,
}

impl<A: Accum> Weights<A> {
    pub fn new(read: &Read, sizes: Sizes) -> Weights<A> {
        let Sizes { d, m, .. } = sizes;
        let norm = widen_or(&read.norm_weight, vec![A::from_f64(1.0); d]);
        let gate: Option<Vec<A>> = read.gate_weight.as_ref().map(widen);
        let value: Option<Vec<A>> = read.value_weight.as_ref().map(widen);
        let times_norm = |row: &[A]| -> Vec<A> { row.iter().zip(&norm).map(|(w, g)| *w * *g).collect() };
        let gate_folded = gate.as_deref().map_or(Vec::new(), times_norm);
        let value_folded = match &value {
            None => Vec::new(),
            Some(value) if read.value_from_compressed => value.clone(),
            Some(value) => value.chunks_exact(d).flat_map(times_norm).collect(),
        };
        Weights {
            compress: read.compress.as_ref().map(|weight| taps_outermost(weight, sizes, read.taps())),
            gate_bias: widen_or(&read.gate_bias, vec![A::default()])[0],
            value_bias: widen_or(&read.value_bias, vec![A::default(); m]),
            norm: norm.into(),
            gate: gate.map(Buffer::from),
            value: value.map(Buffer::from),
            gate_folded: gate_folded.into(),
            value_folded: value_folded.into(),
        }
    }
}

/// (d, m, K) → [K][m][d]: the kernels walk one tap after the other, each a contiguous row per channel.
pub fn taps_outermost<A: Accum>(weight: &Tensor, sizes: Sizes, taps: usize) -> Buffer<A> {
    swap_outer(&transpose(&widen(weight), sizes.d, sizes.m * taps), sizes.m, taps).into()
}

/// [a][b][d] → [b][a][d]
pub fn swap_outer<A: Accum>(rows: &[A], a: usize, b: usize) -> Vec<A> {
    let d = rows.len() / (a * b);
    let order = (0..b).flat_map(|j| (0..a).map(move |i| (i * b + j) * d));
    order.flat_map(|first| rows[first..first + d].iter().copied()).collect()
}

/// (d, n) → [n][d]
pub fn transpose<A: Accum>(matrix: &[A], d: usize, n: usize) -> Vec<A> {
    (0..n).flat_map(|j| (0..d).map(move |i| matrix[i * n + j])).collect()
}

/// All elements of a tensor in the accumulation type.
pub fn widen<A: Accum>(tensor: &Tensor) -> Vec<A> {
    let mut values = vec![A::default(); tensor.len()];
    load(tensor.rows(tensor.len()), 0, 1, &mut values);
    values
}

fn widen_or<A: Accum>(tensor: &Option<Tensor>, otherwise: Vec<A>) -> Vec<A> {
    tensor.as_ref().map_or(otherwise, widen)
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
    pub fn zeros(read: &Read, sizes: Sizes) -> Sums<A> {
        let zeros = |tensor: &Option<Tensor>| Buffer::zeros(tensor.as_ref().map_or(0, Tensor::len));
        Sums {
            compress: zeros(&read.compress),
            norm: zeros(&read.norm_weight),
            gate: zeros(&read.gate_weight),
            gate_bias: A::default(),
            value: zeros(&read.value_weight),
            value_bias: Buffer::zeros(if read.value_weight.is_some() { sizes.m } else { 0 }),
        }
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
