//! Parameters of a read, widened once per call, and the sums of their gradients.

use std::ops::Range;

use fearless_simd::prelude::*;

use crate::cpu::buffer::{Buffer, Result};
use crate::cpu::simd::convert::Accum;
use crate::cpu::simd::row::{add_product, add_to_rows, update};
use crate::cpu::whole::{store_all, taps_outermost, transpose, widen, widen_or};
use crate::problem::{Gradients, ParameterSums, Read, Sizes};
use crate::tensor::Tensor;

/// A read's parameters in the accumulation type.
pub struct Weights<A> {
    /// [K][d][m]; None: identity
    pub compress: Option<Buffer<A>>,
    /// [d], ones if there is no weight
    pub norm: Buffer<A>,
    /// how many logits are of gates: n, or 0 without a gate
    pub gates: usize,
    /// [n][d]
    pub gate: Option<Buffer<A>>,
    /// [n]
    pub gate_bias: Buffer<A>,
    /// [n][m][d]
    pub value: Option<Buffer<A>>,
    /// [n][m]
    pub value_bias: Buffer<A>,
    /// the number of rows in `logit_weights`
    pub logit_rows: usize,
    /// γ ⊙ w_β, if there is a gate, then γ ⊙ W_v, or W_v if v reads x [0 … n·(1 + m)][d]. The logits are linear
    /// in x, so γ is folded in once.
    pub logit_weights: Buffer<A>,
}

impl<A: Accum> Weights<A> {
    /// `next` is n, the number of rewrites to come.
    pub fn new(read: &Read, sizes: Sizes, next: usize) -> Result<Weights<A>> {
        let Sizes { d, m, .. } = sizes;
        let norm = widen_or(&read.norm_weight, d, A::from_f64(1.0))?;
        let gate = read.gate_weight.as_ref().map(widen).transpose()?;
        let value = read.value_weight.as_ref().map(widen).transpose()?;
        let logit_weights = fold(&norm, gate.as_deref(), value.as_deref(), !read.value_from_compressed)?;
        let taps = |weight| taps_outermost(weight, sizes, read.taps());
        Ok(Weights {
            compress: read.compress.as_ref().map(taps).transpose()?,
            gates: gate.as_ref().map_or(0, |_| next),
            gate,
            gate_bias: widen_or(&read.gate_bias, next, A::default())?,
            value,
            value_bias: widen_or(&read.value_bias, next * m, A::default())?,
            logit_rows: logit_weights.len() / d,
            logit_weights,
            norm,
        })
    }

    /// Returns the number of logits computed from h; the rest are computed from x.
    pub fn logits_of_context(&self, read: &Read) -> usize {
        if read.value_from_compressed { self.gates } else { self.logit_rows }
    }
}

/// Concatenates the rows of both maps, times γ; those of the value are scaled only if it `reads` h.
fn fold<A: Accum>(norm: &[A], gate: Option<&[A]>, value: Option<&[A]>, reads: bool) -> Result<Buffer<A>> {
    let [gate, value] = [gate, value].map(Option::unwrap_or_default);
    let mut rows = Buffer::zeros(gate.len() + value.len())?;
    rows[..gate.len()].copy_from_slice(gate);
    rows[gate.len()..].copy_from_slice(value);
    let folded = if reads { rows.len() } else { gate.len() };
    for row in rows[..folded].chunks_exact_mut(norm.len()) {
        row.iter_mut().zip(norm).for_each(|(weight, norm)| *weight *= *norm);
    }
    Ok(rows)
}

/// Sums over the tokens of one part, from which the parameter gradients are computed.
pub struct Sums<A> {
    /// Σ dx ⊗ X' [K][d][m], if wanted
    pub(super) compress: Buffer<A>,
    /// Σ dh·x̂ [d], if wanted
    norm: Buffer<A>,
    /// Σ dl·x̂, or Σ dl·x for logits that read x, in the layout of [`Weights::logit_weights`], if any is `summed`;
    /// dl is δ_β or δ_v
    logit_weights: Buffer<A>,
    /// the rows of `logit_weights` that a wanted gradient depends on
    summed: Range<usize>,
    /// Σ dl
    biases: Buffer<A>,
}

