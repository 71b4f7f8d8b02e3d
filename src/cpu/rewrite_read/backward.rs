//! `rewrite`, `read` and `rewrite_read`, backward, one token row at a time.
//!
//! Moved per token: G, X, k and dh in, dX and dk out, (3m + 3)·d elements. X' is recomputed in cache from
//! X, k, e and β. So is X if it was not stored: from the anchor, m·d, and d more for each rewrite since. A read over
//! time keeps a ring of K values of dx, computed K−1 tokens ahead of dX. For the tokens after the part it computes only
//! dx, from their dh, x and rstd; their X and G are not loaded.
//!
//! With G = ∂L/∂X', k̂ = r·k, e = v − p and the read's dx:
//!
//! ```text
//! G  += dx ⊗ w           g   = k̂ᵀG              dX = G − β k̂ gᵀ
//! dv  = β g              dβ  = g·e              dk = r (dk̂ − k̂ · β(g·e − p·g)),  dk̂ = β (G e − X g)
//! ```

use std::ops::Range;

use super::backward_read::{ReadBackward, ReadScratch};
use super::backward_rewrite::{OneRewrite, TokenRewrites};
use super::weights::{Sums, Wanted, Weights, zero_parameters};
use crate::cpu::buffer::{Buffer, Result};
use crate::cpu::parallel;
use crate::cpu::partition::{Documents, partition, split, useful_threads};
use crate::cpu::simd::convert::Accum;
use crate::cpu::simd::dispatch::{WithSimd, dispatch};
use crate::cpu::simd::features::{store_target, target};
use crate::cpu::simd::interleaved::Interleaved;
use crate::cpu::state::{Finish, Join, Mix, StateRows, Stored, Terms};
use crate::error;
use crate::problem::{Gradients, Incoming, Link, Outputs, RewriteRead, Sizes};
use crate::tensor::RowsMut;

/// Runs the operator backward on `threads` threads, for a state of type `T`; the forward filled `saved`.
pub fn backward<T: Stored>(
    problem: &RewriteRead,
    saved: &Outputs,
    incoming: &Incoming,
    gradients: &mut Gradients,
    threads: usize,
) -> error::Result<()> {
    let done = if problem.sizes.tokens() == 0 {
        zero_parameters::<T::Accum>(gradients) // empty tensors have no rows
    } else {
        backward_rows::<T>(problem, saved, incoming, gradients, threads)
    };
    done.map_err(|short| short.in_operator(problem.operator()))
}

fn backward_rows<T: Stored>(
    problem: &RewriteRead,
    saved: &Outputs,
    incoming: &Incoming,
    gradients: &mut Gradients,
    threads: usize,
) -> Result<()> {
    let Sizes { d, m, .. } = problem.sizes;
    let taps = problem.taps();
    let bounds = partition(problem.sizes.tokens(), taps);
    let (rewrites, next) = (problem.rewrites.count(), problem.next.count());
    let weights =
        problem.read.as_ref().map(|read| Weights::<T::Accum>::new(read, problem.sizes, next)).transpose()?;
    let read = problem.read.as_ref().zip(weights.as_ref());
    let (in_place, wanted) = (gradients.in_place, Wanted::new(gradients));
    let mut sums: Vec<Option<Sums<T::Accum>>> = bounds[1..].iter().map(|_| None).collect();
    {
        let mut states = split(&mut gradients.state, d * m, &bounds);
        let mut directions = split(&mut gradients.direction, rewrites * d, &bounds);
        let mut values = split(&mut gradients.value, rewrites * m, &bounds);
        let mut gates = split(&mut gradients.gate, rewrites, &bounds);
        let parts: Vec<Part<'_, T>> = bounds
            .windows(2)
            .zip(&mut sums)
            .map(|(pair, sums)| Part {
                problem,
                read: read.map(|(read, weights)| ReadBackward { read, taps, weights, saved, incoming }),
                saved,
                incoming,
                in_place,
                wanted,
                tokens: pair[0]..pair[1],
                grad_state: states(),
                grad_direction: directions(),
                grad_value: values(),
                grad_gate: gates(),
                sums,
            })
            .collect();
        parallel::for_each(parts, useful_threads(problem.state.len(), threads), dispatch)?;
    }
    let Some((read, weights)) = read else { return Ok(()) };
    let mut sums = sums.into_iter().flatten();
    let Some(mut total) = sums.next() else { return Ok(()) };
    sums.for_each(|part| total.add(&part)); // in the order of the parts: the same sum for any threads
    total.store(read, weights, problem.sizes, gradients)
}

