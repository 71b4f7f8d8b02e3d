//! `expand`: x (…, d) → X (…, d, m), X_t,ij = Σ_s w_ijs x_{t−s,i}, or repetition without a weight.
//!
//! Elements moved per token: d in and m·d out forward, m·d + d in and d out backward. The K taps are read from
//! cache.

use std::ops::Range;

use super::buffer::{Buffer, Result};
use super::parallel;
use super::partition::{Documents, partition, useful_threads};
use super::simd::convert::Accum;
use super::simd::dispatch::{WithSimd, dispatch};
use super::simd::features::{load, store, store_target, target};
use super::simd::interleaved::Interleaved;
use super::state::{Join, Mix, Stored, Terms};
use super::whole::{store_all, taps_outermost, transpose, widen_or};
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
                Some((from, at)) => load(from.rows(d), at, &mut row),
                None => row.fill(A::default()),
            }
            store(&mut to, sequence * kept + kept - 1 - back, &row);
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

/// x of a token and of those before it that its weights reach, in a ring [K][d]: x_{t−s} is in slot (s − t) mod K.
struct Taps<A> {
    x: Buffer<A>,
    /// K
    ring: usize,
    /// the slot of x_t
    slot: usize,
    /// how many rows there are, from x_t backwards
    count: usize,
}

impl<A: Accum> Taps<A> {
    fn new(expand: &Expand) -> Result<Taps<A>> {
        let ring = expand.taps();
        Ok(Taps { x: Buffer::zeros(ring * expand.sizes.d)?, ring, slot: 0, count: 0 })
    }

    /// Goes to a token of the document that starts at `start`. `loaded` are the rows that are there already, counted from
    /// the token's own one backwards.
    #[inline(always)]
    fn go_to(
        &mut self,
        expand: &Expand,
        documents: Documents<'_>,
        start: usize,
        token: usize,
        loaded: Range<usize>,
    ) {
        let d = expand.sizes.d;
        self.slot = (self.ring - token % self.ring) % self.ring;
        self.count = 0;
        for back in 0..self.ring {
            let Some((from, at)) = row_before(expand, documents, start, token, back) else { break };
            self.count += 1;
            if !loaded.contains(&back) {
                let slot = (self.slot + back) % self.ring;
                load(from.rows(d), at, &mut self.x[slot * d..][..d]);
            }
        }
    }
}

/// Computes `state` from `x`.
pub fn forward<T: Stored>(expand: &Expand, state: &mut Tensor, threads: usize) -> Result<()> {
    let Sizes { d, m, .. } = expand.sizes;
    let threads = useful_threads(state.len(), threads);
    let bounds = partition(expand.sizes.tokens(), 1); // x is an input, so no part repeats any work
    let taps = |weight| taps_outermost::<T::Accum>(weight, expand.sizes, expand.taps());
    let weight = expand.weight.as_ref().map(taps).transpose()?;
    let outputs = state.split_rows(m * d, &bounds);
    let parts = bounds.windows(2).zip(outputs).map(|(pair, state)| {
        let tokens = pair[0]..pair[1];
        Forward::<T> { expand, weight: weight.as_deref(), tokens, state }
    });
    parallel::for_each(parts.collect(), threads, dispatch)
}

struct Forward<'a, T: Stored> {
    expand: &'a Expand,
    weight: Option<&'a [T::Accum]>,
    tokens: Range<usize>,
    state: RowsMut<'a>,
}

impl<T: Stored> WithSimd for Forward<'_, T> {
    type Output = Result<()>;
    const AVX512: bool = T::Accum::AVX512;
    #[inline(always)]
    fn run<S: Interleaved>(mut self, simd: S) -> Result<()> {
        if self.tokens.is_empty() {
            return Ok(());
        }
        let Sizes { d, m, .. } = self.expand.sizes;
        let arithmetic = T::arithmetic(simd, m, true);
        let documents = Documents::new(self.expand.sizes, &self.expand.document_starts);
        let mut x = Taps::new(self.expand)?;
        let mut scratch = Buffer::zeros(m * d)?;
        for (tokens, document) in documents.within(self.tokens.clone()) {
            for token in tokens.clone() {
                let loaded = if token == tokens.start { 0..0 } else { 1..x.ring };
                x.go_to(self.expand, documents, document.start, token, loaded);
                let (weight, dx) = (self.weight, &*x.x);
                let (ring, slot, taps) = (x.ring, x.slot, x.count);
                let to = target(&mut self.state, token, &mut scratch);
                arithmetic.join(&mut Join { weight, dx, ring, slot, taps, to, ..Join::none(d) });
                store_target(&mut self.state, token, &scratch);
            }
        }
        Ok(())
    }
}

