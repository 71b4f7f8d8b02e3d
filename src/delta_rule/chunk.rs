//! One chunk of a state in the backward: the rows that it takes, and the states before its steps.

use super::division::{Unit, WIDEST, padded, width};
use super::rows::{Rows, take};
use super::slice::Sliced;
use super::transposed::{put, rebuild};
use crate::cpu::buffer::{Buffer, Result};
use crate::cpu::simd::interleaved::Interleaved;
use crate::problem::{DeltaRule, OverTime, SavedOverTime};

/// Steps after which a row that is fetched is loaded.
const AHEAD: usize = 4;

/// The tokens of a chunk: so many, the first of which is `first`. It is the `index`-th of so many.
#[derive(Clone, Copy)]
pub struct Chunk {
    pub first: usize,
    pub tokens: usize,
    pub index: usize,
    pub chunks: usize,
}

/// Returns the memory that a walk takes: the chunk's states, and the rows of its steps.
pub fn scratch<A: Sliced>(sizes: OverTime, tokens: usize) -> Result<Buffer<A>> {
    let (rows, width, queries) = (padded(sizes), width::<A>(sizes), sizes.queries_of_a_state());
    let of_steps = tokens * sizes.steps * (width * rows + rows + width);
    Buffer::zeros(of_steps + tokens * (rows + queries * (rows + width)) + 3 * rows)
}

/// The steps of a chunk, counted from its first, and everything that they take in the type of the arithmetic.
pub struct Steps<'a, A> {
    pub problem: &'a DeltaRule,
    pub chunk: Chunk,
    /// steps of a token
    pub n: usize,
    /// of a token, to this state
    pub queries: usize,
    /// numbers of a row: K, padded, and the columns of a slice
    pub rows: usize,
    pub width: usize,
    pub of: Rows<'a>,
    /// of the state: k of every step, q of every query, the decay of every token
    pub k: &'a mut [A],
    pub q: &'a mut [A],
    pub decay: &'a mut [A],
    /// what dS is multiplied by if its lag becomes too large
    pub multiply: &'a mut [A],
    pub ones: &'a mut [A],
    pub zeros: &'a mut [A],
    /// of a slice: the state before every step, e of every step, dy of every query
    pub states: &'a mut [A],
    pub e: &'a mut [A],
    pub dy: &'a mut [A],
}

/// Row `at` of rows of so many numbers.
#[inline(always)]
pub fn row<A>(rows: &[A], at: usize, size: usize) -> &[A] {
    &rows[at * size..][..size]
}

#[inline(always)]
pub fn row_mut<A>(rows: &mut [A], at: usize, size: usize) -> &mut [A] {
    &mut rows[at * size..][..size]
}

/// scale · from
#[inline(always)]
pub fn scaled<A: Sliced>(scale: A, from: &[A]) -> [A; WIDEST] {
    let mut to = [A::default(); WIDEST];
    for (to, from) in to.iter_mut().zip(from) {
        *to = scale * *from;
    }
    to
}

