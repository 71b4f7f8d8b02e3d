//! `rewrite`, `read` and `rewrite_read`, forward, one token row at a time.
//!
//! Moved per token: X in, k in, X' out, h out, (2m + 2)·d elements. X is loaded twice, for the products and then, from
//! cache, for X'; x is computed from X' in registers. n rewrites one after the other move n − 1 directions more, and X
//! and X' still once. Saved for the backward: r and p (m + 1 numbers) of the rewrite, rstd of the
//! read, and x (d) if the read runs over time. A cached step saves nothing; if its read runs over time, it reads and
//! writes (K − 1)·d numbers per sequence, the sums of x that its tokens leave for the next.

use std::ops::Range;

use fearless_simd::prelude::*;

use super::coefficients::Coefficients;
use super::weights::{Weights, slot};
use crate::cpu::buffer::{Buffer, Result};
use crate::cpu::parallel;
use crate::cpu::partition::{Documents, forward_partition, split, useful_threads};
use crate::cpu::simd::convert::{Accum, round_to};
use crate::cpu::simd::dispatch::{WithSimd, dispatch};
use crate::cpu::simd::features::{store, store_target, target, view};
use crate::cpu::simd::interleaved::Interleaved;
use crate::cpu::simd::row::{add_scaled, dots, update};
use crate::cpu::state::{Mix, StateRows, Stored, Terms};
use crate::error;
use crate::problem::{Erase, Outputs, Read, RewriteRead, Sizes, Write, stats_before};
use crate::tensor::RowsMut;

/// Runs the operator forward on `threads` threads, for a state of type `T`.
pub fn forward<T: Stored>(problem: &RewriteRead, outputs: &mut Outputs, threads: usize) -> error::Result<()> {
    forward_rows::<T>(problem, outputs, threads).map_err(|short| short.in_operator(problem.operator()))
}

fn forward_rows<T: Stored>(problem: &RewriteRead, outputs: &mut Outputs, threads: usize) -> Result<()> {
    let Sizes { d, m, .. } = problem.sizes;
    if problem.sizes.tokens() == 0 {
        return Ok(()); // before scratch is allocated: without tokens d·m may exceed all memory
    }
    let taps = problem.taps();
    let threads = useful_threads(problem.state.len(), threads);
    let bounds = forward_partition(problem.sizes, taps, threads);
    let ends: Vec<usize> = bounds.iter().map(|bound| bound / problem.sizes.time.max(1)).collect();
    let next = problem.next.count();
    let weights =
        problem.read.as_ref().map(|read| Weights::<T::Accum>::new(read, problem.sizes, next)).transpose()?;
    let next_gates = weights.as_ref().map_or(0, |weights| weights.gates);
    let mut states = split(&mut outputs.new_state, d * m, &bounds);
    let mut stats = split(&mut outputs.stats, problem.rewrites.stats(m), &bounds);
    let mut contexts = split(&mut outputs.context, d, &bounds);
    let mut values = split(&mut outputs.new_value, next * m, &bounds);
    let mut gates = split(&mut outputs.new_gate, next_gates, &bounds);
    let mut compressed = split(&mut outputs.compressed, d, &bounds);
    let mut rstds = split(&mut outputs.rstd, 1, &bounds);
    let mut pendings = split(&mut outputs.new_pending, (taps - 1) * d, &ends);
    let parts: Vec<Part<'_, T>> = bounds
        .windows(2)
        .map(|pair| Part {
            problem,
            taps,
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
    parallel::for_each(parts, threads, dispatch)
}

/// Consecutive tokens and the rows of every output that belong to them.
struct Part<'a, T: Stored> {
    problem: &'a RewriteRead,
    /// K
    taps: usize,
    tokens: Range<usize>,
    state: Option<RowsMut<'a>>,
    stats: Option<RowsMut<'a>>,
    read: Option<ReadRows<'a, T::Accum>>,
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
    /// k [n][d]
    direction: Buffer<A>,
    /// |k|², k·X and k·kᵢ of each k, from which r and p are computed in place; see [`stats_before`]
    stats: Buffer<A>,
    /// f = r (β v − α p) [n][m]; k fᵀ is added to X
    factors: Buffer<A>,
    /// partial sums of x for this token and the K−1 after it [K][d]; x_t is in slot t mod K
    window: Buffer<A>,
    /// h [d]
    context: Buffer<A>,
    /// w_β·x, W_v·x
    products: Buffer<A>,
}

impl<A: Accum> Scratch<A> {
    fn new(problem: &RewriteRead, logits: usize) -> Result<Scratch<A>> {
        let (Sizes { d, m, .. }, rewrites) = (problem.sizes, problem.rewrites.count());
        Ok(Scratch {
            direction: Buffer::zeros(rewrites * d)?,
            stats: Buffer::zeros(problem.rewrites.stats(m))?,
            factors: Buffer::zeros(rewrites * m)?,
            window: Buffer::zeros(problem.taps() * d)?,
            context: Buffer::zeros(d)?,
            products: Buffer::zeros(logits)?,
        })
    }
}

impl<T: Stored> WithSimd for Part<'_, T> {
    type Output = Result<()>;
    const AVX512: bool = T::Accum::AVX512;
    #[inline(always)]
    fn run<S: Interleaved>(mut self, simd: S) -> Result<()> {
        let arithmetic = T::arithmetic(simd, self.problem.sizes.m, true);
        let taps = self.taps;
        let documents = Documents::new(self.problem.sizes, &self.problem.document_starts);
        let logits = self.read.as_ref().map_or(0, |read| read.weights.logit_rows);
        let mut scratch = Scratch::new(self.problem, logits)?;
        for (tokens, document) in documents.within(self.tokens.clone()) {
            // The halo's X' is recomputed for the first reads of this part, and not stored.
            let halo = (taps - 1).min(tokens.start - document.start);
            scratch.window.fill(T::Accum::default());
            if tokens.start - halo == document.start && documents.may_continue(document.start) {
                self.take_pending(document.start, &mut scratch.window);
            }
            // The sums of tokens after the last are needed only if they are left for the next call.
            let leaves = documents.is_sequence_end(tokens.end) && self.leaves_pending();
            let until = tokens.end + if leaves { taps - 1 } else { 0 };
            for token in tokens.start - halo..tokens.end {
                self.run_token(simd, &*arithmetic, token..until, token >= tokens.start, &mut scratch);
            }
            if leaves {
                self.leave_pending(tokens.end, &scratch.window);
            }
        }
        Ok(())
    }
}

