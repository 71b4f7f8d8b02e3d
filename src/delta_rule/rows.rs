//! The rows that a slice takes, in the type of its arithmetic.

use std::ops::Range;

use half::{bf16, f16};

use super::division::Unit;
use super::slice::Sliced;
use crate::cpu::simd::convert::{Accum, Convert};
use crate::problem::{DeltaRule, OverTime};
use crate::tensor::{Block, Dtype, Tensor};

/// The rows of one slice's state among those of its problem.
pub struct Rows<'a> {
    problem: &'a DeltaRule,
    unit: &'a Unit,
    /// the heads of q, k and v that serve this state, the first of q's
    query: usize,
    key: usize,
    value: usize,
}

impl<'a> Rows<'a> {
    pub fn new(problem: &'a DeltaRule, unit: &'a Unit) -> Rows<'a> {
        let OverTime { queries, keys, values, .. } = problem.sizes;
        let [query, key, value] = [queries, keys, values].map(|heads| serving(problem, unit, heads));
        Rows { problem, unit, query, key, value }
    }

    fn sizes(&self) -> OverTime {
        self.problem.sizes
    }

    /// Returns the row of a token (or of a step, if there are so many) and of a head in a tensor of that many heads.
    #[inline(always)]
    fn row(&self, at: usize, count: usize, heads: usize, head: usize) -> usize {
        (self.unit.batch * count + at) * heads + head
    }

    fn steps(&self) -> usize {
        self.sizes().time * self.sizes().steps
    }

    #[inline(always)]
    pub fn k<A: Accum>(&self, step: usize, to: &mut [A]) {
        let OverTime { keys, key, .. } = self.sizes();
        let row = self.row(step, self.steps(), keys, self.key);
        load(&self.problem.k, key, row, 0..key, to);
    }

    #[inline(always)]
    pub fn v<A: Accum>(&self, step: usize, to: &mut [A]) {
        let OverTime { values, value, .. } = self.sizes();
        let row = self.row(step, self.steps(), values, self.value);
        load(&self.problem.v, value, row, self.unit.columns.clone(), to);
    }

    /// Loads one of the queries to this state.
    #[inline(always)]
    pub fn q<A: Accum>(&self, token: usize, query: usize, to: &mut [A]) {
        let OverTime { time, queries, key, .. } = self.sizes();
        let row = self.row(token, time, queries, self.query + query);
        load(&self.problem.q, key, row, 0..key, to);
    }

    /// Loads a row of a tensor like y.
    #[inline(always)]
    pub fn output<A: Accum>(&self, of: &Tensor, token: usize, query: usize, to: &mut [A]) {
        let OverTime { time, value, .. } = self.sizes();
        let heads = self.sizes().outputs();
        let row = self.row(token, time, heads, serving(self.problem, self.unit, heads) + query);
        load(of, value, row, self.unit.columns.clone(), to);
    }

    /// Loads a row of the errors that the forward saved.
    #[inline(always)]
    pub fn error<A: Accum>(&self, errors: &Tensor, step: usize, to: &mut [A]) {
        let OverTime { states, value, .. } = self.sizes();
        let row = self.row(step, self.steps(), states, self.unit.state);
        load(errors, value, row, self.unit.columns.clone(), to);
    }

    #[inline(always)]
    pub fn beta<A: Accum>(&self, step: usize) -> A {
        let states = self.sizes().states;
        self.problem.beta.rows(1).row::<A>(self.row(step, self.steps(), states, self.unit.state))[0]
    }

    /// Loads a = exp g of every key feature, if each has its own.
    #[inline(always)]
    pub fn decay<A: Sliced>(&self, token: usize, to: &mut [A]) {
        let OverTime { time, states, key, .. } = self.sizes();
        let Some(g) = &self.problem.g else { return };
        load(g, key, self.row(token, time, states, self.unit.state), 0..key, to);
        A::exp(&mut to[..key]);
    }

    /// Returns a = exp g of a token, if the whole head has one.
    #[inline(always)]
    pub fn head_decay<A: Sliced>(&self, token: usize) -> A {
        let OverTime { time, states, .. } = self.sizes();
        let Some(g) = &self.problem.g else { return A::from_f64(1.0) };
        let mut decay = g.rows(1).row::<A>(self.row(token, time, states, self.unit.state))[0];
        A::exp(std::slice::from_mut(&mut decay));
        decay
    }

    /// Returns true if every key feature has a decay of its own.
    pub fn decays_by_row(&self) -> bool {
        self.problem.g.as_ref().is_some_and(|g| g.shape.len() == 4)
    }

    pub fn decays(&self) -> bool {
        self.problem.g.is_some()
    }

    /// Returns true if the state begins again at this token.
    #[inline(always)]
    pub fn starts(&self, token: usize) -> bool {
        let Some(starts) = &self.problem.document_starts else { return false };
        starts.rows(1).row::<u8>(self.unit.batch * self.sizes().time + token)[0] != 0
    }

    /// Loads a row of a state of a tensor (B, H, count, K, V).
    #[inline(always)]
    pub fn state<A: Accum>(&self, states: &Tensor, [at, count]: [usize; 2], row: usize, to: &mut [A]) {
        let OverTime { states: heads, key, value, .. } = self.sizes();
        let first = ((self.unit.batch * heads + self.unit.state) * count + at) * key;
        load(states, value, first + row, self.unit.columns.clone(), to);
    }

    /// Returns a state of a tensor (B, H, K, V), as it is stored.
    #[inline(always)]
    pub fn whole_state<'s, A: Accum>(&self, states: &'s Tensor) -> &'s [A] {
        let OverTime { states: heads, key, value, .. } = self.sizes();
        states.rows(key * value).row(self.unit.batch * heads + self.unit.state)
    }

    /// Fetches the rows of a step that comes later: they are in a page each, and nothing else would.
    #[inline(always)]
    pub fn fetch(&self, step: usize) {
        let OverTime { time, steps, queries, keys, values, key, value, .. } = self.sizes();
        if step >= self.steps() {
            return;
        }
        let token = step / steps;
        self.problem.k.rows(key).fetch(self.row(step, self.steps(), keys, self.key));
        self.problem.v.rows(value).fetch(self.row(step, self.steps(), values, self.value));
        self.problem.q.rows(key).fetch(self.row(token, time, queries, self.query));
    }
}

