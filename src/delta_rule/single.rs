//! The forward of a single step, as generation takes it: two passes over the rows of a state as they are stored. To pack
//! slices of it would cost more than the step.

use fearless_simd::prelude::*;

use super::division::{Unit, units, useful_threads};
use super::rows::{Rows, store, take};
use super::slice::Sliced;
use crate::cpu::buffer::{Buffer, Result};
use crate::cpu::parallel;
use crate::cpu::simd::dispatch::{WithSimd, dispatch};
use crate::cpu::simd::interleaved::Interleaved;
use crate::problem::{DeltaRule, OverTime};
use crate::tensor::{Block, Tensor};

/// Returns true if a problem is a single step, and its rows are whole vectors.
pub fn fits<A: Sliced>(problem: &DeltaRule) -> bool {
    let OverTime { time, steps, value, .. } = problem.sizes;
    time * steps == 1 && value.is_multiple_of(A::LANES)
}

/// Does the only step of every state. Nothing is saved for a backward.
pub fn forward<A: Sliced>(
    problem: &DeltaRule,
    y: &mut Tensor,
    final_state: &mut Tensor,
    threads: usize,
) -> Result<()> {
    let sizes = problem.sizes;
    let OverTime { batch, states, key, value, .. } = sizes;
    let y = y.split_blocks([batch, 1, sizes.outputs(), value], sizes.queries_of_a_state(), value);
    let new = final_state.split_blocks([batch * states, 1, 1, key * value], 1, key * value);
    let tasks = units(sizes, value).into_iter().zip(y.into_iter().zip(new));
    let tasks =
        tasks.map(|(unit, (y, new))| Step::<A> { problem, unit, y, new, of: std::marker::PhantomData });
    parallel::for_each(tasks.collect(), useful_threads(problem, threads), dispatch)
}

struct Step<'a, A> {
    problem: &'a DeltaRule,
    unit: Unit,
    y: Block<'a>,
    new: Block<'a>,
    of: std::marker::PhantomData<A>,
}

impl<A: Sliced> WithSimd for Step<'_, A> {
    type Output = Result<()>;
    const AVX512: bool = A::AVX512;

    #[inline(always)]
    fn run<S: Interleaved>(mut self, simd: S) -> Result<()> {
        let OverTime { key, value, .. } = self.problem.sizes;
        let unit = self.unit.clone();
        let rows = Rows::new(self.problem, &unit);
        let old = self.problem.initial_state.as_ref().filter(|_| !rows.starts(0));
        let blank = if old.is_none() { key * value } else { 0 };
        let mut memory = Buffer::<A>::zeros(4 * key + 2 * value + blank)?;
        let mut rest = &mut *memory;
        let [k, q, decay, decayed_k] = [(); 4].map(|()| take(&mut rest, key));
        let [v, y] = [(); 2].map(|()| take(&mut rest, value));
        load_all(&rows, k, q, v, decay);
        for (product, (k, decay)) in decayed_k.iter_mut().zip(k.iter().zip(&*decay)) {
            *product = *k * *decay;
        }
        let old = old.map_or(&*rest, |states| rows.whole_state(states));
        let new = self.new.row::<A>(0, 0);
        let of = Factors { k, q, decay, decayed_k, beta: rows.beta(0), v };
        let mut first = 0;
        while first < value / A::LANES {
            let vectors = if first + 4 <= value / A::LANES { 4 } else { 1 };
            match vectors {
                4 => rewrite::<A, S, 4>(simd, &of, first, old, new, y),
                _ => rewrite::<A, S, 1>(simd, &of, first, old, new, y),
            }
            first += vectors;
        }
        self.output(y, 0);
        for query in 1..self.problem.sizes.queries_of_a_state() {
            load_query(&rows, query, q);
            y.fill(A::default());
            for (q, new) in q.iter().zip(self.new.row::<A>(0, 0).chunks_exact(value)) {
                y.iter_mut().zip(new).for_each(|(y, new)| *y += *q * *new);
            }
            self.output(y, query);
        }
        Ok(())
    }
}

impl<A: Sliced> Step<'_, A> {
    #[inline(never)]
    fn output(&mut self, y: &mut [A], query: usize) {
        let scale = A::from_f64(self.problem.scale);
        y.iter_mut().for_each(|y| *y *= scale);
        store(y, &mut self.y, 0, query);
    }
}

/// Loads what the step takes. Apart, because every loop over rows is there once for each dtype, and in
/// [`Step::run`] once more for each kind of vectors; a step as a whole takes far longer than these.
#[inline(never)]
fn load_all<A: Sliced>(rows: &Rows<'_>, k: &mut [A], q: &mut [A], v: &mut [A], decay: &mut [A]) {
    rows.k(0, k);
    load_query(rows, 0, q);
    rows.v(0, v);
    match rows.decays_by_row() {
        true => rows.decay(0, decay),
        false => decay.fill(rows.head_decay(0)),
    }
}

#[inline(never)]
fn load_query<A: Sliced>(rows: &Rows<'_>, query: usize, q: &mut [A]) {
    rows.q(0, query, q);
}

/// Numbers of the rows, β, and numbers of the columns.
struct Factors<'a, A> {
    k: &'a [A],
    q: &'a [A],
    decay: &'a [A],
    decayed_k: &'a [A],
    beta: A,
    v: &'a [A],
}

/// Rewrites N vectors of every row, from the `first` on; y is the new state's product with q.
#[inline(always)]
fn rewrite<A: Sliced, S: Simd, const N: usize>(
    simd: S,
    of: &Factors<'_, A>,
    first: usize,
    old: &[A],
    new: &mut [A],
    y: &mut [A],
) {
    let width = of.v.len();
    let splat = |number| A::Vector::<S>::splat(simd, number);
    let [mut p, mut sum] = [[splat(A::default()); N]; 2];
    for (k, old) in of.decayed_k.iter().zip(old.chunks_exact(width)) {
        let (k, old) = (splat(*k), load::<A, S, N>(simd, old, first));
        for c in 0..N {
            p[c] = k.mul_add(old[c], p[c]);
        }
    }
    let mut w = load::<A, S, N>(simd, of.v, first);
    for c in 0..N {
        w[c] = splat(of.beta) * (w[c] - p[c]);
    }
    let rows = old.chunks_exact(width).zip(new.chunks_exact_mut(width));
    for (((k, q), decay), (old, new)) in of.k.iter().zip(of.q).zip(of.decay).zip(rows) {
        let [k, q, decay] = [*k, *q, *decay].map(splat);
        let old = load::<A, S, N>(simd, old, first);
        let new = &mut A::chunks_mut(new).0[first..first + N];
        for c in 0..N {
            let rewritten = k.mul_add(w[c], decay * old[c]);
            rewritten.store_array(&mut new[c]);
            sum[c] = q.mul_add(rewritten, sum[c]);
        }
    }
    let y = &mut A::chunks_mut(y).0[first..first + N];
    for c in 0..N {
        sum[c].store_array(&mut y[c]);
    }
}

/// Loads N vectors of a row.
#[inline(always)]
fn load<A: Sliced, S: Simd, const N: usize>(simd: S, row: &[A], first: usize) -> [A::Vector<S>; N] {
    let row = &A::chunks(row).0[first..first + N];
    let mut vectors = [A::Vector::<S>::splat(simd, A::default()); N];
    for c in 0..N {
        vectors[c] = A::Vector::load_array_ref(simd, &row[c]);
    }
    vectors
}
