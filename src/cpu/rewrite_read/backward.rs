//! `rewrite`, `read` and `rewrite_read`, backward, one token row at a time.
//!
//! Moved per token: G, X, k and dh in, dX and dk out, (3m + 3)·d elements. X' is recomputed in cache from
//! X, k, e and β. So is X if it was not stored: from the anchor, m·d, and d more for each rewrite since. A read over
//! time keeps a ring of K values of dx, computed K−1 tokens ahead of dX. For the tokens after the part it computes only
//! dx, from their dh, x and rstd; their X and G are not loaded.
//!
//! In the letters of docs/mathematics.md, with k̂ = r·k and e = v − p. If nothing is erased, α = 0 and dβ = g·v, else α = β:
//!
//! ```text
//! G  += dx ⊗ w           g   = k̂ᵀG              dX = G − α k̂ gᵀ
//! dv  = β g              dβ  = g·v − g·p         dk = r (dk̂ − k̂ (k̂·dk̂)),  dk̂ = G (β v − α p) − α X g
//! ```

use std::ops::Range;

use super::backward_read::{ReadBackward, ReadScratch};
use super::backward_rewrite::{OneRewrite, TokenRewrites};
use super::weights::{Sums, Weights, slot, zero_parameters};
use crate::cpu::buffer::{Buffer, Result};
use crate::cpu::parallel;
use crate::cpu::partition::{Documents, partition, split, useful_threads};
use crate::cpu::simd::convert::Accum;
use crate::cpu::simd::dispatch::{WithSimd, dispatch};
use crate::cpu::simd::features::{store, store_target, target};
use crate::cpu::simd::interleaved::Interleaved;
use crate::cpu::state::{Finish, Join, Mix, StateRows, Stored, Terms};
use crate::error;
use crate::problem::{Erase, Gradients, Incoming, Link, ParameterSums, RewriteRead, Saved, Sizes};
use crate::tensor::RowsMut;