/// Consecutive tokens, the rows of every gradient that belong to them, and their parameter sums.
struct Part<'a, T: Stored> {
    problem: &'a RewriteRead,
    read: Option<ReadBackward<'a, T::Accum>>,
    saved: &'a Outputs,
    incoming: &'a Incoming,
    /// `grad_state` holds G on entry
    in_place: bool,
    wanted: Wanted,
    tokens: Range<usize>,
    grad_state: Option<RowsMut<'a>>,
    grad_direction: Option<RowsMut<'a>>,
    grad_value: Option<RowsMut<'a>>,
    grad_gate: Option<RowsMut<'a>>,
    sums: &'a mut Option<Sums<T::Accum>>,
}

/// One token's rows, used if they cannot be worked on in place.
struct Scratch<T: Stored> {
    /// X, if it is not stored [d][m]
    state: Buffer<T>,
    /// X' [d][m]
    rewritten: Buffer<T>,
    /// k [n][d]
    direction: Buffer<T::Accum>,
    /// β r e [n][m], which times k is added to X
    factors: Buffer<T::Accum>,
    grads: Grads<T::Accum>,
    read: ReadScratch<T::Accum>,
}

/// Of one token, what the gradients of its rewrites are computed from.
struct Grads<A> {
    /// G [d][m]
    rewritten: Buffer<A>,
    /// dk [n][d], unless it is computed in place
    direction: Buffer<A>,
    /// kᵀG of each k, from which g is computed in place [n][m]
    along: Buffer<A>,
    /// β r g [n][m]
    shares: Buffer<A>,
    /// what of each k its gradient takes [n]
    on_k: Buffer<A>,
}

impl<T: Stored> Scratch<T> {
    fn new(problem: &RewriteRead) -> Result<Scratch<T>> {
        let Sizes { d, m, .. } = problem.sizes;
        let (rewrites, logits) = (problem.rewrites.count(), problem.next.count() * (1 + m));
        Ok(Scratch {
            state: Buffer::zeros(if problem.chain.is_empty() { 0 } else { m * d })?,
            rewritten: Buffer::zeros(m * d)?,
            direction: Buffer::zeros(rewrites * d)?,
            factors: Buffer::zeros(rewrites * m)?,
            grads: Grads {
                rewritten: Buffer::zeros(m * d)?,
                direction: Buffer::zeros(rewrites * d)?,
                along: Buffer::zeros(rewrites * m)?,
                shares: Buffer::zeros(rewrites * m)?,
                on_k: Buffer::zeros(rewrites)?,
            },
            read: ReadScratch::new(d, logits, problem.taps())?,
        })
    }
}

/// The arithmetic on the rows of a state of type `T`, and on those of G.
struct Arithmetic<T: Stored> {
    stored: Box<dyn StateRows<T>>,
    /// of rows that are computed into scratch
    scratch: Box<dyn StateRows<T>>,
    grad: Box<dyn StateRows<T::Accum>>,
}

impl<T: Stored> WithSimd for Part<'_, T> {
    type Output = Result<()>;
    #[inline(always)]
    fn run<S: Interleaved>(mut self, simd: S) -> Result<()> {
        let (taps, m) = (self.problem.taps(), self.problem.sizes.m);
        let rows = Arithmetic::<T> {
            stored: T::rows(simd, m, true),
            scratch: T::rows(simd, m, false),
            grad: T::Accum::rows(simd, m, false),
        };
        // Allocated before the sums, which outlive it, so that the next part's scratch reuses its cached memory.
        let mut scratch = Scratch::new(self.problem)?;
        let mut sums =
            self.read.as_ref().map(|read| Sums::zeros(read.read, read.weights, self.wanted)).transpose()?;
        let documents = Documents::new(self.problem.sizes, &self.problem.document_starts);
        for (tokens, document) in documents.within(self.tokens.clone()) {
            // In a read over time X_t gets gradients from h_t … h_{t+K−1}, so dx runs K−1 tokens ahead of dX.
            let mut next = tokens.start;
            for token in tokens {
                let end = document.end.min(token + taps);
                self.run_token(simd, &rows, token, next..end, &mut sums, &mut scratch);
                next = end;
            }
        }
        *self.sums = sums;
        Ok(())
    }
}

