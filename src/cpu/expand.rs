//! `expand`: x (…, d) → X (…, d, m), X_t,ij = Σ_s w_ijs x_{t−s,i}, or repetition without a weight.
//!
//! Elements moved per token: d in and m·d out forward, m·d + d in and d out backward. The K taps are read from
//! cache.

use std::ops::Range;

use fearless_simd::Simd;

use super::buffer::{Buffer, Result};
use super::parallel;
use super::partition::{Documents, partition, useful_threads};
use super::simd::channels::{load, store, view};
use super::simd::convert::Accum;
use super::simd::dispatch::{WithSimd, dispatch};
use super::simd::row::{add_product, mix};
use super::whole::{reverse_axes, store_all, taps_outermost};
use crate::problem::{Expand, Sizes};
use crate::tensor::{RowsMut, Tensor};

/// Leaves x of the last K − 1 tokens of every sequence to the next call.
pub fn leave<A: Accum>(expand: &Expand, new_before: &mut Option<Tensor>) -> Result<()> {
    let Sizes { d, time, sequences, .. } = expand.sizes;
    let Some(new_before) = new_before.as_mut().filter(|tensor| !tensor.is_empty()) else { return Ok(()) };
    let kept = expand.taps() - 1;
    let documents = Documents::new(expand.sizes, &expand.document_starts);
    let mut row = Buffer::<A>::zeros(d)?;
    let Some(mut to) = new_before.split_rows(d, &[0, sequences * kept]).pop() else { return Ok(()) };
    for sequence in 0..sequences {
        let last = (sequence + 1) * time - 1;
        let start = documents.around(last).start;
        for back in 0..kept {
            match row_before(expand, documents, start, last, back) {
                Some((from, at)) => load(from.rows(d), at, 1, &mut row),
                None => row.fill(A::default()),
            }
            store(&mut to, sequence * kept + kept - 1 - back, 1, &row);
        }
    }
    Ok(())
}

/// Returns the tensor and the row of x of a token that lies `back` tokens before `token`, whose document starts at
/// `start`; None for zeros.
#[inline(always)]
fn row_before<'e>(
    expand: &'e Expand,
    documents: Documents<'_>,
    start: usize,
    token: usize,
    back: usize,
) -> Option<(&'e Tensor, usize)> {
    if back > token - start && !documents.may_continue(start) {
        return None;
    }
    expand.row_before(token, back)
}

/// Computes `state` from `x`.
pub fn forward<A: Accum>(expand: &Expand, state: &mut Tensor, threads: usize) -> Result<()> {
    let Sizes { d, m, .. } = expand.sizes;
    let threads = useful_threads(state.len(), threads);
    let bounds = partition(expand.sizes.tokens(), 1); // x is an input, so no part repeats any work
    let taps = |weight| taps_outermost::<A>(weight, expand.sizes, expand.taps());
    let weight = expand.weight.as_ref().map(taps).transpose()?;
    let outputs = state.split_rows(m * d, &bounds);
    let parts = bounds.windows(2).zip(outputs).map(|(pair, state)| {
        let tokens = pair[0]..pair[1];
        Forward { expand, weight: weight.as_deref(), tokens, state }
    });
    parallel::for_each(parts.collect(), threads, dispatch)
}

struct Forward<'a, A> {
    expand: &'a Expand,
    weight: Option<&'a [A]>,
    tokens: Range<usize>,
    state: RowsMut<'a>,
}

impl<A: Accum> WithSimd for Forward<'_, A> {
    type Output = Result<()>;
    #[inline(always)]
    fn run<S: Simd>(mut self, _: S) -> Result<()> {
        if self.tokens.is_empty() {
            return Ok(());
        }
        let Sizes { d, m, .. } = self.expand.sizes;
        let documents = Documents::new(self.expand.sizes, &self.expand.document_starts);
        let mut row = Buffer::<A>::zeros(d)?;
        let mut channels = Buffer::<A>::zeros(m * d)?;
        for (tokens, document) in documents.within(self.tokens.clone()) {
            for token in tokens {
                channels.fill(A::default());
                for tap in 0..self.expand.taps() {
                    let at = row_before(self.expand, documents, document.start, token, tap);
                    let Some((from, at)) = at else { break };
                    let row = view(from.rows(d), at, 1, &mut row);
                    for (j, channel) in channels.chunks_exact_mut(d).enumerate() {
                        match self.weight {
                            Some(weight) => mix(channel, true, &weight[(tap * m + j) * d..][..d], row),
                            None => channel.copy_from_slice(row),
                        }
                    }
                }
                store(&mut self.state, token, m, &channels);
            }
        }
        Ok(())
    }
}

