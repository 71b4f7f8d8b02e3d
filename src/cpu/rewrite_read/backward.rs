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

use fearless_simd::Simd;

use super::backward_read::{ReadBackward, ReadScratch};
use super::backward_rewrite::{OneRewrite, TokenRewrites};
use super::forward::ANY;
use super::weights::{Sums, Wanted, Weights, zero_parameters};
use crate::cpu::buffer::{Buffer, Result};
use crate::cpu::parallel;
use crate::cpu::partition::{Documents, partition, split, useful_threads};
use crate::cpu::simd::channels::{Target, load, round_to, store, view};
use crate::cpu::simd::convert::Accum;
use crate::cpu::simd::dispatch::{WithSimd, dispatch};
use crate::cpu::simd::row::dots;
use crate::error;
use crate::problem::{Gradients, Incoming, Link, Outputs, RewriteRead, Sizes};
use crate::tensor::{Ahead, RowsMut};

/// Runs the operator backward on `threads` threads; the forward filled `saved`.
pub fn backward<A: Accum>(
    problem: &RewriteRead,
    saved: &Outputs,
    incoming: &Incoming,
    gradients: &mut Gradients,
    threads: usize,
) -> error::Result<()> {
    let done = match problem.rewrites.count() {
        _ if problem.sizes.tokens() == 0 => zero_parameters::<A>(gradients), // empty tensors have no rows
        1 => backward_of::<A, 1>(problem, saved, incoming, gradients, threads),
        _ => backward_of::<A, ANY>(problem, saved, incoming, gradients, threads),
    };
    done.map_err(|short| short.in_operator(problem.operator()))
}

/// For N rewrites, as forward.
fn backward_of<A: Accum, const N: usize>(
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
        problem.read.as_ref().map(|read| Weights::<A>::new(read, problem.sizes, next)).transpose()?;
    let read = problem.read.as_ref().zip(weights.as_ref());
    let (in_place, wanted) = (gradients.in_place, Wanted::new(gradients));
    let mut sums: Vec<Option<Sums<A>>> = bounds[1..].iter().map(|_| None).collect();
    {
        let mut states = split(&mut gradients.state, d * m, &bounds);
        let mut directions = split(&mut gradients.direction, rewrites * d, &bounds);
        let mut values = split(&mut gradients.value, rewrites * m, &bounds);
        let mut gates = split(&mut gradients.gate, rewrites, &bounds);
        let parts: Vec<Part<'_, A, N>> = bounds
            .windows(2)
            .zip(&mut sums)
            .map(|(pair, sums)| Part {
                problem,
                read: read.map(|(read, weights)| ReadBackward { read, weights, saved, incoming }),
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
struct Part<'a, A, const N: usize> {
    problem: &'a RewriteRead,
    read: Option<ReadBackward<'a, A>>,
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
    sums: &'a mut Option<Sums<A>>,
}

/// One token's rows, used if they cannot be worked on in place.
struct Scratch<A> {
    /// X [m][d]
    state: Buffer<A>,
    /// X', whose memory is later dX's, because it is in cache [m][d]
    rewritten: Buffer<A>,
    /// G [m][d]
    grad: Buffer<A>,
    /// k [n][d]
    direction: Buffer<A>,
    /// dk [n][d]
    grad_direction: Buffer<A>,
    /// β r e [n][m], which times k is added to X
    factors: Buffer<A>,
    /// kᵀG of each k, from which g is computed in place [n][m]
    along: Buffer<A>,
    read: ReadScratch<A>,
}

impl<A: Accum> Scratch<A> {
    fn new(problem: &RewriteRead) -> Result<Scratch<A>> {
        let Sizes { d, m, .. } = problem.sizes;
        let (rewrites, logits) = (problem.rewrites.count(), problem.next.count() * (1 + m));
        Ok(Scratch {
            state: Buffer::zeros(m * d)?,
            rewritten: Buffer::zeros(m * d)?,
            grad: Buffer::zeros(m * d)?,
            direction: Buffer::zeros(rewrites * d)?,
            grad_direction: Buffer::zeros(rewrites * d)?,
            factors: Buffer::zeros(rewrites * m)?,
            along: Buffer::zeros(rewrites * m)?,
            read: ReadScratch::new(d, logits, problem.taps())?,
        })
    }
}

impl<A: Accum, const N: usize> WithSimd for Part<'_, A, N> {
    type Output = Result<()>;
    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) -> Result<()> {
        let taps = self.problem.taps();
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
                self.run_token(simd, token, next..end, &mut sums, &mut scratch);
                next = end;
            }
        }
        *self.sums = sums;
        Ok(())
    }
}

impl<'a, A: Accum, const N: usize> Part<'a, A, N> {
    #[inline(always)]
    fn rewrites(&self) -> usize {
        if N == ANY { self.problem.rewrites.count() } else { N }
    }

