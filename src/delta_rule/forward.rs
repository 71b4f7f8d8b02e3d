//! The forward: every slice goes through all tokens by itself.
//!
//! One pass over the slice per step writes S, queries it and computes the next step's kᵀS: per vector of the slice one load,
//! one store and three multiplications with additions; one more if every row has a decay of its own.

use super::division::{Unit, chunk_tokens, chunks, may_lag, units, useful_threads};
use super::rows::{Rows, store as store_row, take};
use super::single;
use super::slice::{self, BLOCK, Row, Sliced, Step, load, product, rows_mut, scaled, step, store};
use crate::cpu::buffer::{Buffer, Result};
use crate::cpu::parallel;
use crate::cpu::simd::dispatch::{WithSimd, dispatch};
use crate::cpu::simd::interleaved::Interleaved;
use crate::problem::{DeltaRule, OverTime};
use crate::tensor::{Block, Tensor};

/// Steps after which a row that is fetched is used.
const AHEAD: usize = 4;

/// The outputs of a forward.
pub struct Outputs {
    pub y: Tensor,
    pub final_state: Tensor,
    /// v − kᵀS of every step and the states before every chunk, if there will be a backward
    pub saved: Option<[Tensor; 2]>,
}

pub fn forward<A: Sliced>(problem: &DeltaRule, outputs: &mut Outputs, threads: usize) -> Result<()> {
    let sizes = problem.sizes;
    let OverTime { batch, time, steps, states, key, value, .. } = sizes;
    if outputs.saved.is_none() && single::fits::<A>(problem) {
        return single::forward::<A>(problem, &mut outputs.y, &mut outputs.final_state, threads);
    }
    let per_state = sizes.queries_of_a_state();
    let mut y = outputs.y.split_blocks([batch, time, sizes.outputs(), value], per_state, A::COLUMNS);
    let mut final_state = outputs.final_state.split_blocks([batch * states, key, 1, value], 1, A::COLUMNS);
    let mut saved = match &mut outputs.saved {
        None => Vec::new(),
        Some([errors, kept]) => {
            let errors = errors.split_blocks([batch, time * steps, states, value], 1, A::COLUMNS);
            let kept = kept.split_blocks([batch * states, chunks(sizes) * key, 1, value], 1, A::COLUMNS);
            errors.into_iter().zip(kept).collect()
        }
    };
    let units = units(sizes, A::COLUMNS);
    let (mut y, mut final_state, mut saved) = (y.drain(..), final_state.drain(..), saved.drain(..));
    let tasks = units.into_iter().map(|unit| Forward::<A> {
        problem,
        unit,
        y: y.next(),
        saved: saved.next(),
        final_state: final_state.next().expect("a block for each unit"),
        of: std::marker::PhantomData,
    });
    parallel::for_each(tasks.collect(), useful_threads(problem, threads), dispatch)
}

struct Forward<'a, A> {
    problem: &'a DeltaRule,
    unit: Unit,
    y: Option<Block<'a>>,
    saved: Option<(Block<'a>, Block<'a>)>,
    final_state: Block<'a>,
    of: std::marker::PhantomData<A>,
}

impl<A: Sliced> WithSimd for Forward<'_, A> {
    type Output = Result<()>;
    const AVX512: bool = A::AVX512;

    #[inline(always)]
    fn run<S: Interleaved>(mut self, simd: S) -> Result<()> {
        let OverTime { time, steps, key, .. } = self.problem.sizes;
        let padded = key.next_multiple_of(BLOCK);
        let mut memory = Buffer::<A>::zeros((A::COLUMNS + 6) * padded + A::COLUMNS)?;
        let mut rest = &mut *memory;
        let unit = self.unit.clone();
        let rows = Rows::new(self.problem, &unit);
        let state = take(&mut rest, A::COLUMNS * padded);
        let [k, next_k] = [take(&mut rest, padded), take(&mut rest, padded)];
        let [decay, next_decay] = [take(&mut rest, padded), take(&mut rest, padded)];
        let [next, q] = [take(&mut rest, padded), take(&mut rest, padded)];
        let mut of = Loaded { rows: &rows, steps, k, next_k, decay, next_decay, next, q, columns: rest };
        if let Some(initial) = &self.problem.initial_state {
            for (row, to) in state.chunks_exact_mut(A::COLUMNS).take(key).enumerate() {
                rows.state(initial, [0, 1], row, to);
            }
        }
        let (mut p, mut lag) = (slice::zeros::<A, S>(simd), A::from_f64(1.0));
        if time > 0 {
            of.load_next(0);
            p = product(simd, rows_mut(state), of.next);
        }
        for at in 0..time * steps {
            of.go_to(at);
            if at.is_multiple_of(steps) && rows.starts(at / steps) {
                state.fill(A::default());
                (p, lag) = (slice::zeros::<A, S>(simd), A::from_f64(1.0));
            }
            if at.is_multiple_of(steps) {
                self.keep(at / steps, state, lag);
            }
            rows.fetch(at + AHEAD);
            if at + 1 < time * steps {
                of.load_next(at + 1);
            }
            p = self.step(simd, at, state, &mut of, p, &mut lag);
        }
        unpack(state, lag, key, &mut self.final_state, 0);
        Ok(())
    }
}