/// Computes dx and, if there is a weight, dw from dX (`grad`).
pub fn backward<T: Stored>(
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
    let weight: Buffer<T::Accum> = match &expand.weight {
        Some(weight) => taps_outermost(weight, expand.sizes, taps)?,
        None => widen_or(&None, d * m, T::Accum::from_f64(1.0))?,
    };
    let mut sums: Vec<Option<Buffer<T::Accum>>> = bounds[1..].iter().map(|_| None).collect();
    let sums_weight = grad_weight.is_some();
    let outputs = grad_x.split_rows(d, &bounds);
    let parts = bounds.windows(2).zip(outputs).zip(&mut sums).map(|((pair, grad_x), sums)| {
        let tokens = pair[0]..pair[1];
        Backward::<T> { expand, weight: &weight, grad, tokens, grad_x, sums_weight, sums }
    });
    parallel::for_each(parts.collect(), threads, dispatch)?;
    if !sums_weight {
        return Ok(());
    }
    let mut sums = sums.into_iter().flatten();
    let mut total = sums.next().map_or_else(|| Buffer::zeros(weight.len()), Ok)?;
    sums.for_each(|part| total.iter_mut().zip(&part).for_each(|(to, from)| *to += *from));
    store_all(grad_weight, &transpose(&total, taps)?);
    Ok(())
}

struct Backward<'a, T: Stored> {
    expand: &'a Expand,
    weight: &'a [T::Accum],
    grad: &'a Tensor,
    tokens: Range<usize>,
    grad_x: RowsMut<'a>,
    sums_weight: bool,
    sums: &'a mut Option<Buffer<T::Accum>>,
}

impl<T: Stored> WithSimd for Backward<'_, T> {
    type Output = Result<()>;
    const AVX512: bool = T::Accum::AVX512;
    #[inline(always)]
    fn run<S: Interleaved>(mut self, simd: S) -> Result<()> {
        if self.tokens.is_empty() {
            return Ok(());
        }
        let Sizes { d, m, .. } = self.expand.sizes;
        let arithmetic = T::arithmetic(simd, m, true);
        let documents = Documents::new(self.expand.sizes, &self.expand.document_starts);
        let taps = self.expand.taps();
        let mut x = Taps::new(self.expand)?;
        // dx of this token and the K−1 before it: dX_t adds to all of them, and the tokens are walked backwards.
        let mut window = Buffer::<T::Accum>::zeros(taps * d)?;
        let mut sums = Buffer::zeros(if self.sums_weight { self.weight.len() } else { 0 })?;
        for (tokens, document) in documents.within(self.tokens.clone()) {
            window.fill(T::Accum::default());
            let last = document.end.min(tokens.end + taps - 1);
            for token in (tokens.start..last).rev() {
                let state = self.grad.rows(m * d).row::<T>(token);
                let (slot, reach) = ((last - 1 - token) % taps, (token - document.start + 1).min(taps));
                let mut mix = Mix { weight: self.weight, window: &mut window, ring: taps, slot, taps: reach };
                arithmetic.write_read(state, Terms::none(), None, Some(&mut mix));
                if token >= tokens.end {
                    continue;
                }
                store(&mut self.grad_x, token, &window[slot * d..][..d]);
                if self.sums_weight {
                    let loaded = if token + 1 == tokens.end { 0..0 } else { 0..taps - 1 };
                    x.go_to(self.expand, documents, document.start, token, loaded);
                    let (dx, grad_weight, taps) = (&*x.x, &mut *sums, x.count.min(reach));
                    let (ring, slot) = (x.ring, x.slot);
                    arithmetic.join(&mut Join { dx, ring, slot, taps, state, grad_weight, ..Join::none(d) });
                }
            }
        }
        *self.sums = self.sums_weight.then_some(sums);
        Ok(())
    }
}