    /// Computes the gradients of `token`, after dx of the tokens `reads`, which the ring does not have yet.
    #[inline(always)]
    fn run_token<S: Simd>(
        &mut self,
        simd: S,
        token: usize,
        reads: Range<usize>,
        sums: &mut Option<Sums<A>>,
        scratch: &mut Scratch<A>,
    ) {
        let Sizes { d, m, .. } = self.problem.sizes;
        let mut ahead = self.rows_ahead(token + 1);
        let Scratch { state, rewritten, grad, direction, grad_direction, factors, along, read: read_scratch } =
            scratch;
        let states = self.load_state(token, state, direction, factors, &mut ahead);
        ahead.step();
        match (&self.incoming.grad_new_state, &self.grad_state) {
            (Some(incoming), _) => load(incoming.rows(d * m), token, m, grad),
            (None, Some(rows)) if self.in_place => load(rows.as_rows(), token, m, grad),
            _ => grad.fill(A::default()),
        }
        ahead.step();
        let rewrite = self.problem.rewrite.as_ref().zip(self.saved.stats.as_ref());
        let sizes = [self.rewrites(), d, m];
        let rewrite =
            rewrite.map(|(write, stats)| TokenRewrites::<A, N>::new(write, stats, token, sizes, direction));
        if let (Some(read), Some(sums)) = (&self.read, sums) {
            let mut after = states;
            if let Some(rewrite) = &rewrite {
                rewrite.apply(rewritten, Some(states), factors, &mut ahead);
                round_to(self.problem.state.dtype, rewritten); // as the forward stored it
                after = rewritten;
            }
            for next in reads.clone() {
                let own = self.tokens.contains(&next).then_some(&mut *sums);
                read.row(simd, next, after, own, read_scratch);
            }
            ahead.step();
            read.compress_row(token..reads.end, after, sums, &read_scratch.dx, grad, &mut ahead);
        }
        ahead.step();
        let Some(rewrite) = rewrite else {
            if let Some(stored) = &mut self.grad_state {
                store(stored, token, m, grad);
            }
            return;
        };
        for index in 0..rewrite.count() {
            let along = &mut along[index * m..][..m];
            dots(simd, rewrite.one(index).k, |j| &grad[j * d..(j + 1) * d], along, &mut ahead);
        }
        for index in (0..rewrite.count()).rev() {
            rewrite.take_shares(index, along);
        }
        let mut grad_state = Target::new(self.grad_state.as_mut(), token, m, rewritten); // X' is not needed again
        rewrite.grad_state(grad_state.channels(), grad, along, &mut ahead);
        grad_state.store();
        let mut grad_direction = Target::new(self.grad_direction.as_mut(), token, 1, grad_direction);
        for index in 0..rewrite.count() {
            let (one, g) = (rewrite.one(index), &along[index * m..][..m]);
            let g_e = store_scalars([&mut self.grad_value, &mut self.grad_gate], token, index, &one, g);
            let dk = &mut grad_direction.channels()[index * d..][..d];
            one.grad_direction(dk, one.on_k(g, g_e), states, grad, g);
            rewrite.add_others(index, dk, along);
        }
        grad_direction.store();
    }

    /// Returns the rows that `token` will load and store, to be prefetched.
    #[inline(always)]
    fn rows_ahead(&self, token: usize) -> Ahead {
        let (Sizes { d, m, .. }, rewrites) = (self.problem.sizes, self.rewrites());
        let spans = [
            Some(self.problem.state.rows(d * m).span(token)),
            self.incoming.grad_new_state.as_ref().map(|grad| grad.rows(d * m).span(token)),
            self.incoming.grad_context.as_ref().map(|grad| grad.rows(d).span(token)),
            self.problem.rewrite.as_ref().map(|write| write.direction.rows(rewrites * d).span(token)),
            self.grad_state.as_ref().map(|rows| rows.span(token)),
            self.grad_direction.as_ref().map(|rows| rows.span(token)),
        ];
        Ahead::new(spans.map(Option::unwrap_or_default), (2 + rewrites) * m + 3)
    }

    /// X: as it is stored, or the anchor after the chain's rewrites, each rounded as its forward rounded it.
    #[inline(always)]
    fn load_state<'t>(
        &self,
        token: usize,
        state: &'t mut [A],
        direction: &mut [A],
        factors: &mut [A],
        ahead: &mut Ahead,
    ) -> &'t [A]
    where
        'a: 't,
    {
        let (Sizes { d, m, .. }, stored) = (self.problem.sizes, &self.problem.state);
        let chain = &self.problem.chain;
        if chain.is_empty() {
            return view(stored.rows(d * m), token, m, state);
        }
        load(stored.rows(d * m), token, m, state);
        for Link { write, stats } in chain {
            let sizes = [self.rewrites(), d, m];
            TokenRewrites::<A, N>::new(write, stats, token, sizes, direction)
                .apply(state, None, factors, ahead);
            round_to(stored.dtype, state);
        }
        state
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
