//! The forward: every slice goes through all tokens by itself.
//!
//! One pass over the slice writes S, queries it and computes kᵀS of the steps that come next. It does two
//! steps wherever the state is not needed between them; what the first one changes is then added to the
//! second one's kᵀS and to the first query. Per vector of the slice that is one load, one store and six
//! multiplications with additions; one more if every row has a decay of its own.

use super::division::{Unit, chunk_tokens, chunks, may_lag, padded, units, useful_threads};
use super::loaded::{KEPT, Loaded, Place, ROWS, multiply_by};
use super::rows::{Rows, store as store_row, take};
use super::single;
use super::slice::{
    self, Pair, Row, Sliced, Step, added, load, product, rows_mut, scaled, step, steps, store,
};
use super::transposed::dot;
use crate::cpu::buffer::{Buffer, Result};
use crate::cpu::parallel;
use crate::cpu::simd::dispatch::{WithSimd, dispatch};
use crate::cpu::simd::interleaved::Interleaved;
use crate::problem::{DeltaRule, OverTime};
use crate::tensor::{Block, Tensor};

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
        y: y.next().expect("a block for each unit"),
        saved: saved.next(),
        final_state: final_state.next().expect("a block for each unit"),
        of: std::marker::PhantomData,
    });
    parallel::for_each(tasks.collect(), useful_threads(problem, threads), dispatch)
}

struct Forward<'a, A> {
    problem: &'a DeltaRule,
    unit: Unit,
    y: Block<'a>,
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
        let size = padded(self.problem.sizes);
        let mut memory = Buffer::<A>::zeros((A::COLUMNS + ROWS) * size + A::COLUMNS)?;
        let mut rest = &mut *memory;
        let unit = self.unit.clone();
        let rows = Rows::new(self.problem, &unit);
        let state = take(&mut rest, A::COLUMNS * size);
        let mut of = Loaded::new(&rows, self.problem.sizes, size, rest);
        let mut known = Known::of_zeros(simd);
        if let Some(initial) = &self.problem.initial_state {
            for (row, to) in state.chunks_exact_mut(A::COLUMNS).take(key).enumerate() {
                rows.state(initial, [0, 1], row, to);
            }
            known.count = 0;
        }
        let (mut place, mut done) = (Place::default(), KEPT);
        while place.token < time {
            for _ in 0..done {
                of.advance();
            }
            if place.inner == 0 && rows.starts(place.token) {
                state.fill(A::default());
                known = Known::of_zeros(simd);
            }
            if place.inner == 0 {
                self.keep(place.token, state, known.lag);
            }
            done = self.pass(simd, place, state, &mut of, &mut known);
            for _ in 0..done {
                place = place.after(steps);
            }
        }
        unpack(state, known.lag, key, &mut self.final_state, 0);
        Ok(())
    }
}

/// What is known of a state before a pass. The state is lag times what is stored.
struct Known<A: Sliced, S: Interleaved> {
    /// the products of what is stored with k of the next steps, of so many
    p: [Row<A, S>; 2],
    count: usize,
    lag: A,
}

impl<A: Sliced, S: Interleaved> Known<A, S> {
    #[inline(always)]
    fn of_zeros(simd: S) -> Self {
        Known { p: [slice::zeros::<A, S>(simd); 2], count: 2, lag: A::from_f64(1.0) }
    }
}

/// The steps of a pass: one or two.
struct Group<A> {
    count: usize,
    places: [Place; 2],
    /// whether a step is a token's last
    queried: [bool; 2],
    /// p is this times kᵀ of what is stored
    lag_of_p: [A; 2],
    /// for w and y: the same, or 1 if the pass multiplies what is stored
    lag_of_w: [A; 2],
    decays: bool,
}

