//! The walk back through one chunk of a state, slice by slice.

use super::chunk::{Chunk, Steps, row, row_mut, scaled};
use super::division::{WIDEST, may_lag};
use super::partial::{Partial, Slice};
use super::slice::Sliced;
use super::transposed::{Back, Columns, Sums, back, dot, open, query};
use crate::cpu::simd::dispatch::WithSimd;
use crate::cpu::simd::interleaved::Interleaved;
use crate::problem::{DeltaRule, SavedOverTime};

/// Slices of one state, which share q, k and the decay.
pub struct Walk<'a, A> {
    pub problem: &'a DeltaRule,
    pub saved: &'a SavedOverTime,
    pub slices: &'a mut [Slice<A>],
    pub chunk: Chunk,
    pub scratch: &'a mut [A],
}

impl<A: Sliced> WithSimd for Walk<'_, A> {
    type Output = ();
    const AVX512: bool = A::AVX512;

    #[inline(always)]
    fn run<S: Interleaved>(self, simd: S) {
        let Walk { problem, saved, slices, chunk, scratch } = self;
        let units: Vec<_> = slices.iter().map(|slice| slice.unit.clone()).collect();
        let Some(first) = units.first() else { return };
        let mut steps = Steps::load(problem, first, chunk, scratch);
        for (slice, unit) in slices.iter_mut().zip(&units) {
            steps.load_slice(unit, saved);
            steps.rebuild(simd);
            steps.walk_back(simd, slice);
        }
    }
}