/// Returns the head that serves a unit's state, of a tensor with so many.
#[inline(always)]
fn serving(problem: &DeltaRule, unit: &Unit, heads: usize) -> usize {
    unit.state * heads / problem.sizes.states
}

/// Widens some columns of a row into the first numbers of `to`; zeros follow.
#[inline(always)]
fn load<A: Accum>(tensor: &Tensor, width: usize, row: usize, columns: Range<usize>, to: &mut [A]) {
    let rows = tensor.rows(width);
    match rows.dtype() {
        Dtype::F32 => widen(&rows.row::<f32>(row)[columns], to),
        Dtype::F64 => widen(&rows.row::<f64>(row)[columns], to),
        Dtype::Bf16 => widen(&rows.row::<bf16>(row)[columns], to),
        Dtype::F16 => widen(&rows.row::<f16>(row)[columns], to),
        Dtype::Bool => unreachable!("a mask is refused where numbers are expected"),
    }
}

#[inline(always)]
fn widen<T: Convert, A: Accum>(from: &[T], to: &mut [A]) {
    let (to, rest) = to.split_at_mut(from.len());
    for (to, from) in to.iter_mut().zip(from) {
        *to = from.widen();
    }
    rest.fill(A::default());
}

/// Rounds the first numbers of `from` to a block's row.
#[inline(always)]
pub fn store<A: Accum>(from: &[A], block: &mut Block<'_>, row: usize, head: usize) {
    match block.dtype() {
        Dtype::F32 => narrow(from, block.row::<f32>(row, head)),
        Dtype::F64 => narrow(from, block.row::<f64>(row, head)),
        Dtype::Bf16 => narrow(from, block.row::<bf16>(row, head)),
        Dtype::F16 => narrow(from, block.row::<f16>(row, head)),
        Dtype::Bool => unreachable!("no output is a mask"),
    }
}

#[inline(always)]
fn narrow<T: Convert, A: Accum>(from: &[A], to: &mut [T]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = T::narrow(*from);
    }
}

/// Takes the next numbers of a buffer that several parts share.
pub fn take<'a, A>(rest: &mut &'a mut [A], count: usize) -> &'a mut [A] {
    let (part, after) = std::mem::take(rest).split_at_mut(count);
    *rest = after;
    part
}
