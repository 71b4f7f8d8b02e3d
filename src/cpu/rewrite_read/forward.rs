//! `rewrite`, `read` and `rewrite_read`, forward, one token row at a time.
//!
//! Moved per token: X in, k in, X' out, h out, (2m + 2)·d elements. The row is widened into a scratch of m contiguous
//! channels that stays in L1/L2; n rewrites one after the other move n − 1 directions more, and the row but once. Saved for
//! the backward: r and p (m + 1 numbers) of the rewrite, rstd of the read, and x (d) if the read runs over time. A cached
//! step saves nothing; if its read runs over time, it reads and writes (K − 1)·d numbers per sequence, the sums of x that
//! its tokens leave for the next.

use std::ops::Range;

use fearless_simd::Simd;

use super::weights::Weights;
use crate::cpu::buffer::{Buffer, Result};
use crate::cpu::parallel;
use crate::cpu::partition::{Documents, forward_partition, split, useful_threads};
use crate::cpu::simd::channels::{Target, channels, load, round_to, store, view};
use crate::cpu::simd::convert::Accum;
use crate::cpu::simd::dispatch::{WithSimd, dispatch};
use crate::cpu::simd::row::{add_scaled, dots, mix, set_scaled_product, set_scaled_sum};
use crate::error;
use crate::problem::{Outputs, Read, RewriteRead, Sizes, Write, stats_before};
use crate::tensor::{Ahead, RowsMut};

/// Runs the operator forward on `threads` threads.
pub fn forward<A: Accum>(problem: &RewriteRead, outputs: &mut Outputs, threads: usize) -> error::Result<()> {
    let done = match problem.rewrites.count() {
        1 => forward_of::<A, 1>(problem, outputs, threads),
        _ => forward_of::<A, ANY>(problem, outputs, threads),
    };
    done.map_err(|short| short.in_operator(problem.operator()))
}

/// For N rewrites: a loop over one costs a tenth of the instructions of a narrow state.
fn forward_of<A: Accum, const N: usize>(
    problem: &RewriteRead,
    outputs: &mut Outputs,
    threads: usize,
) -> Result<()> {
    let Sizes { d, m, .. } = problem.sizes;
    if problem.sizes.tokens() == 0 {
        return Ok(()); // before scratch is allocated: without tokens d·m may exceed all memory
    }
    let taps = problem.taps();
    let bounds = forward_partition(problem.sizes, taps);
    let ends: Vec<usize> = bounds.iter().map(|bound| bound / problem.sizes.time.max(1)).collect();
    let next = problem.next.count();
    let weights =
        problem.read.as_ref().map(|read| Weights::<A>::new(read, problem.sizes, next)).transpose()?;
    let mut states = split(&mut outputs.new_state, d * m, &bounds);
    let mut stats = split(&mut outputs.stats, problem.rewrites.stats(m), &bounds);
    let mut contexts = split(&mut outputs.context, d, &bounds);
    let mut values = split(&mut outputs.new_value, next * m, &bounds);
    let mut gates = split(&mut outputs.new_gate, next, &bounds);
    let mut compressed = split(&mut outputs.compressed, d, &bounds);
    let mut rstds = split(&mut outputs.rstd, 1, &bounds);
    let mut pendings = split(&mut outputs.new_pending, (taps - 1) * d, &ends);
    let parts: Vec<Part<'_, A, N>> = bounds
        .windows(2)
        .map(|pair| Part {
            problem,
            tokens: pair[0]..pair[1],
            state: states(),
            stats: stats(),
            read: problem.read.as_ref().zip(weights.as_ref()).map(|(read, weights)| ReadRows {
                read,
                weights,
                context: contexts(),
                value: values(),
                gate: gates(),
                compressed: compressed(),
                rstd: rstds(),
                pending: pendings(),
            }),
        })
        .collect();
    parallel::for_each(parts, useful_threads(problem.state.len(), threads), dispatch)
}

/// In place of a number of rewrites that is known when this is compiled: any number.
pub(super) const ANY: usize = 0;

/// Consecutive tokens and the rows of every output that belong to them.
struct Part<'a, A, const N: usize> {
    problem: &'a RewriteRead,
    tokens: Range<usize>,
    state: Option<RowsMut<'a>>,
    stats: Option<RowsMut<'a>>,
    read: Option<ReadRows<'a, A>>,
}

/// A read and the rows it fills.
struct ReadRows<'a, A> {
    read: &'a Read,
    weights: &'a Weights<A>,
    context: Option<RowsMut<'a>>,
    value: Option<RowsMut<'a>>,
    gate: Option<RowsMut<'a>>,
    compressed: Option<RowsMut<'a>>,
    rstd: Option<RowsMut<'a>>,
    /// a row for each sequence that ends in this part
    pending: Option<RowsMut<'a>>,
}

