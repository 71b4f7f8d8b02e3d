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
        let mut along = None;
        for at in (0..self.count()).rev() {
            self.step_back(simd, at, slice, dw, &mut along);
        }
    }

    /// Walks back one step. dw is this step's, and then that of the step before. along: ⟨S, dS⟩ after the step and then
    /// before it, for a decay of the whole head; None if it is not known.
    #[inline(always)]
    fn step_back<S: Interleaved>(
        &mut self,
        simd: S,
        at: usize,
        slice: &mut Slice<A>,
        dw: &mut [A],
        along: &mut Option<A>,
    ) {
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
            decay: if decays { row(decay, token, rows) } else { ones },
            multiply: if by_row { row(decay, token, rows) } else { multiply },
            k: row(k, at, rows),
            k_before: if fused { row(k, at - 1, rows) } else { zeros },
            q_before,
        };
        let dy = if queried { row(dy, first, width) } else { &none[..width] };
        let (of_ds, dp_of_ds) = (scaled(before, &w[..width]), scaled(one / before, &dp[..width]));
        let columns = Columns {
            w: &of_ds[..width],
            dp: &dp[..width],
            dp_of_ds: &dp_of_ds[..width],
            dy,
            dy_before: &dy_before[..width],
        };
        let sums = &mut Sums {
            dq: row_mut(&mut partial.dq, first, rows),
            dk: row_mut(&mut partial.dk, at, rows),
            dg: &mut partial.sums,
        };
        let s = row(states, at, rows * width);
        let wanted = self.of.decays() && if by_row { at.is_multiple_of(n) } else { along.is_none() };
        match (queried, wanted, multiplies) {
            (true, _, true) => back::<A, S, true, true, true>(simd, s, ds, &of, &columns, sums, dw),
            (false, _, true) => back::<A, S, false, true, true>(simd, s, ds, &of, &columns, sums, dw),
            (true, true, false) => back::<A, S, true, true, false>(simd, s, ds, &of, &columns, sums, dw),
            (false, true, false) => back::<A, S, false, true, false>(simd, s, ds, &of, &columns, sums, dw),
            (true, false, false) => back::<A, S, true, false, false>(simd, s, ds, &of, &columns, sums, dw),
            (false, false, false) => back::<A, S, false, false, false>(simd, s, ds, &of, &columns, sums, dw),
        }
        scale(*lag, dw);
        let y_dy = match queried {
            true => self.queries_back(simd, first, s, &of, &w[..width], partial),
            false => A::default(),
        };
        if self.of.decays() {
            self.decay_back(simd, at, [y_dy, *lag], &dv[..width], partial, along);
        }
        if starts {
            ds.fill(A::default());
            *lag = one;
        }
        if at > 0 && !fused {
            self.open(simd, at - 1, ds, *lag, dw);
        }
    }

    /// Completes dq of a step's queries, of which the pass has computed the first; returns y·dy.
    #[inline(always)]
    fn queries_back<S: Interleaved>(
        &self,
        simd: S,
        first: usize,
        s: &[A],
        of: &Back<'_, A>,
        w: &[A],
        partial: &mut Partial<A>,
    ) -> A {
        let mut y_dy = A::default();
        for at in first..first + self.queries {
            let (dq, dy) = (row_mut(&mut partial.dq, at, self.rows), row(self.dy, at, self.width));
            if at > first {
                query(simd, s, of.decay, dy, dq);
            }
            let along = dot(simd, w, dy);
            for (dq, k) in dq.iter_mut().zip(of.k) {
                *dq += along * *k;
            }
            y_dy += dot(simd, dq, row(self.q, at, self.rows));
        }
        y_dy
    }

    /// Stores dg = ⟨S, dS⟩ before the first step of a token. Of a whole head it is that after the step, plus y·dy − v·dv,
    /// once it has been computed in a chunk; of each row the pass has computed it. Where a state begins it is zero.
    #[inline(always)]
    fn decay_back<S: Interleaved>(
        &self,
        simd: S,
        at: usize,
        [y_dy, lag]: [A; 2],
        dv: &[A],
        partial: &mut Partial<A>,
        along: &mut Option<A>,
    ) {
        let (token, starts) = (at / self.n, self.begins(at));
        if self.of.decays_by_row() {
            if at.is_multiple_of(self.n) {
                let to = row_mut(&mut partial.dg, token, self.rows);
                to.copy_from_slice(if starts { self.zeros } else { &partial.sums });
            }
            return;
        }
        let before = match *along {
            _ if starts => A::default(),
            None => lag * dot(simd, &partial.sums, self.ones),
            Some(after) => after + y_dy - dot(simd, row(self.v, at, self.width), dv),
        };
        *along = Some(before);
        partial.dg[token] = before;
    }
}

#[inline(always)]
fn scale<A: Sliced>(by: A, row: &mut [A]) {
    for number in row {
        *number *= by;
    }
}