impl<'a, A: Sliced> Steps<'a, A> {
    /// Loads what all slices of a state share.
    #[inline(always)]
    pub fn load(problem: &'a DeltaRule, unit: &'a Unit, chunk: Chunk, mut rest: &'a mut [A]) -> Steps<'a, A> {
        let (rows, width) = (padded(problem.sizes), width::<A>(problem.sizes));
        let (n, queries) = (problem.sizes.steps, problem.sizes.queries_of_a_state());
        let (steps, all_queries) = (chunk.tokens * n, chunk.tokens * queries);
        let to = Steps {
            problem,
            chunk,
            n,
            queries,
            rows,
            width,
            of: Rows::new(problem, unit),
            k: take(&mut rest, steps * rows),
            q: take(&mut rest, all_queries * rows),
            decay: take(&mut rest, chunk.tokens * rows),
            multiply: take(&mut rest, rows),
            ones: take(&mut rest, rows),
            zeros: take(&mut rest, rows),
            states: take(&mut rest, steps * rows * width),
            e: take(&mut rest, steps * width),
            dy: take(&mut rest, all_queries * width),
        };
        to.ones.fill(A::from_f64(1.0));
        to.zeros.fill(A::default());
        for at in 0..steps {
            to.of.fetch(chunk.first * n + at + AHEAD);
            to.of.k(chunk.first * n + at, row_mut(to.k, at, rows));
        }
        for token in 0..chunk.tokens {
            match to.of.decays_by_row() {
                true => to.of.decay(chunk.first + token, row_mut(to.decay, token, rows)),
                false => row_mut(to.decay, token, rows).fill(to.of.head_decay(chunk.first + token)),
            }
            for query in 0..queries {
                to.of.q(chunk.first + token, query, row_mut(to.q, token * queries + query, rows));
            }
        }
        to
    }

    /// Loads what a slice has of its own.
    #[inline(always)]
    pub fn load_slice(&mut self, unit: &'a Unit, saved: &SavedOverTime) {
        let (n, queries, rows, width) = (self.n, self.queries, self.rows, self.width);
        let Chunk { first, tokens, index, chunks } = self.chunk;
        self.of = Rows::new(self.problem, unit);
        self.states[..rows * width].fill(A::default());
        let mut line = [A::default(); WIDEST];
        for at in 0..self.problem.sizes.key {
            self.of.state(&saved.states, [index, chunks], at, &mut line[..width]);
            put(self.states, width, at, &line[..width]);
        }
        for at in 0..tokens * n {
            self.of.error(&saved.errors, first * n + at, row_mut(self.e, at, width));
        }
        for at in 0..tokens * queries {
            let dy = row_mut(self.dy, at, width);
            match &saved.grad_y {
                None => dy.fill(A::default()),
                Some(grad) => self.of.output(grad, first + at / queries, at % queries, dy),
            }
            let scale = A::from_f64(self.problem.scale);
            for dy in dy {
                *dy *= scale;
            }
        }
    }

    pub fn count(&self) -> usize {
        self.chunk.tokens * self.n
    }

    /// Returns true if the state begins again right before this step.
    #[inline(always)]
    pub fn starts(&self, at: usize) -> bool {
        at.is_multiple_of(self.n) && self.of.starts(self.chunk.first + at / self.n)
    }

    /// Returns true if the state right before this step is zero.
    #[inline(always)]
    pub fn begins(&self, at: usize) -> bool {
        self.starts(at) || self.chunk.first + at == 0 && self.problem.initial_state.is_none()
    }

    /// Returns true if the state decays right before this step.
    #[inline(always)]
    pub fn decays(&self, at: usize) -> bool {
        self.of.decays() && at.is_multiple_of(self.n)
    }

    #[inline(always)]
    pub fn beta(&self, at: usize) -> A {
        self.of.beta(self.chunk.first * self.n + at)
    }

    /// Computes the states before all steps but the first from that.
    #[inline(always)]
    pub fn rebuild<S: Interleaved>(&mut self, simd: S) {
        let (rows, width) = (self.rows, self.width);
        for at in 0..self.count() - 1 {
            let (starts, decays) = (self.starts(at + 1), self.decays(at));
            let w = scaled(self.beta(at), row(self.e, at, width));
            let both = &mut self.states[at * rows * width..(at + 2) * rows * width];
            let (old, new) = both.split_at_mut(rows * width);
            let factors = [row(self.decay, at / self.n, rows), row(self.k, at, rows)];
            match (starts, decays) {
                (true, _) => new.fill(A::default()),
                (_, true) => rebuild::<A, S, true>(simd, old, new, factors, &w[..width]),
                (_, false) => rebuild::<A, S, false>(simd, old, new, factors, &w[..width]),
            }
        }
    }
}