/// Runs the operator backward on `threads` threads, for a state of type `T`; the forward filled `saved`.
pub fn backward<T: Stored>(
    problem: &RewriteRead,
    saved: &Saved,
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
    saved: &Saved,
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
    let (in_place, wanted) = (gradients.in_place, ParameterSums::new(gradients));
    let mut sums: Vec<Option<Sums<T::Accum>>> = bounds[1..].iter().map(|_| None).collect();
    {
        let state = gradients.state.as_mut().expect("the state always has a gradient");
        let states = state.split_rows(d * m, &bounds).into_iter();
        let mut directions = split(&mut gradients.direction, rewrites * d, &bounds);
        let mut values = split(&mut gradients.value, rewrites * m, &bounds);
        let mut gates = split(&mut gradients.gate, rewrites, &bounds);
        let parts: Vec<Part<'_, T>> = bounds
            .windows(2)
            .zip(states)
            .zip(&mut sums)
            .map(|((pair, grad_state), sums)| Part {
                problem,
                read: read.map(|(read, weights)| ReadBackward { read, taps, weights, saved, incoming }),
                saved,
                incoming,
                in_place,
                wanted,
                tokens: pair[0]..pair[1],
                grad_state,
                grad_write: directions()
                    .zip(values().zip(gates()))
                    .map(|(direction, (value, gate))| GradWrite { direction, value, gate }),
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
    saved: &'a Saved,
    incoming: &'a Incoming,
    /// `grad_state` holds the incoming ∂L/∂X' on entry
    in_place: bool,
    wanted: ParameterSums,
    tokens: Range<usize>,
    grad_state: RowsMut<'a>,
    grad_write: Option<GradWrite<'a>>,
    sums: &'a mut Option<Sums<T::Accum>>,
}

/// The rows of the gradients of a rewrite: dk, dv and dβ.
struct GradWrite<'a> {
    direction: RowsMut<'a>,
    value: RowsMut<'a>,
    gate: RowsMut<'a>,
}

/// One token's rows, used if they cannot be worked on in place.
struct Scratch<T: Stored> {
    /// X, if it is not stored [d][m]
    rebuilt: Buffer<T>,
    /// X' [d][m]
    new_state: Buffer<T>,
    /// k [n][d]
    direction: Buffer<T::Accum>,
    /// f = r (β v − α p) [n][m]; k fᵀ is added to X
    factors: Buffer<T::Accum>,
    grads: Grads<T::Accum>,
    read: ReadScratch<T::Accum>,
}

/// Of one token, what the gradients of its rewrites are computed from.
struct Grads<A> {
    /// G, with the read's dx ⊗ w [d][m]
    total: Buffer<A>,
    /// dk [n][d], unless it is computed in place
    direction: Buffer<A>,
    /// g of each k, and before it kᵀG, from which it is computed in place [n][m]
    g: Buffer<A>,
    /// b = α r g [n][m]; k bᵀ is subtracted from G
    back: Buffer<A>,
    /// the coefficient of each k in its own dk [n]
    on_k: Buffer<A>,
}

impl<T: Stored> Scratch<T> {
    fn new(problem: &RewriteRead, logits: usize) -> Result<Scratch<T>> {
        let Sizes { d, m, .. } = problem.sizes;
        let rewrites = problem.rewrites.count();
        Ok(Scratch {
            rebuilt: Buffer::zeros(if problem.chain.is_empty() { 0 } else { m * d })?,
            new_state: Buffer::zeros(m * d)?,
            direction: Buffer::zeros(rewrites * d)?,
            factors: Buffer::zeros(rewrites * m)?,
            grads: Grads {
                total: Buffer::zeros(m * d)?,
                direction: Buffer::zeros(rewrites * d)?,
                g: Buffer::zeros(rewrites * m)?,
                back: Buffer::zeros(rewrites * m)?,
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
    const AVX512: bool = T::Accum::AVX512;
    #[inline(always)]
    fn run<S: Interleaved>(mut self, simd: S) -> Result<()> {
        let (taps, m) = (self.problem.taps(), self.problem.sizes.m);
        let arithmetic = Arithmetic::<T> {
            stored: T::arithmetic(simd, m, true),
            scratch: T::arithmetic(simd, m, false),
            grad: T::Accum::arithmetic(simd, m, false),
        };
        // Allocated before the sums, which outlive it, so that the next part's scratch reuses its cached memory.
        let logits = self.read.as_ref().map_or(0, |read| read.weights.logit_rows);
        let mut scratch = Scratch::new(self.problem, logits)?;
        let mut sums =
            self.read.as_ref().map(|read| Sums::zeros(read.read, read.weights, self.wanted)).transpose()?;
        let documents = Documents::new(self.problem.sizes, &self.problem.document_starts);
        for (tokens, document) in documents.within(self.tokens.clone()) {
            // In a read over time X_t gets gradients from h_t … h_{t+K−1}, so dx runs K−1 tokens ahead of dX.
            let mut ahead = tokens.start;
            for token in tokens {
                let end = document.end.min(token + taps);
                self.run_token(simd, &arithmetic, token, ahead..end, &mut sums, &mut scratch);
                ahead = end;
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
        arithmetic: &Arithmetic<T>,
        token: usize,
        reads: Range<usize>,
        sums: &mut Option<Sums<T::Accum>>,
        scratch: &mut Scratch<T>,
    ) {
        let problem = self.problem;
        let (Sizes { d, m, .. }, rewrites) = (problem.sizes, problem.rewrites.count());
        let Scratch { rebuilt, new_state, direction, factors, grads, read: of_read } = scratch;
        let stored = problem.state.rows(d * m).row::<T>(token);
        self.rebuild(
            &*arithmetic.scratch,
            token,
            stored,
            [&mut *rebuilt, &mut *new_state],
            direction,
            factors,
        );
        let state = if problem.chain.is_empty() { stored } else { rebuilt };
        let rewrite = problem.rewrite.as_ref().zip(self.saved.stats.as_ref());
        if let Some((write, _)) = rewrite {
            write.direction.rows(rewrites * d).fetch(token + 1);
        }
        let rewrite = rewrite
            .map(|(write, stats)| TokenRewrites::new(write, stats, token, [rewrites, d, m], direction));
        let terms = rewrite.as_ref().map_or(Terms::none(), |rewrite| rewrite.terms(factors));
        let (mut weight, mut after, mut grad_weight) = (None, state, &mut [][..]);
        if let (Some(read), Some(sums)) = (&self.read, sums) {
            weight = read.weights.compress.as_deref();
            let recompress = weight.filter(|_| self.saved.compressed.is_none());
            let mut mix =
                recompress.map(|weight| Mix { weight, window: &mut of_read.x, ring: 1, slot: 0, taps: 1 });
            if rewrite.is_some() {
                // as the forward stored it
                arithmetic.scratch.write_read(state, terms.that_write(), Some(new_state), mix.as_mut());
                after = new_state;
            } else if mix.is_some() {
                arithmetic.scratch.write_read(state, Terms::none(), None, mix.as_mut());
            }
            let x = if weight.is_none() { T::widen_row(after, &mut of_read.x) } else { None };
            for ahead in reads.clone() {
                let own = self.tokens.contains(&ahead).then_some(&mut *sums);
                read.row(simd, ahead, x, own, of_read);
            }
            grad_weight = &mut sums.compress;
        }
        let incoming = self.incoming.grad_new_state.as_ref().map(|grad| grad.rows(d * m).row::<T>(token));
        let (grad, to): (_, &mut [T::Accum]) = if self.in_place {
            (Some(self.grad_state.as_rows().row::<T>(token)), &mut grads.total)
        } else if rewrite.is_none() {
            (incoming, target(&mut self.grad_state, token, &mut grads.total))
        } else {
            (incoming, &mut grads.total)
        };
        grads.g.fill(T::Accum::default());
        arithmetic.stored.join(&mut Join {
            features: d,
            grad,
            weight,
            dx: &of_read.dx,
            ring: problem.taps(),
            slot: slot(problem.taps(), token),
            taps: self.read.as_ref().map_or(0, |_| reads.end - token),
            to,
            k: if rewrites == 1 { terms.k } else { &[] },
            k_grad: &mut grads.g,
            state: after,
            grad_weight,
        });
        if let (Some(rewrite), Some(grad_write)) = (rewrite, &mut self.grad_write) {
            if rewrites > 1 {
                for (index, k_grad) in grads.g.chunks_exact_mut(m).enumerate() {
                    arithmetic.grad.products(rewrite.direction(index), &grads.total, k_grad);
                }
            }
            let grad_state = self.grad_state.row::<T>(token);
            grad_write.finish(&*arithmetic.stored, token, &rewrite, (terms, state), grad_state, grads);
        } else if self.in_place {
            store(&mut self.grad_state, token, &grads.total);
        } else {
            store_target(&mut self.grad_state, token, &grads.total);
        }
    }

    /// Applies the chain's rewrites to an anchor, each rounded as its forward rounded it: `rebuilt` is then X.
    #[inline(always)]
    fn rebuild(
        &self,
        arithmetic: &dyn StateRows<T>,
        token: usize,
        anchor: &[T],
        [rebuilt, spare]: [&mut Buffer<T>; 2],
        direction: &mut [T::Accum],
        factors: &mut [T::Accum],
    ) {
        let Sizes { d, m, .. } = self.problem.sizes;
        for (at, Link { write, stats }) in self.problem.chain.iter().enumerate() {
            let sizes = [self.problem.rewrites.count(), d, m];
            let rewrites = TokenRewrites::new(write, stats, token, sizes, direction);
            let from = if at == 0 { anchor } else { &**rebuilt };
            arithmetic.write_read(from, rewrites.terms(factors).that_write(), Some(spare), None);
            std::mem::swap(rebuilt, spare);
        }
    }
}

impl GradWrite<'_> {
    /// Computes the gradients of X, into `grad_state`, and of a token's rewrites from G and kᵀG.
    #[inline(always)]
    fn finish<T: Stored>(
        &mut self,
        arithmetic: &dyn StateRows<T>,
        token: usize,
        rewrite: &TokenRewrites<'_, T::Accum>,
        (terms, state): (Terms<'_, T::Accum>, &[T]),
        grad_state: &mut [T],
        grads: &mut Grads<T::Accum>,
    ) {
        let Grads { total: grad, direction, g, back, on_k } = grads;
        for index in (0..rewrite.count()).rev() {
            rewrite.complete_g(index, g);
        }
        let m = g.len() / rewrite.count();
        for (index, (g, back)) in g.chunks_exact(m).zip(back.chunks_exact_mut(m)).enumerate() {
            let one = rewrite.one(index);
            one.fill_back(g, back);
            on_k[index] = self.store_scalars(token, index, rewrite, &one, g);
        }
        let back = if rewrite.erase == Erase::None { &[] } else { &**back };
        let dk = target(&mut self.direction, token, direction);
        arithmetic.finish(&mut Finish { grad, state, terms, back, on_k, to: grad_state, dk });
        if rewrite.count() > 1 && rewrite.erase != Erase::None {
            let d = dk.len() / rewrite.count();
            for (index, dk) in dk.chunks_exact_mut(d).enumerate() {
                rewrite.add_others(index, dk, g);
            }
        }
        store_target(&mut self.direction, token, direction);
    }

    /// Stores dv and dβ of one of a token's rewrites; returns the coefficient of k in dk.
    #[inline(always)]
    fn store_scalars<A: Accum>(
        &mut self,
        token: usize,
        index: usize,
        rewrite: &TokenRewrites<'_, A>,
        one: &OneRewrite<'_, A>,
        g: &[A],
    ) -> A {
        let dvalue = &mut self.value.row::<A>(token)[index * g.len()..][..g.len()];
        for (dvalue, g) in dvalue.iter_mut().zip(g) {
            *dvalue = one.gate * *g;
        }
        let [target, readout] = one.target_and_readout_along(g);
        self.gate.row::<A>(token)[index] =
            if rewrite.erase == Erase::Tied { target } else { one.value_along(g) };
        one.on_k(target, readout)
    }
}