impl<A: Accum> Sums<A> {
    pub fn zeros(read: &Read, weights: &Weights<A>, wanted: ParameterSums) -> Result<Sums<A>> {
        let d = weights.norm.len();
        let (gates, rows) = (weights.gates, weights.logit_rows);
        // dγ is completed from the sums of the logits that read h.
        let by_norm = |row: usize| wanted.norm && row < weights.logits_of_context(read);
        let start = if wanted.gate || by_norm(0) { 0 } else { gates };
        let summed = start..if wanted.value || by_norm(gates) { rows } else { gates };
        let length = |wanted: bool, length: usize| if wanted { length } else { 0 };
        Ok(Sums {
            compress: Buffer::zeros(length(
                wanted.compress,
                weights.compress.as_ref().map_or(0, |w| w.len()),
            ))?,
            norm: Buffer::zeros(length(wanted.norm, d))?,
            logit_weights: Buffer::zeros(length(!summed.is_empty(), rows * d))?,
            summed,
            biases: Buffer::zeros(rows)?,
        })
    }

    /// Adds a token's contribution. Of its logits the first `from_h` read h. Their gradients are overwritten.
    #[inline(always)]
    pub fn add_token<S: Simd>(
        &mut self,
        simd: S,
        [x, dh]: [&[A]; 2],
        rstd: A,
        grad_logits: &mut [A],
        from_h: usize,
    ) {
        self.biases.iter_mut().zip(&*grad_logits).for_each(|(sum, dl)| *sum += *dl);
        grad_logits[..from_h].iter_mut().for_each(|dl| *dl *= rstd);
        let summed = self.summed.clone();
        if !summed.is_empty() {
            let d = x.len();
            let rows = &mut self.logit_weights[summed.start * d..summed.end * d];
            add_to_rows(simd, rows, &grad_logits[summed], x);
        }
        let rstd = A::Vector::<S>::splat(simd, rstd);
        update(
            simd,
            &mut self.norm,
            [dh, x],
            #[inline(always)]
            |sum, [dh, x]| (rstd * dh).mul_add(x, sum),
        );
    }

    pub fn add(&mut self, other: &Sums<A>) {
        for (to, from) in [
            (&mut self.compress, &other.compress),
            (&mut self.norm, &other.norm),
            (&mut self.logit_weights, &other.logit_weights),
            (&mut self.biases, &other.biases),
        ] {
            to.iter_mut().zip(from).for_each(|(to, from)| *to += *from);
        }
    }

    /// Completes the gradients and stores them, rounded to their parameters' dtypes:
    /// dγ = Σ dh·x̂ + Σ_l w_l ⊙ Σ dl·x̂ and dw_l = γ ⊙ Σ dl·x̂, over the logits l that read h.
    pub fn store(
        mut self,
        read: &Read,
        weights: &Weights<A>,
        sizes: Sizes,
        to: &mut Gradients,
    ) -> Result<()> {
        let Sizes { d, .. } = sizes;
        let [gate, value] = [&weights.gate, &weights.value].map(|rows| rows.as_deref().unwrap_or_default());
        let rows = gate.chunks_exact(d).chain(value.chunks_exact(d));
        for (sum, row) in
            self.logit_weights.chunks_exact_mut(d).zip(rows).take(weights.logits_of_context(read))
        {
            add_product(&mut self.norm, row, sum);
            sum.iter_mut().zip(&weights.norm).for_each(|(sum, norm)| *sum *= *norm);
        }
        let (gate_weight, value_weight) =
            self.logit_weights.split_at(gate.len().min(self.logit_weights.len()));
        let (gate_bias, value_bias) = self.biases.split_at(gate.len() / d);
        if to.compress.is_some() {
            store_all(&mut to.compress, &transpose(&self.compress, read.taps())?);
        }
        store_all(&mut to.norm_weight, &self.norm);
        store_all(&mut to.gate_weight, gate_weight);
        store_all(&mut to.gate_bias, gate_bias);
        store_all(&mut to.value_weight, value_weight);
        store_all(&mut to.value_bias, value_bias);
        Ok(())
    }
}

/// Stores zeros in all parameters' gradients, for a call without tokens.
pub fn zero_parameters<A: Accum>(gradients: &mut Gradients) -> Result<()> {
    for gradient in [
        &mut gradients.compress,
        &mut gradients.norm_weight,
        &mut gradients.gate_weight,
        &mut gradients.gate_bias,
        &mut gradients.value_weight,
        &mut gradients.value_bias,
    ] {
        let zeros = Buffer::<A>::zeros(gradient.as_ref().map_or(0, Tensor::len))?;
        store_all(gradient, &zeros);
    }
    Ok(())
}

/// The slot of a token in a ring of K rows.
#[inline(always)]
pub fn slot(taps: usize, token: usize) -> usize {
    if taps == 1 { 0 } else { token % taps }
}
