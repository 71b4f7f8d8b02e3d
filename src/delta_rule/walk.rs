//! The walk back through one chunk of a state, slice by slice.

use super::chunk::{Chunk, Steps, row, row_mut, scaled};
use super::division::WIDEST;
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

    #[inline(always)]
    fn run<S: Interleaved>(self, simd: S) {
        let Walk { problem, saved, slices, chunk, scratch } = self;
        let units: Vec<_> = slices.iter().map(|slice| slice.unit.clone()).collect();
        let Some(first) = units.first() else { return };
        let mut steps = Steps::load(problem, first, chunk, scratch);
        for (slice, unit) in slices.iter_mut().zip(&units) {
            steps.load_slice(unit, saved);
            steps.rebuild(simd);
            steps.walk_back(simd, &mut slice.ds, &mut slice.partial);
        }
    }
}

impl<A: Sliced> Steps<'_, A> {
    /// Adds the queries of a step's token to dS if the step is the token's last; dw = kᵀdS of the step.
    #[inline(always)]
    fn open<S: Interleaved>(&self, simd: S, ds: &mut [A], at: usize, dw: &mut [A]) {
        let (rows, width) = (self.rows, self.width);
        let Steps { k, q, dy, zeros, .. } = self;
        let (k, none) = (row(k, at, rows), [A::default(); WIDEST]);
        if at % self.n + 1 < self.n {
            return open(simd, ds, [&**zeros, k], &none[..width], dw);
        }
        let first = at / self.n * self.queries;
        for query in first..first + self.queries {
            open(simd, ds, [row(q, query, rows), k], row(dy, query, width), dw);
        }
    }

    #[inline(always)]
    fn walk_back<S: Interleaved>(&self, simd: S, ds: &mut [A], partial: &mut Partial<A>) {
        let mut dw = [A::default(); WIDEST];
        let dw = &mut dw[..self.width];
        self.open(simd, ds, self.count() - 1, dw);
        let mut along = None;
        for at in (0..self.count()).rev() {
            self.step_back(simd, at, ds, dw, partial, &mut along);
        }
    }

    /// Walks back one step. dw is this step's, and then that of the step before. along: ⟨S, dS⟩ after the step and then
    /// before it, for a decay of the whole head; None if it is not known.
    #[inline(always)]
    fn step_back<S: Interleaved>(
        &self,
        simd: S,
        at: usize,
        ds: &mut [A],
        dw: &mut [A],
        partial: &mut Partial<A>,
        along: &mut Option<A>,
    ) {
        let (rows, width, n) = (self.rows, self.width, self.n);
        let Steps { states, k, decay, q, e, dy, ones, zeros, .. } = self;
        let (token, first) = (at / n, at / n * self.queries);
        let (queried, starts, beta) = (at % n + 1 == n, self.starts(at), self.beta(at));
        let e = row(e, at, width);
        let (w, dv, dp) = (scaled(beta, e), scaled(beta, dw), scaled(A::from_f64(-1.0) * beta, dw));
        row_mut(&mut partial.dv, at, width).copy_from_slice(&dv[..width]);
        partial.dbeta[at] = dot(simd, dw, e);

        // The pass adds the query of the step before to dS and computes its dw, unless more is between them.
        let fused = at > 0 && self.queries == 1 && !starts;
        let none = [A::default(); WIDEST];
        let (q_before, dy_before) = match fused && at % n == 0 {
            true => (row(q, first - 1, rows), row(dy, first - 1, width)),
            false => (&**zeros, &none[..width]),
        };
        let of = Back {
            decay: if self.decays(at) { row(decay, token, rows) } else { ones },
            k: row(k, at, rows),
            k_before: if fused { row(k, at - 1, rows) } else { zeros },
            q_before,
        };
        let dy = if queried { row(dy, first, width) } else { &none[..width] };
        let columns = Columns { w: &w[..width], dp: &dp[..width], dy, dy_before };
        let sums = &mut Sums {
            dq: row_mut(&mut partial.dq, first, rows),
            dk: row_mut(&mut partial.dk, at, rows),
            dg: &mut partial.sums,
        };
        let s = row(states, at, rows * width);
        let wanted = if partial.decays > 1 { at % n == 0 } else { along.is_none() };
        let decays = self.of.decays() && wanted;
        match (queried, decays) {
            (true, true) => back::<A, S, true, true>(simd, s, ds, &of, &columns, sums, dw),
            (true, false) => back::<A, S, true, false>(simd, s, ds, &of, &columns, sums, dw),
            (false, true) => back::<A, S, false, true>(simd, s, ds, &of, &columns, sums, dw),
            (false, false) => back::<A, S, false, false>(simd, s, ds, &of, &columns, sums, dw),
        }
        let y_dy =
            if queried { self.queries_back(simd, first, s, &of, &w[..width], partial) } else { A::default() };
        if self.of.decays() {
            self.decay_back(simd, at, starts, y_dy, &dv[..width], partial, along);
        }
        if starts {
            ds.fill(A::default());
        }
        if at > 0 && !fused {
            self.open(simd, ds, at - 1, dw);
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
    /// once it has been computed in a chunk; of each row the pass has computed it.
    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "what the step has computed")]
    fn decay_back<S: Interleaved>(
        &self,
        simd: S,
        at: usize,
        starts: bool,
        y_dy: A,
        dv: &[A],
        partial: &mut Partial<A>,
        along: &mut Option<A>,
    ) {
        let token = at / self.n;
        if partial.decays > 1 {
            if at.is_multiple_of(self.n) {
                let dg = row_mut(&mut partial.dg, token, self.rows);
                dg.copy_from_slice(&partial.sums);
                if starts {
                    dg.fill(A::default());
                }
            }
            return;
        }
        let before = match *along {
            _ if starts => A::default(),
            None => dot(simd, &partial.sums, self.ones),
            Some(after) => after + y_dy - dot(simd, row(self.v, at, self.width), dv),
        };
        *along = Some(before);
        partial.dg[token] = before;
    }
}