/// One token's rows, used if they cannot be worked on in place, and its small numbers.
struct Scratch<A> {
    /// X, and then X' [m][d]
    state: Buffer<A>,
    /// k [n][d]
    direction: Buffer<A>,
    /// |k|², k·X and k·kᵢ of each k, from which r and p are computed in place; see [`stats_before`]
    stats: Buffer<A>,
    /// β r e [n][m], which times k is added to X
    factors: Buffer<A>,
    /// partial sums of x for this token and the K−1 after it [K][d]; x_t is in slot t mod K
    window: Buffer<A>,
    read: ReadScratch<A>,
}

/// The scratch of a read.
struct ReadScratch<A> {
    /// h [d]
    context: Buffer<A>,
    /// |x|², w_β·x, W_v·x [1 + n·(1 + m)]
    products: Buffer<A>,
}

impl<A: Accum> Scratch<A> {
    fn new(problem: &RewriteRead) -> Result<Scratch<A>> {
        let (Sizes { d, m, .. }, rewrites) = (problem.sizes, problem.rewrites.count());
        Ok(Scratch {
            state: Buffer::zeros(m * d)?,
            direction: Buffer::zeros(rewrites * d)?,
            stats: Buffer::zeros(problem.rewrites.stats(m))?,
            factors: Buffer::zeros(rewrites * m)?,
            window: Buffer::zeros(problem.taps() * d)?,
            read: ReadScratch {
                context: Buffer::zeros(d)?,
                products: Buffer::zeros(1 + problem.next.count() * (1 + m))?,
            },
        })
    }
}

impl<A: Accum, const N: usize> WithSimd for Part<'_, A, N> {
    type Output = Result<()>;
    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) -> Result<()> {
        let taps = self.problem.taps();
        let documents = Documents::new(self.problem.sizes, &self.problem.document_starts);
        let mut scratch = Scratch::new(self.problem)?;
        for (tokens, document) in documents.within(self.tokens.clone()) {
            // The halo's X' is recomputed for the first reads of this part, and not stored.
            let halo = (taps - 1).min(tokens.start - document.start);
            scratch.window.fill(A::default());
            if tokens.start - halo == document.start && documents.may_continue(document.start) {
                self.take_pending(document.start, &mut scratch.window);
            }
            // The sums of tokens after the last are needed only if they are left for the next call.
            let leaves = documents.is_sequence_end(tokens.end) && self.leaves_pending();
            let until = tokens.end + if leaves { taps - 1 } else { 0 };
            for token in tokens.start - halo..tokens.end {
                self.run_token(simd, token..until, token >= tokens.start, &mut scratch);
            }
            if leaves {
                self.leave_pending(tokens.end, &scratch.window);
            }
        }
        Ok(())
    }
}

