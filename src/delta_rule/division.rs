//! How a problem is divided: tokens into chunks, states into slices, and slices among threads.

use std::ops::Range;

use super::slice::{BLOCK, Sliced};
use crate::problem::{DeltaRule, OverTime};

/// Steps of a chunk. Their states, rebuilt for one slice, have to stay in the second-level cache.
pub const CHUNK_STEPS: usize = 64;

/// Returns the tokens of a chunk, of which the first one's state is saved.
pub fn chunk_tokens(sizes: OverTime) -> usize {
    (CHUNK_STEPS / sizes.steps).max(1)
}

pub fn chunks(sizes: OverTime) -> usize {
    sizes.time.div_ceil(chunk_tokens(sizes))
}

/// A slice of a state: some of its columns.
#[derive(Clone)]
pub struct Unit {
    pub batch: usize,
    /// the state's head
    pub state: usize,
    pub columns: Range<usize>,
}

/// Returns all slices of so many columns, in the order of [`crate::tensor::Tensor::split_blocks`].
pub fn units(sizes: OverTime, width: usize) -> Vec<Unit> {
    let slices = sizes.value.div_ceil(width);
    let unit = |index: usize| {
        let (head, first) = (index / slices, index % slices * width);
        let columns = first..sizes.value.min(first + width);
        Unit { batch: head / sizes.states, state: head % sizes.states, columns }
    };
    (0..sizes.batch * sizes.states * slices).map(unit).collect()
}

/// Returns how many threads are worth using: one, if a second costs more than it saves.
pub fn useful_threads(problem: &DeltaRule, threads: usize) -> usize {
    let OverTime { batch, time, steps, states, key, value, .. } = problem.sizes;
    let elements = [time, steps, states, key, value].into_iter().fold(batch, usize::saturating_mul);
    crate::cpu::partition::useful_threads(elements, threads)
}

/// Returns the rows of a packed slice.
pub fn padded(sizes: OverTime) -> usize {
    sizes.key.next_multiple_of(BLOCK)
}

/// Returns the columns of a slice: as many as leave room for S in half of the first-level cache, and for those of a
/// chunk in the second-level one. What is loaded for every slice of a state is the less, the wider they are.
pub fn width<A: Sliced>(sizes: OverTime) -> usize {
    let fits = CACHED / size_of::<A>() / padded(sizes) / BLOCK * BLOCK;
    fits.clamp(BLOCK, WIDEST).min(sizes.value.next_multiple_of(BLOCK))
}

/// Bytes of a slice.
const CACHED: usize = 16_384;

/// Columns of a slice, at most.
pub const WIDEST: usize = 64;

/// Returns true if a state may wait to be multiplied by this factor. A decay of the whole head is kept apart from the state,
/// for it would cost a multiplication of every vector, as long as no number comes near the bounds of its type.
pub fn may_lag<A: Sliced>(factor: A) -> bool {
    (A::from_f64(1e-9)..=A::from_f64(1e9)).contains(&factor)
}
