//! Gradients that slices and states share: every slice leaves its part of a chunk, and one task adds up those of a family,
//! the states that have a head of q, k or v in common. The order is fixed: states ascend, and within one its slices.

use super::chunk::Chunk;
use super::division::{padded, width};
use super::partial::Slice;
use super::rows;
use super::slice::Sliced;
use crate::cpu::buffer::{Buffer, Result};
use crate::cpu::simd::dispatch::WithSimd;
use crate::cpu::simd::interleaved::Interleaved;
use crate::problem::{DeltaRule, OverTime};
use crate::tensor::{Block, Tensor};

/// Returns how many states a family has: the least number that every group of states which share a head divides.
pub fn family(sizes: OverTime) -> usize {
    [sizes.queries, sizes.keys, sizes.values].into_iter().fold(1, |least, heads| {
        let group = (sizes.states / heads).max(1);
        least / common_divisor(least, group) * group
    })
}

fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

/// The gradients of a family.
pub struct Family<'a> {
    pub q: Block<'a>,
    pub k: Block<'a>,
    pub v: Block<'a>,
    pub beta: Block<'a>,
    pub g: Option<Block<'a>>,
}

/// The gradients of a call. g and the initial state have none if they were not given.
pub struct Gradients {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub beta: Tensor,
    pub g: Option<Tensor>,
    pub initial_state: Option<Tensor>,
}

/// Returns the families of a call, in order.
pub fn families<'a>(
    problem: &DeltaRule,
    [q, k, v, beta]: [&'a mut Tensor; 4],
    g: Option<&'a mut Tensor>,
) -> Vec<Family<'a>> {
    let OverTime { batch, time, steps, states, queries, keys, values, key, value } = problem.sizes;
    let of = states / family(problem.sizes); // families of a sequence
    let all = time * steps;
    let mut q = q.split_blocks([batch, time, queries, key], queries / of, key).into_iter();
    let mut k = k.split_blocks([batch, all, keys, key], keys / of, key).into_iter();
    let mut v = v.split_blocks([batch, all, values, value], values / of, value).into_iter();
    let beta = beta.split_blocks([batch, all, states, 1], states / of, 1);
    let decays = problem.decays();
    let mut g = g.map(|g| g.split_blocks([batch, time, states, decays], states / of, decays).into_iter());
    let mut family = |beta| {
        let [q, k, v] = [q.next()?, k.next()?, v.next()?];
        Some(Family { q, k, v, beta, g: g.as_mut().and_then(Iterator::next) })
    };
    beta.into_iter().map_while(&mut family).collect()
}

/// Adds up the parts of a family.
pub struct Add<'a, 'b, A> {
    pub problem: &'a DeltaRule,
    pub chunk: Chunk,
    /// state by state
    pub slices: &'a [Slice<A>],
    pub family: &'a mut Family<'b>,
}

impl<A: Sliced> WithSimd for Add<'_, '_, A> {
    type Output = Result<()>;
    const AVX512: bool = A::AVX512;

    #[inline(always)]
    fn run<S: Interleaved>(self, _: S) -> Result<()> {
        let Add { problem, chunk: Chunk { first, tokens, .. }, slices, family } = self;
        let (OverTime { steps, states, queries, keys, values, key, value, .. }, rows) =
            (problem.sizes, padded(problem.sizes));
        let width = width::<A>(problem.sizes);
        let per_state = value.div_ceil(width);
        let (here, of_a_state) = (slices.len() / per_state, problem.sizes.queries_of_a_state());
        // The parts of the states that share head `head` of a tensor with so many.
        let sharing = |head: usize, heads: usize| {
            let group = states / heads.min(states);
            let first = if heads > states { head / of_a_state } else { head * group };
            &slices[first * per_state..(first + group) * per_state]
        };
        let here_of = |heads: usize| heads * here / states;
        let mut row = Buffer::<A>::zeros(key.max(per_state * width))?;
        for token in 0..tokens {
            for head in 0..here_of(queries) {
                let at = (token * of_a_state + head % of_a_state) * rows;
                add(&mut row[..key], sharing(head, queries).iter().map(|slice| &slice.partial.dq[at..]));
                store(&row, &mut family.q, first + token, head);
            }
            let Some(g) = &mut family.g else { continue };
            for (state, slices) in slices.chunks_exact(per_state).enumerate() {
                let decays = problem.decays();
                let of = |slice: &'_ Slice<A>| token * slice.partial.decays;
                add(&mut row[..decays], slices.iter().map(|slice| &slice.partial.dg[of(slice)..]));
                store(&row, g, first + token, state);
            }
        }
        for step in 0..tokens * steps {
            let to = first * steps + step;
            for head in 0..here_of(keys) {
                let parts = sharing(head, keys).iter();
                add(&mut row[..key], parts.map(|slice| &slice.partial.dk[step * rows..]));
                store(&row, &mut family.k, to, head);
            }
            for head in 0..here_of(values) {
                for (at, row) in row.chunks_exact_mut(width).take(per_state).enumerate() {
                    let parts = sharing(head, values).iter().skip(at).step_by(per_state);
                    add(row, parts.map(|slice| &slice.partial.dv[step * width..]));
                }
                store(&row, &mut family.v, to, head);
            }
            for (state, slices) in slices.chunks_exact(per_state).enumerate() {
                add(&mut row[..1], slices.iter().map(|slice| &slice.partial.dbeta[step..]));
                store(&row, &mut family.beta, to, state);
            }
        }
        Ok(())
    }
}

/// Rounds a row of sums. Apart, because every dtype has its loop.
#[inline(never)]
fn store<A: Sliced>(row: &[A], block: &mut Block<'_>, at: usize, head: usize) {
    rows::store(row, block, at, head)
}

/// to = the sum of the parts, which may be longer
#[inline(always)]
fn add<'a, A: Sliced>(to: &mut [A], mut parts: impl Iterator<Item = &'a [A]>) {
    let Some(first) = parts.next() else { return };
    to.copy_from_slice(&first[..to.len()]);
    for part in parts {
        for (to, from) in to.iter_mut().zip(part) {
            *to += *from;
        }
    }
}