/// Computes dx and, if there is a weight, dw from dX (`grad`).
pub fn backward<A: Accum>(
    expand: &Expand,
    grad: &Tensor,
    grad_x: &mut Tensor,
    grad_weight: &mut Option<Tensor>,
    threads: usize,
) -> Result<()> {
    let Sizes { d, m, .. } = expand.sizes;
    let taps = expand.taps();
    let threads = useful_threads(grad.len(), threads);
    let bounds = partition(expand.sizes.tokens(), taps);
    let outermost = |weight| taps_outermost::<A>(weight, expand.sizes, taps);
    let weight = expand.weight.as_ref().map(outermost).transpose()?;
    let mut sums: Vec<Option<Buffer<A>>> = bounds[1..].iter().map(|_| None).collect();
    let sums_weight = grad_weight.is_some();
    let outputs = grad_x.split_rows(d, &bounds);
    let parts = bounds.windows(2).zip(outputs).zip(&mut sums).map(|((pair, grad_x), sums)| {
        let tokens = pair[0]..pair[1];
        Backward { expand, weight: weight.as_deref(), grad, tokens, grad_x, sums_weight, sums }
    });
    parallel::for_each(parts.collect(), threads, dispatch)?;
    if !sums_weight {
        return Ok(());
    }
    let mut sums = sums.into_iter().flatten();
    let no_tokens = || Buffer::zeros(weight.as_ref().map_or(0, |weight| weight.len()));
    let mut total = sums.next().map_or_else(no_tokens, Ok)?;
    sums.for_each(|part| total.iter_mut().zip(&part).for_each(|(to, from)| *to += *from));
    store_all(grad_weight, &reverse_axes(&total, [taps, m, d])?);
    Ok(())
}

struct Backward<'a, A> {
    expand: &'a Expand,
    weight: Option<&'a [A]>,
    grad: &'a Tensor,
    tokens: Range<usize>,
    grad_x: RowsMut<'a>,
    sums_weight: bool,
    sums: &'a mut Option<Buffer<A>>,
}

impl<A: Accum> WithSimd for Backward<'_, A> {
    type Output = Result<()>;
    #[inline(always)]
    fn run<S: Simd>(mut self, _: S) -> Result<()> {
        if self.tokens.is_empty() {
            return Ok(());
        }
        let Sizes { d, m, .. } = self.expand.sizes;
        let documents = Documents::new(self.expand.sizes, &self.expand.document_starts);
        let taps = self.expand.taps();
        let mut row = Buffer::<A>::zeros(d)?;
        // dX of this token and the K−1 after it, token t in slot t mod K, so that each is widened once.
        let mut ring = Buffer::<A>::zeros(taps * m * d)?;
        let weight = self.weight.filter(|_| self.sums_weight);
        *self.sums = weight.map(|weight| Buffer::zeros(weight.len())).transpose()?;
        for (tokens, document) in documents.within(self.tokens.clone()) {
            let last = document.end.min(tokens.end + taps - 1);
            for token in (tokens.start..last).rev() {
                let slot = token % taps * m * d;
                load(self.grad.rows(m * d), token, m, &mut ring[slot..slot + m * d]);
                if token >= tokens.end {
                    continue;
                }
                self.add_weight_grad(token, token - document.start + 1, &ring[slot..slot + m * d], &mut row);
                row.fill(A::default());
                for tap in 0..(document.end - token).min(taps) {
                    let grads = &ring[(token + tap) % taps * m * d..][..m * d];
                    match self.weight {
                        Some(weight) => mix(&mut row, true, &weight[tap * m * d..][..m * d], grads),
                        None => grads.chunks_exact(d).for_each(|grad| {
                            row.iter_mut().zip(grad).for_each(|(to, from)| *to += *from);
                        }),
                    }
                }
                store(&mut self.grad_x, token, 1, &row);
            }
        }
        Ok(())
    }
}

impl<A: Accum> Backward<'_, A> {
    /// dw_s += dX_t ⊗ x_{t−s} for all s < `before`, the number of tokens from the document's start to t.
    #[inline(always)]
    fn add_weight_grad(&mut self, token: usize, before: usize, grads: &[A], row: &mut [A]) {
        let Some(sums) = self.sums else { return };
        let d = row.len();
        for tap in 0..before.min(self.expand.taps()) {
            let row = view(self.expand.x.rows(d), token - tap, 1, row);
            let sums = &mut sums[tap * grads.len()..][..grads.len()];
            for (sum, grad) in sums.chunks_exact_mut(d).zip(grads.chunks_exact(d)) {
                add_product(sum, grad, row);
            }
        }
    }
}