impl<A: Accum, const N: usize> Part<'_, A, N> {
    #[inline(always)]
    fn rewrites(&self) -> usize {
        if N == ANY { self.problem.rewrites.count() } else { N }
    }

    /// Runs the operator on the first of `tokens`; the rest are those whose x it may add to. Only this part's
    /// `own` tokens are stored.
    #[inline(always)]
    fn run_token<S: Simd>(&mut self, simd: S, tokens: Range<usize>, own: bool, scratch: &mut Scratch<A>) {
        let token = tokens.start;
        let Sizes { d, m, .. } = self.problem.sizes;
        let mut ahead = self.rows_ahead(token + 1);
        let Scratch { state, direction, stats, factors, window, read: read_scratch } = scratch;
        let stored = channels(self.problem.state.rows(m * d), token, m);
        if stored.is_none() {
            load(self.problem.state.rows(m * d), token, m, state);
        }
        let mut states: &[A] = stored.unwrap_or(state);
        ahead.step();
        if let Some(write) = &self.problem.rewrite {
            let rewrites = self.rewrites();
            let k = view(write.direction.rows(rewrites * d), token, 1, direction);
            for index in 0..rewrites {
                let row = &k[index * d..][..d];
                let products = &mut stats[stats_before(index, m)..stats_before(index + 1, m)];
                let other = |i: usize| match i {
                    0 => row,
                    _ if i <= m => &states[(i - 1) * d..i * d],
                    _ => &k[(i - m - 1) * d..][..d],
                };
                dots(simd, row, other, products, &mut ahead);
            }
            self.measure(write, token, own, stats, factors);
            let mut to = Target::new(self.state.as_mut().filter(|_| own), token, m, state);
            rewrite_rows(to.channels(), stored, factors, k, [rewrites, d, m], &mut ahead);
            let rewritten = to.store();
            ahead.step();
            round_to(self.problem.state.dtype, rewritten);
            states = rewritten;
        }
        let Some(read) = &mut self.read else { return };
        let x = match &read.weights.compress {
            None => states,
            Some(weight) => {
                let x = compress_row(weight, token, tokens.len(), states, window);
                ahead.step();
                if let Some(saved) = read.compressed.as_mut().filter(|_| own) {
                    store(saved, token, 1, x);
                }
                if read.read.over_time() {
                    // The backward uses the stored x, so the forward does, too.
                    round_to(self.problem.state.dtype, x);
                }
                x
            }
        };
        if own {
            read.row(simd, token, x, read_scratch, &mut ahead);
        }
    }

    /// Starts the sums of a sequence's first x with what earlier calls left.
    #[inline(always)]
    fn take_pending(&self, first: usize, window: &mut [A]) {
        let Some(pending) = &self.problem.pending else { return };
        let Sizes { time, d, .. } = self.problem.sizes;
        let (taps, width) = (window.len() / d, window.len() - d);
        let rows = pending.rows(width).row::<A>(first / time);
        for (back, row) in rows.chunks_exact(d).enumerate() {
            window[(first + back) % taps * d..][..d].copy_from_slice(row);
        }
    }

    #[inline(always)]
    fn leaves_pending(&self) -> bool {
        self.read.as_ref().is_some_and(|read| read.pending.is_some())
    }

    /// Stores the sums of the tokens after a sequence, which ends at `end`.
    #[inline(always)]
    fn leave_pending(&mut self, end: usize, window: &[A]) {
        let Some(pending) = self.read.as_mut().and_then(|read| read.pending.as_mut()) else { return };
        let Sizes { time, d, .. } = self.problem.sizes;
        let taps = window.len() / d;
        for (later, row) in pending.row::<A>(end / time - 1).chunks_exact_mut(d).enumerate() {
            row.copy_from_slice(&window[(end + later) % taps * d..][..d]);
        }
    }

    /// Computes r and p of each rewrite in place, from the products of its k, and saves all; fills the factors of k to
    /// add to the channels. No rewrite waits for the state that the one before it leaves: with f the factors,
    /// kᵀ(X + Σᵢ kᵢ fᵢᵀ) = kᵀX + Σᵢ (k·kᵢ) fᵢᵀ.
    #[inline(always)]
    fn measure(&mut self, write: &Write, token: usize, own: bool, stats: &mut [A], factors: &mut [A]) {
        let (m, rewrites) = (self.problem.sizes.m, self.rewrites());
        let values = write.value.rows(rewrites * m).row::<A>(token);
        let gates = write.gate.rows(rewrites).row::<A>(token);
        for index in 0..rewrites {
            let stats = &mut stats[stats_before(index, m)..stats_before(index + 1, m)];
            let (square, rest) = stats.split_at_mut(1);
            let (readouts, along_earlier) = rest.split_at_mut(m);
            let (earlier, factors) = factors.split_at_mut(index * m);
            for (at, along) in along_earlier.iter().enumerate() {
                add_scaled(readouts, *along, &earlier[at * m..][..m]);
            }
            let (r, gate) = (inverse_norm(square[0], write.eps_k), gates[index]);
            square[0] = r;
            for ((p, v), factor) in readouts.iter_mut().zip(&values[index * m..]).zip(factors) {
                *p = r * *p;
                *factor = gate * r * (*v - *p);
            }
        }
        if let Some(stored) = self.stats.as_mut().filter(|_| own) {
            stored.row::<A>(token).copy_from_slice(stats);
        }
    }

    /// Returns the rows that `token` will load and store, to be prefetched.
    #[inline(always)]
    fn rows_ahead(&self, token: usize) -> Ahead {
        let Sizes { d, m, .. } = self.problem.sizes;
        let rewrites = self.rewrites();
        let direction =
            self.problem.rewrite.as_ref().map(|write| write.direction.rows(rewrites * d).span(token));
        let read = self.read.as_ref();
        let stored = [Some(&self.state), read.map(|read| &read.context), read.map(|read| &read.compressed)];
        let [state, context, compressed] = stored.map(|rows| rows?.as_ref().map(|rows| rows.span(token)));
        let spans =
            [Some(self.problem.state.rows(m * d).span(token)), direction, state, context, compressed, None];
        Ahead::new(spans.map(Option::unwrap_or_default), (1 + rewrites) * m + 2)
    }
}

/// to = X + Σ k ⊗ factors, of k [n][d] and factors [n][m]; X is what `to` holds if there are no `states`.
#[inline(always)]
pub(super) fn rewrite_rows<A: Accum>(
    to: &mut [A],
    states: Option<&[A]>,
    factors: &[A],
    k: &[A],
    [rewrites, d, m]: [usize; 3],
    ahead: &mut Ahead,
) {
    for at in 0..rewrites {
        let (factors, k) = (&factors[at * m..][..m], &k[at * d..][..d]);
        match states {
            Some(states) if at == 0 => rewrite_row(to, states, factors, k, ahead),
            _ => rewrite_in_place(to, factors, k, ahead),
        }
    }
}