impl<A: Sliced> Steps<'_, A> {
    /// Adds the queries of a step's token to dS if the step is the token's last; dw = kᵀdS of the step.
    #[inline(always)]
    fn open<S: Interleaved>(&self, simd: S, at: usize, ds: &mut [A], lag: A, dw: &mut [A]) {
        let (rows, width) = (self.rows, self.width);
        let Steps { k, q, dy, zeros, .. } = self;
        let (k, none) = (row(k, at, rows), [A::default(); WIDEST]);
        let first = at / self.n * self.queries;
        if at % self.n + 1 < self.n {
            open(simd, ds, [&**zeros, k], &none[..width], dw);
        } else {
            for query in first..first + self.queries {
                let dy = scaled(A::from_f64(1.0) / lag, row(dy, query, width));
                open(simd, ds, [row(q, query, rows), k], &dy[..width], dw);
            }
        }
        scale(lag, dw);
    }

    #[inline(always)]
    fn walk_back<S: Interleaved>(&mut self, simd: S, slice: &mut Slice<A>) {
        let mut dw = [A::default(); WIDEST];
        let dw = &mut dw[..self.width];
        self.open(simd, self.count() - 1, &mut slice.ds, slice.lag, dw);
        for at in (0..self.count()).rev() {
            self.step_back(simd, at, slice, dw);
        }
    }

    /// Walks back one step. dw is this step's, and then that of the step before.
    #[inline(always)]
    fn step_back<S: Interleaved>(&mut self, simd: S, at: usize, slice: &mut Slice<A>, dw: &mut [A]) {
        let (rows, width, n) = (self.rows, self.width, self.n);
        let Slice { ds, lag, partial, .. } = slice;
        let (token, first) = (at / n, at / n * self.queries);
        let (queried, starts, beta) = (at % n + 1 == n, self.starts(at), self.beta(at));
        let (decays, by_row) = (self.decays(at), self.of.decays_by_row());

        // The lag after this step: dS' is that times what is stored, unless the pass multiplies it.
        let (before, one) = (*lag, A::from_f64(1.0));
        let mut multiplies = decays && by_row;
        if decays && !by_row {
            *lag = before * row(self.decay, token, rows)[0];
            if !may_lag(*lag) {
                self.multiply.fill(*lag);
                (multiplies, *lag) = (true, one);
            }
        }
        let Steps { states, k, decay, multiply, q, e, dy, ones, zeros, .. } = &*self;
        let e = row(e, at, width);
        let (w, dv, dp) = (scaled(beta, e), scaled(beta, dw), scaled(A::from_f64(-1.0) * beta, dw));
        for (to, from) in row_mut(&mut partial.dv, at, width).iter_mut().zip(dv) {
            *to = from;
        }
        partial.dbeta[at] = dot(simd, dw, e);

        // The pass adds the query of the step before to dS and computes its dw, unless more is between them.
        let fused = at > 0 && self.queries == 1 && !starts;
        let none = [A::default(); WIDEST];
        let (q_before, dy_before) = match fused && at.is_multiple_of(n) {
            true => (row(q, first - 1, rows), scaled(one / *lag, row(dy, first - 1, width))),
            false => (&**zeros, none),
        };
        let of = Back {
            lag: before,
            decay: if decays { row(decay, token, rows) } else { ones },
            multiply: if by_row { row(decay, token, rows) } else { multiply },
            k: row(k, at, rows),
            k_before: if fused { row(k, at - 1, rows) } else { zeros },
            q_before,
        };
        let dy = if queried { row(dy, first, width) } else { &none[..width] };
        let columns = Columns { w: &w[..width], dp: &dp[..width], dy, dy_before: &dy_before[..width] };
        let sums = &mut Sums {
            dq: row_mut(&mut partial.dq, first, rows),
            dk: row_mut(&mut partial.dk, at, rows),
            dg: &mut partial.sums,
        };
        let s = row(states, at, rows * width);
        match (queried, decays, multiplies) {
            (true, _, true) => back::<A, S, true, true, true>(simd, s, ds, &of, &columns, sums, dw),
            (false, _, true) => back::<A, S, false, true, true>(simd, s, ds, &of, &columns, sums, dw),
            (true, true, false) => back::<A, S, true, true, false>(simd, s, ds, &of, &columns, sums, dw),
            (false, true, false) => back::<A, S, false, true, false>(simd, s, ds, &of, &columns, sums, dw),
            (true, false, false) => back::<A, S, true, false, false>(simd, s, ds, &of, &columns, sums, dw),
            (false, false, false) => back::<A, S, false, false, false>(simd, s, ds, &of, &columns, sums, dw),
        }
        scale(*lag, dw);
        if queried {
            self.queries_back(simd, first, s, &of, &w[..width], partial);
        }
        if decays {
            self.decay_back(simd, at, *lag, partial);
        }
        if starts {
            ds.fill(A::default());
            *lag = one;
        }
        if at > 0 && !fused {
            self.open(simd, at - 1, ds, *lag, dw);
        }
    }

    /// Completes dq of a step's queries, of which the pass has computed the first.
    #[inline(always)]
    fn queries_back<S: Interleaved>(
        &self,
        simd: S,
        first: usize,
        s: &[A],
        of: &Back<'_, A>,
        w: &[A],
        partial: &mut Partial<A>,
    ) {
        for at in first..first + self.queries {
            let (dq, dy) = (row_mut(&mut partial.dq, at, self.rows), row(self.dy, at, self.width));
            if at > first {
                query(simd, s, of.decay, dy, dq);
            }
            let along = dot(simd, w, dy);
            for (dq, k) in dq.iter_mut().zip(of.k) {
                *dq += along * *k;
            }
        }
    }

    /// Stores dg = ⟨S, dS⟩ before the first step of a token, which the pass has computed of each row. Where a state
    /// begins it is zero. To derive it from ⟨S, dS⟩ of the next token would save a multiplication of every vector, but after
    /// a strong decay the result would be the rounding of far larger terms.
    #[inline(always)]
    fn decay_back<S: Interleaved>(&self, simd: S, at: usize, lag: A, partial: &mut Partial<A>) {
        let token = at / self.n;
        let by_row: &[A] = if self.begins(at) { self.zeros } else { &partial.sums };
        match self.of.decays_by_row() {
            true => row_mut(&mut partial.dg, token, self.rows).copy_from_slice(by_row),
            false => partial.dg[token] = lag * dot(simd, by_row, self.ones),
        }
    }
}

#[inline(always)]
fn scale<A: Sliced>(by: A, row: &mut [A]) {
    for number in row {
        *number *= by;
    }
}