/// The rows of a step and of the next one.
struct Loaded<'a, A> {
    rows: &'a Rows<'a>,
    steps: usize,
    k: &'a mut [A],
    next_k: &'a mut [A],
    /// a of the token, if every row has its own
    decay: &'a mut [A],
    next_decay: &'a mut [A],
    /// the next step's k, times its a if every row has its own
    next: &'a mut [A],
    q: &'a mut [A],
    /// one number of each of the slice's columns
    columns: &'a mut [A],
}

impl<A: Sliced> Loaded<'_, A> {
    #[inline(always)]
    fn load_next(&mut self, at: usize) {
        self.rows.k(at, self.next_k);
        self.next.copy_from_slice(self.next_k);
        if at.is_multiple_of(self.steps) && self.rows.decays_by_row() {
            self.rows.decay(at / self.steps, self.next_decay);
            for (product, decay) in self.next.iter_mut().zip(&*self.next_decay) {
                *product *= *decay;
            }
        }
    }

    /// Takes the rows that were loaded as the next step's.
    #[inline(always)]
    fn go_to(&mut self, at: usize) {
        std::mem::swap(&mut self.k, &mut self.next_k);
        if at.is_multiple_of(self.steps) {
            std::mem::swap(&mut self.decay, &mut self.next_decay);
        }
    }
}

impl<A: Sliced> Forward<'_, A> {
    /// Does one step. p is kᵀS as it is stored, of this step and then of the next. S is lag times what is stored.
    #[inline(always)]
    fn step<S: Interleaved>(
        &mut self,
        simd: S,
        at: usize,
        state: &mut [A],
        of: &mut Loaded<'_, A>,
        p: Row<A, S>,
        lag: &mut A,
    ) -> Row<A, S> {
        let (token, inner) = (at / of.steps, at % of.steps);
        let mut decays = inner == 0 && of.rows.decays_by_row();
        if inner == 0 && !decays {
            *lag *= of.rows.head_decay::<A>(token);
        }
        let p = scaled(simd, *lag, p);
        if !may_lag(*lag) {
            of.decay.fill(*lag);
            (decays, *lag) = (true, A::from_f64(1.0));
        }
        let w = self.write(simd, of, at, p, *lag);
        let queried = inner + 1 == of.steps;
        if queried {
            of.rows.q(token, 0, of.q);
        }
        let factors = Step { decay: of.decay, k: of.k, q: of.q, next: of.next };
        let (y, next) = match (decays, queried) {
            (true, true) => step::<A, S, true, true>(simd, rows_mut(state), &factors, w),
            (true, false) => step::<A, S, true, false>(simd, rows_mut(state), &factors, w),
            (false, true) => step::<A, S, false, true>(simd, rows_mut(state), &factors, w),
            (false, false) => step::<A, S, false, false>(simd, rows_mut(state), &factors, w),
        };
        if queried {
            self.output(simd, scaled(simd, *lag, y), [token, 0], of.columns);
            for query in 1..self.problem.sizes.queries_of_a_state() {
                of.rows.q(token, query, of.q);
                let y = product::<A, S>(simd, rows_mut(state), of.q);
                self.output(simd, scaled(simd, *lag, y), [token, query], of.columns);
            }
        }
        next
    }

    /// Saves the state before a token that begins a chunk.
    #[inline(always)]
    fn keep(&mut self, token: usize, state: &[A], lag: A) {
        let (tokens, key) = (chunk_tokens(self.problem.sizes), self.problem.sizes.key);
        if let Some((_, states)) = &mut self.saved
            && token.is_multiple_of(tokens)
        {
            unpack(state, lag, key, states, token / tokens * key);
        }
    }

    /// Returns w = β (v − p), by which the stored state changes, and saves the error v − p.
    #[inline(always)]
    fn write<S: Interleaved>(
        &mut self,
        simd: S,
        of: &mut Loaded<'_, A>,
        at: usize,
        p: Row<A, S>,
        lag: A,
    ) -> Row<A, S> {
        of.rows.v(at, of.columns);
        let mut error = load::<A, S>(simd, of.columns);
        for c in 0..2 {
            error[c] -= p[c];
        }
        if let Some((errors, _)) = &mut self.saved {
            store::<A, S>(error, of.columns);
            store_row(of.columns, errors, at, 0);
        }
        scaled::<A, S>(simd, of.rows.beta::<A>(at) / lag, error)
    }

    #[inline(always)]
    fn output<S: Interleaved>(
        &mut self,
        simd: S,
        y: Row<A, S>,
        [token, query]: [usize; 2],
        columns: &mut [A],
    ) {
        let Some(block) = &mut self.y else { return };
        store::<A, S>(scaled::<A, S>(simd, A::from_f64(self.problem.scale), y), columns);
        store_row(columns, block, token, query);
    }
}

/// Unpacks lag times a state into rows of a block, from row `first` on.
#[inline(always)]
fn unpack<A: Sliced>(state: &[A], lag: A, key: usize, block: &mut Block<'_>, first: usize) {
    for (row, from) in state.chunks_exact(A::COLUMNS).take(key).enumerate() {
        for (to, from) in block.row::<A>(first + row, 0).iter_mut().zip(from) {
            *to = lag * *from;
        }
    }
}