impl<A: Sliced> Forward<'_, A> {
    /// Does the next step, or the next two, in one pass over the state. Returns how many.
    #[inline(always)]
    fn pass<S: Interleaved>(
        &mut self,
        simd: S,
        place: Place,
        state: &mut [A],
        of: &mut Loaded<'_, A>,
        known: &mut Known<A, S>,
    ) -> usize {
        let group = self.group(of, place, known.lag);
        let count = group.count;
        if known.count < count {
            of.decay_products(0);
            for n in known.count..count {
                known.p[n] = product(simd, rows_mut(state), of.products(0)[n]);
            }
        }
        let mut w = [slice::zeros::<A, S>(simd); 2];
        for n in 0..count {
            let mut p = known.p[n];
            if n > 0 {
                p = added(simd, dot(simd, of.decayed_k(), of.k(1)), w[0], p);
            }
            w[n] = self.write(
                simd,
                of,
                group.places[n].step,
                scaled(simd, group.lag_of_p[n], p),
                group.lag_of_w[n],
            );
        }
        let y = Self::rewrite(simd, &group, state, of, w, known);
        for (n, y) in y.into_iter().enumerate().take(count) {
            if group.queried[n] {
                let (token, lag) = (group.places[n].token, group.lag_of_w[n]);
                self.outputs(simd, token, state, of, lag, y);
            }
        }
        count
    }

    /// Returns the steps of the next pass, and fills what it multiplies by: two, unless the state is
    /// needed between them.
    #[inline(always)]
    fn group(&self, of: &mut Loaded<'_, A>, place: Place, lag: A) -> Group<A> {
        let (places, by_row) = ([place, place.after(of.steps)], of.rows.decays_by_row());
        let apart = |next: Place| {
            let several = self.problem.sizes.queries_of_a_state() > 1;
            // Between chunks, whether or not the states are saved: of more than one step that changes no bit.
            let chunk = next.token.is_multiple_of(of.chunk);
            next.inner == 0 && (several || chunk || of.rows.starts(next.token))
        };
        let mut count = if places[1].step == of.all || apart(places[1]) { 1 } else { 2 };
        let (mut lag_of_p, mut so_far) = ([lag; 2], lag);
        for n in 0..count {
            if places[n].inner == 0 && !by_row {
                so_far *= of.rows.head_decay::<A>(places[n].token);
            }
            lag_of_p[n] = so_far;
        }
        let mut lag_of_w = lag_of_p;
        let mut decays = by_row && places[..count].iter().any(|place| place.inner == 0);
        if !lag_of_p[..count].iter().all(|lag| may_lag(*lag)) {
            count = 1;
        }
        if !may_lag(lag_of_p[0]) {
            of.multiply.fill(lag_of_p[0]);
            (decays, lag_of_w[0]) = (true, A::from_f64(1.0));
        } else if by_row {
            of.decay_pass(count);
        }
        Group {
            count,
            places,
            queried: places.map(|place| place.inner + 1 == of.steps),
            lag_of_p,
            lag_of_w,
            decays,
        }
    }

    /// Changes the state by w, queries it, and computes what is known before the next pass.
    #[inline(always)]
    fn rewrite<S: Interleaved>(
        simd: S,
        group: &Group<A>,
        state: &mut [A],
        of: &mut Loaded<'_, A>,
        w: [Row<A, S>; 2],
        known: &mut Known<A, S>,
    ) -> [Row<A, S>; 2] {
        for n in 0..group.count {
            if group.queried[n] {
                of.rows.q(group.places[n].token, 0, of.q[n]);
            }
        }
        of.decay_products(group.count); // overwrites the products that p was computed from
        (known.count, known.lag) = (group.count, group.lag_of_w[group.count - 1]);
        match group.count {
            1 => [Self::one(simd, group, state, of, w[0], known); 2],
            _ => Self::two(simd, group, state, of, w, known),
        }
    }

    /// Does a single step; returns its first query's sum.
    #[inline(always)]
    fn one<S: Interleaved>(
        simd: S,
        group: &Group<A>,
        state: &mut [A],
        of: &mut Loaded<'_, A>,
        w: Row<A, S>,
        known: &mut Known<A, S>,
    ) -> Row<A, S> {
        let next = of.products(1)[0];
        let factors = Step { decay: of.multiply, k: of.k(0), q: of.q[0], next };
        let (y, p) = match (group.decays, group.queried[0]) {
            (true, true) => step::<A, S, true, true>(simd, rows_mut(state), &factors, w),
            (true, false) => step::<A, S, true, false>(simd, rows_mut(state), &factors, w),
            (false, true) => step::<A, S, false, true>(simd, rows_mut(state), &factors, w),
            (false, false) => step::<A, S, false, false>(simd, rows_mut(state), &factors, w),
        };
        known.p[0] = p;
        y
    }

    /// Does two steps; returns the sums of their queries.
    #[inline(always)]
    fn two<S: Interleaved>(
        simd: S,
        group: &Group<A>,
        state: &mut [A],
        of: &mut Loaded<'_, A>,
        w: [Row<A, S>; 2],
        known: &mut Known<A, S>,
    ) -> [Row<A, S>; 2] {
        let (decays, [first, second]) = (group.decays, group.queried);
        let along = dot(simd, of.q[0], of.k(0)); // before q takes the decay
        if first && decays {
            multiply_by(of.q[0], &of.decay[of.range(0)]);
        }
        let factors = Pair {
            decay: of.multiply,
            k: [of.decayed_k(), of.k(1)],
            q: of.q.each_ref().map(|row| &**row),
            next: of.products(2),
        };
        let pass = match (decays, first, second) {
            (true, true, true) => steps::<A, S, true, true, true>,
            (true, true, false) => steps::<A, S, true, true, false>,
            (true, false, true) => steps::<A, S, true, false, true>,
            (true, false, false) => steps::<A, S, true, false, false>,
            (false, true, true) => steps::<A, S, false, true, true>,
            (false, true, false) => steps::<A, S, false, true, false>,
            (false, false, true) => steps::<A, S, false, false, true>,
            (false, false, false) => steps::<A, S, false, false, false>,
        };
        let mut sums = [slice::zeros::<A, S>(simd); 4];
        pass(simd, rows_mut(state), &factors, &w, &mut sums);
        known.p = [sums[2], sums[3]];
        [added(simd, along, w[0], sums[0]), sums[1]]
    }

    /// Writes all outputs of a token, of which y is the first.
    #[inline(always)]
    fn outputs<S: Interleaved>(
        &mut self,
        simd: S,
        token: usize,
        state: &mut [A],
        of: &mut Loaded<'_, A>,
        lag: A,
        mut y: Row<A, S>,
    ) {
        for query in 0..self.problem.sizes.queries_of_a_state() {
            if query > 0 {
                of.rows.q(token, query, of.q[0]);
                y = product::<A, S>(simd, rows_mut(state), of.q[0]);
            }
            self.output(simd, scaled(simd, lag, y), [token, query], of.columns);
        }
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
        store::<A, S>(scaled::<A, S>(simd, A::from_f64(self.problem.scale), y), columns);
        store_row(columns, &mut self.y, token, query);
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