/// to = X + k ⊗ factors
#[inline(always)]
fn rewrite_row<A: Accum>(to: &mut [A], states: &[A], factors: &[A], k: &[A], ahead: &mut Ahead) {
    let d = k.len();
    for ((to, state), factor) in to.chunks_exact_mut(d).zip(states.chunks_exact(d)).zip(factors) {
        if *factor == A::default() {
            to.copy_from_slice(state); // β = 0 keeps X bit for bit, −0 included
        } else {
            set_scaled_sum(to, state, *factor, k);
        }
        ahead.step();
    }
}

/// X += k ⊗ factors
#[inline(always)]
fn rewrite_in_place<A: Accum>(states: &mut [A], factors: &[A], k: &[A], ahead: &mut Ahead) {
    for (state, factor) in states.chunks_exact_mut(k.len()).zip(factors) {
        if *factor != A::default() {
            add_scaled(state, *factor, k);
        }
        ahead.step();
    }
}

/// Adds X_t's terms to the sums of x_t … x_{t+K−1}, as far as they are among `tokens`, and returns x_t, from slot t mod
/// K. The last tap overwrites its slot, because no earlier token adds to x_{t+K−1}.
#[inline(always)]
fn compress_row<'s, A: Accum>(
    weight: &[A],
    token: usize,
    tokens: usize,
    state: &[A],
    window: &'s mut [A],
) -> &'s mut [A] {
    let taps = weight.len() / state.len();
    let d = window.len() / taps;
    for (tap, weight) in weight.chunks_exact(state.len()).enumerate().take(tokens) {
        let slot = (token + tap) % taps;
        mix(&mut window[slot * d..][..d], tap + 1 < taps, weight, state);
    }
    &mut window[token % taps * d..][..d]
}

impl<A: Accum> ReadRows<'_, A> {
    /// Computes h, v and β of this token from x.
    #[inline(always)]
    fn row<S: Simd>(
        &mut self,
        simd: S,
        token: usize,
        x: &[A],
        scratch: &mut ReadScratch<A>,
        ahead: &mut Ahead,
    ) {
        let (read, weights, d) = (self.read, self.weights, x.len());
        let logits = &weights.logits;
        let products = &mut scratch.products[..1 + logits.len() / d];
        dots(simd, x, |i| if i == 0 { x } else { &logits[(i - 1) * d..i * d] }, products, ahead);
        let (square, products) = products.split_at(1);
        let (gates, values) = products.split_at(weights.gates);
        let rstd = read.norm_eps.map_or(A::from_f64(1.0), |eps| inverse_norm_mean(square[0], d, eps));
        if let Some(stored) = &mut self.rstd {
            stored.row::<A>(token)[0] = rstd;
        }
        if let Some(stored) = &mut self.gate {
            let stored = stored.row::<A>(token).iter_mut();
            for ((stored, gate), bias) in stored.zip(gates).zip(&weights.gate_bias) {
                *stored = A::from_f64(2.0) * sigmoid(rstd * *gate + *bias);
            }
        }
        if let Some(stored) = &mut self.value {
            let scale = if read.value_from_compressed { A::from_f64(1.0) } else { rstd };
            for ((value, product), bias) in
                stored.row::<A>(token).iter_mut().zip(values).zip(&weights.value_bias)
            {
                let linear = scale * *product + *bias;
                *value = read.value_scale.map_or(linear, |scale| A::from_f64(scale) * sigmoid(linear));
            }
        }
        if let Some(stored) = &mut self.context {
            let mut h = Target::new(Some(stored), token, 1, &mut scratch.context);
            set_scaled_product(h.channels(), rstd, x, &weights.norm);
            h.store();
        }
    }
}

/// r = 1/√(|k|² + ε_k²); NaN (0·∞) if |k|² has overflowed, because r = 0 would silently write nothing.
#[inline(always)]
pub fn inverse_norm<A: Accum>(square: A, eps: f64) -> A {
    A::from_f64(1.0) / (square + A::from_f64(eps * eps)).sqrt() + A::default() * square
}

/// rstd = 1/√(|x|²/d + ε)
#[inline(always)]
fn inverse_norm_mean<A: Accum>(square: A, d: usize, eps: f64) -> A {
    A::from_f64(1.0) / (square / A::from_f64(d as f64) + A::from_f64(eps)).sqrt()
}

#[inline(always)]
fn sigmoid<A: Accum>(logit: A) -> A {
    A::from_f64(1.0 / (1.0 + (-logit.to_f64()).exp()))
}