impl<T: Stored> Part<'_, T> {
    /// Computes the gradients of `token`, after dx of the tokens `reads`, which the ring does not have yet.
    #[inline(always)]
    fn run_token<S: Interleaved>(
        &mut self,
        simd: S,
        rows: &Arithmetic<T>,
        token: usize,
        reads: Range<usize>,
        sums: &mut Option<Sums<T::Accum>>,
        scratch: &mut Scratch<T>,
    ) {
        let problem = self.problem;
        let Sizes { d, m, .. } = problem.sizes;
        let Scratch { state, rewritten, direction, factors, grads, read: of_read } = scratch;
        let stored = problem.state.rows(d * m).row::<T>(token);
        self.rebuild(&*rows.scratch, token, stored, [&mut *state, &mut *rewritten], direction, factors);
        let state = if problem.chain.is_empty() { stored } else { state };
        let rewrite = problem.rewrite.as_ref().zip(self.saved.stats.as_ref());
        if let Some((write, _)) = rewrite {
            write.direction.rows(problem.rewrites.count() * d).fetch(token + 1);
        }
        let sizes = [problem.rewrites.count(), d, m];
        let rewrite = rewrite.map(|(write, stats)| TokenRewrites::new(write, stats, token, sizes, direction));
        let terms = rewrite.as_ref().map_or(Terms::none(), |rewrite| rewrite.terms(factors));
        let mut join = Join { to: &mut grads.rewritten, ..Join::none(d) };
        if let (Some(read), Some(sums)) = (&self.read, sums) {
            let weight = read.weights.compress.as_deref();
            let wanted = weight.filter(|_| self.saved.compressed.is_none());
            let mut mix =
                wanted.map(|weight| Mix { weight, window: &mut of_read.x, ring: 1, slot: 0, taps: 1 });
            let mut after = state;
            if rewrite.is_some() {
                // as the forward stored it
                rows.scratch.write_read(state, terms.that_write(), Some(rewritten), mix.as_mut());
                after = rewritten;
            } else if mix.is_some() {
                rows.scratch.write_read(state, Terms::none(), None, mix.as_mut());
            }
            let x = if weight.is_none() { T::widen_row(after, &mut of_read.x) } else { None };
            for next in reads.clone() {
                let own = self.tokens.contains(&next).then_some(&mut *sums);
                read.row(simd, next, x, own, of_read);
            }
            join.dx = &of_read.dx;
            (join.ring, join.slot, join.taps) = (read.taps, read.slot(token), reads.end - token);
            (join.weight, join.state, join.sums) = (weight, after, &mut sums.compress);
        }
        let Some(rewrite) = rewrite else {
            if !self.in_place
                && let Some(rows_of_state) = &mut self.grad_state
                && let Some(to) = T::in_place(rows_of_state.row::<T>(token))
            {
                let grad = self.incoming.grad_new_state.as_ref();
                let grad = grad.map(|grad| grad.rows(d * m).row::<T>(token));
                return rows.stored.join(&mut Join { grad, to, ..join });
            }
            join.grad = self.grad_above(token);
            rows.stored.join(&mut join);
            if let Some(stored) = &mut self.grad_state {
                T::narrow_row(&grads.rewritten, stored.row::<T>(token));
            }
            return;
        };
        join.grad = self.grad_above(token);
        grads.along.fill(T::Accum::default());
        if rewrite.count() == 1 {
            (join.k, join.products) = (terms.k, &mut grads.along);
        }
        rows.stored.join(&mut join);
        if rewrite.count() > 1 {
            for (index, along) in grads.along.chunks_exact_mut(m).enumerate() {
                rows.grad.products(rewrite.one(index).k, &grads.rewritten, along);
            }
        }
        self.finish(&*rows.stored, token, &rewrite, (terms, state), rewritten, grads); // X' is not needed again
    }

    /// Computes the gradients of X and of a token's rewrites from G and kᵀG.
    #[inline(always)]
    fn finish(
        &mut self,
        rows: &dyn StateRows<T>,
        token: usize,
        rewrite: &TokenRewrites<'_, T::Accum>,
        (terms, state): (Terms<'_, T::Accum>, &[T]),
        unwanted: &mut [T],
        grads: &mut Grads<T::Accum>,
    ) {
        let Sizes { d, m, .. } = self.problem.sizes;
        let Grads { rewritten: grad, direction, along, shares, on_k } = grads;
        for index in (0..rewrite.count()).rev() {
            rewrite.take_shares(index, along);
        }
        rewrite.shares(along, shares);
        for index in 0..rewrite.count() {
            let (one, g) = (rewrite.one(index), &along[index * m..][..m]);
            let g_e = store_scalars([&mut self.grad_value, &mut self.grad_gate], token, index, &one, g);
            on_k[index] = one.on_k(g, g_e);
        }
        let dk = match &mut self.grad_direction {
            Some(rows) => target(rows, token, direction),
            None => &mut **direction,
        };
        let to = match &mut self.grad_state {
            Some(rows) => rows.row::<T>(token),
            None => unwanted,
        };
        rows.finish(&mut Finish { grad, state, terms, shares, on_k, to, along: dk });
        if rewrite.count() > 1 {
            for (index, dk) in dk.chunks_exact_mut(d).enumerate() {
                rewrite.add_others(index, dk, along);
            }
        }
        if let Some(rows) = &mut self.grad_direction {
            store_target(rows, token, direction);
        }
    }

    /// ∂L/∂X' from what is above; None for zeros.
    #[inline(always)]
    fn grad_above(&self, token: usize) -> Option<&[T]> {
        let Sizes { d, m, .. } = self.problem.sizes;
        match (&self.incoming.grad_new_state, &self.grad_state) {
            (Some(incoming), _) => Some(incoming.rows(d * m).row::<T>(token)),
            (None, Some(rows)) if self.in_place => Some(rows.as_rows().row::<T>(token)),
            _ => None,
        }
    }

    /// Applies the chain's rewrites to an anchor, each rounded as its forward rounded it: the first of two rows is then X.
    #[inline(always)]
    fn rebuild(
        &self,
        rows: &dyn StateRows<T>,
        token: usize,
        anchor: &[T],
        [state, next]: [&mut Buffer<T>; 2],
        direction: &mut [T::Accum],
        factors: &mut [T::Accum],
    ) {
        let Sizes { d, m, .. } = self.problem.sizes;
        for (at, Link { write, stats }) in self.problem.chain.iter().enumerate() {
            let sizes = [self.problem.rewrites.count(), d, m];
            let rewrites = TokenRewrites::new(write, stats, token, sizes, direction);
            let from = if at == 0 { anchor } else { &**state };
            rows.write_read(from, rewrites.terms(factors).that_write(), Some(next), None);
            std::mem::swap(state, next);
        }
    }
}

/// Stores dv and dβ of one of a token's rewrites; returns dβ = g·e.
#[inline(always)]
fn store_scalars<A: Accum>(
    [dvalue, dgate]: [&mut Option<RowsMut<'_>>; 2],
    token: usize,
    index: usize,
    one: &OneRewrite<'_, A>,
    g: &[A],
) -> A {
    if let Some(dvalue) = dvalue {
        let dvalue = &mut dvalue.row::<A>(token)[index * g.len()..][..g.len()];
        for (dvalue, g) in dvalue.iter_mut().zip(g) {
            *dvalue = one.gate * *g;
        }
    }
    let g_e = one.error_along(g);
    if let Some(dgate) = dgate {
        dgate.row::<A>(token)[index] = g_e;
    }
    g_e
}