impl<T: Stored> Part<'_, T> {
    /// Runs the operator on the first of `tokens`; the rest are those whose x it may add to. Only this part's
    /// `own` tokens are stored.
    #[inline(always)]
    fn run_token<S: Interleaved>(
        &mut self,
        simd: S,
        arithmetic: &dyn StateRows<T>,
        tokens: Range<usize>,
        own: bool,
        scratch: &mut Scratch<T::Accum>,
    ) {
        let (problem, token) = (self.problem, tokens.start);
        let Sizes { d, m, .. } = problem.sizes;
        let Scratch { direction, stats, factors, window, .. } = scratch;
        let state = problem.state.rows(m * d).row::<T>(token);
        let mut terms = Terms::none();
        if let Some(write) = &problem.rewrite {
            let k = view(write.direction.rows(problem.rewrites.count() * d), token, direction);
            for index in 0..problem.rewrites.count() {
                let row = &k[index * d..][..d];
                let (square, products) = stats[stats_before(index, m)..].split_at_mut(1);
                let (readout, k_products) = products.split_at_mut(m);
                readout.fill(T::Accum::default());
                if write.erase == Erase::None {
                    square[0] = dots(simd, row, &[], &mut []);
                    k_products.fill(T::Accum::default());
                    continue;
                }
                square[0] = arithmetic.products(row, state, readout);
                if index > 0 {
                    dots(simd, row, &k[..index * d], &mut k_products[..index]);
                }
            }
            self.measure(write, token, own, stats, factors);
            terms = Terms { k, factors }.that_write();
        }
        let mut mix = self.read.as_ref().and_then(|read| {
            let weight = read.weights.compress.as_deref()?;
            let (ring, slot) = (self.taps, slot(self.taps, token));
            Some(Mix { weight, window, ring, slot, taps: ring.min(tokens.len()) })
        });
        let to = self.state.as_mut().filter(|_| own).map(|rows| rows.row::<T>(token));
        arithmetic.write_read(state, terms, to, mix.as_mut());
        if own {
            self.read_token(simd, token, scratch);
        }
    }

    /// Stores what the read makes of a token's x.
    #[inline(always)]
    fn read_token<S: Interleaved>(&mut self, simd: S, token: usize, scratch: &mut Scratch<T::Accum>) {
        let slot = slot(self.taps, token);
        let Some(read) = &mut self.read else { return };
        let Sizes { d, .. } = self.problem.sizes;
        let Scratch { window, context, products, .. } = scratch;
        let x = if read.weights.compress.is_some() {
            let x = &mut window[slot * d..][..d];
            if let Some(saved) = &mut read.compressed {
                store(saved, token, x);
            }
            if read.read.over_time() {
                // The backward uses the stored x, so the forward does, too.
                round_to(T::DTYPE, x);
            }
            &*x
        } else {
            let new = self.state.as_ref().map(|rows| rows.as_rows());
            view(new.unwrap_or(self.problem.state.rows(d)), token, window)
        };
        read.row(simd, token, x, context, products);
    }

    /// Starts the sums of a sequence's first x with what earlier calls left.
    #[inline(always)]
    fn take_pending(&self, first: usize, window: &mut [T::Accum]) {
        let Some(pending) = &self.problem.pending else { return };
        let Sizes { time, d, .. } = self.problem.sizes;
        let (taps, width) = (window.len() / d, window.len() - d);
        let rows = pending.rows(width).row::<T::Accum>(first / time);
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
    fn leave_pending(&mut self, end: usize, window: &[T::Accum]) {
        let Some(pending) = self.read.as_mut().and_then(|read| read.pending.as_mut()) else { return };
        let Sizes { time, d, .. } = self.problem.sizes;
        let taps = window.len() / d;
        for (later, row) in pending.row::<T::Accum>(end / time - 1).chunks_exact_mut(d).enumerate() {
            row.copy_from_slice(&window[(end + later) % taps * d..][..d]);
        }
    }

    /// Computes r and p of each rewrite in place, from the products of its k, and saves all; fills the factors of k to
    /// add to the channels. No rewrite waits for the state that the one before it leaves: with f the factors,
    /// kᵀ(X + Σᵢ kᵢ fᵢᵀ) = kᵀX + Σᵢ (k·kᵢ) fᵢᵀ.
    #[inline(always)]
    fn measure(
        &mut self,
        write: &Write,
        token: usize,
        own: bool,
        stats: &mut [T::Accum],
        factors: &mut [T::Accum],
    ) {
        let (m, rewrites) = (self.problem.sizes.m, self.problem.rewrites.count());
        let values = write.value.rows(rewrites * m).row::<T::Accum>(token);
        let gates = write.gate.rows(rewrites).row::<T::Accum>(token);
        let mut rest = &mut *stats;
        for index in 0..rewrites {
            let (square, readouts, k_products);
            (square, rest) = rest.split_at_mut(1);
            (readouts, rest) = rest.split_at_mut(m);
            (k_products, rest) = rest.split_at_mut(index);
            let (earlier, factors) = factors.split_at_mut(index * m);
            for (at, product) in k_products.iter().enumerate() {
                add_scaled(readouts, *product, &earlier[at * m..][..m]);
            }
            let r = inverse_norm(square[0], write.eps_k);
            square[0] = r;
            let of = Coefficients::new(write.erase, gates[index], r);
            for ((p, v), factor) in readouts.iter_mut().zip(&values[index * m..][..m]).zip(factors) {
                *p = r * *p;
                *factor = of.factor(*v, *p);
            }
        }
        if let Some(stored) = self.stats.as_mut().filter(|_| own) {
            stored.row::<T::Accum>(token).copy_from_slice(stats);
        }
    }
}

impl<A: Accum> ReadRows<'_, A> {
    /// Computes h, v and β of this token from x.
    #[inline(always)]
    fn row<S: Interleaved>(&mut self, simd: S, token: usize, x: &[A], context: &mut [A], products: &mut [A]) {
        let (read, weights, d) = (self.read, self.weights, x.len());
        let products = &mut products[..weights.logit_rows];
        let square = dots(simd, x, &weights.logit_weights, products);
        let (gates, values) = products.split_at(weights.gates);
        let rstd = read.norm_eps.map_or(A::from_f64(1.0), |eps| inverse_norm_mean(square, d, eps));
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
            let rstd = A::Vector::<S>::splat(simd, rstd);
            update(
                simd,
                target(stored, token, context),
                [x, &weights.norm],
                #[inline(always)]
                |_, [x, norm]| rstd * x * norm,
            );
            store_target(stored, token, context);
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
