//! The backward: chunk by chunk from the last, with the slices of a chunk side by side.
//!
//! The parts of a chunk's gradients are kept for as many families at once as keep all threads busy. On that number no
//! result depends. Per step and vector of a slice a walk loads two and stores one, with six multiplications with additions:
//! one more for a decay, and a multiplication if every row has its own. Before, the state was rebuilt: one load, one store,
//! two operations.

use std::sync::Mutex;

use super::chunk::{Chunk, scratch};
use super::division::{Unit, WIDEST, chunk_tokens, chunks, units, useful_threads, width};
use super::partial::Slice;
use super::rows::store;
use super::slice::Sliced;
pub use super::sums::Gradients;
use super::sums::{Add, Family, families, family};
use super::transposed::get;
use super::walk::Walk;
use crate::cpu::buffer::{Buffer, Result};
use crate::cpu::parallel;
use crate::cpu::simd::dispatch::dispatch;
use crate::problem::{DeltaRule, SavedOverTime};
use crate::tensor::Block;

/// States for each thread that are worked on at once, if a family has not more.
const STATES: usize = 4;

pub fn backward<A: Sliced>(
    problem: &DeltaRule,
    saved: &SavedOverTime,
    gradients: &mut Gradients,
    threads: usize,
) -> Result<()> {
    let (sizes, width) = (problem.sizes, width::<A>(problem.sizes));
    let threads = useful_threads(problem, threads);
    let Gradients { q, k, v, beta, g, initial_state } = gradients;
    let mut families = families(problem, [q, k, v, beta], g.as_mut());
    let blocks = initial_state.as_mut().map(|initial| {
        initial.split_blocks([sizes.batch * sizes.states, sizes.key, 1, sizes.value], 1, width)
    });
    let mut initial = blocks.into_iter().flatten();
    let units = units(sizes, width);
    let of_a_family = family(sizes) * sizes.value.div_ceil(width);
    let at_once = (STATES * threads / family(sizes)).max(1);
    let call = Call { problem, saved, threads };
    for (families, units) in families.chunks_mut(at_once).zip(units.chunks(at_once * of_a_family)) {
        let initial = units.iter().map(|_| initial.next()).collect();
        call.waves::<A>(units, families, of_a_family, initial)?;
    }
    Ok(())
}

struct Call<'a> {
    problem: &'a DeltaRule,
    saved: &'a SavedOverTime,
    threads: usize,
}

impl Call<'_> {
    /// Goes through all chunks for some families, and stores the gradients of their initial states.
    fn waves<A: Sliced>(
        &self,
        units: &[Unit],
        families: &mut [Family<'_>],
        of_a_family: usize,
        initial: Vec<Option<Block<'_>>>,
    ) -> Result<()> {
        let Call { problem, saved, threads } = *self;
        let (tokens, chunks) = (chunk_tokens(problem.sizes), chunks(problem.sizes));
        let slices = units.iter().map(|unit| Slice::<A>::new(problem, unit.clone(), saved));
        let mut slices = slices.collect::<Result<Vec<_>>>()?;
        let (free, per_state) =
            (Mutex::new(Vec::new()), problem.sizes.value.div_ceil(width::<A>(problem.sizes)));
        for index in (0..chunks).rev() {
            let first = index * tokens;
            let chunk = Chunk { first, tokens: tokens.min(problem.sizes.time - first), index, chunks };
            // Slices of one state share what is loaded, unless that would leave threads without work.
            let together = if slices.len() / per_state < threads { 1 } else { per_state };
            parallel::for_each(
                slices.chunks_mut(together).collect(),
                threads,
                |slices: &mut [Slice<A>]| {
                    let mut memory = match pop(&free) {
                        Some(memory) => memory,
                        None => scratch::<A>(problem.sizes, tokens)?,
                    };
                    dispatch(Walk { problem, saved, slices, chunk, scratch: &mut memory });
                    push(&free, memory);
                    Ok(())
                },
            )?;
            let tasks = families.iter_mut().zip(slices.chunks(of_a_family));
            let tasks = tasks.map(|(family, slices)| Add { problem, chunk, slices, family });
            parallel::for_each(tasks.collect(), threads, dispatch)?;
        }
        for (slice, block) in slices.iter().zip(initial) {
            let Some(mut block) = block else { continue };
            let mut row = [A::default(); WIDEST];
            for at in 0..problem.sizes.key {
                let row = &mut row[..width::<A>(problem.sizes)];
                get(&slice.ds, row.len(), at, row);
                row.iter_mut().for_each(|number| *number *= slice.lag);
                store(row, &mut block, at, 0);
            }
        }
        Ok(())
    }
}

/// Takes the memory of a walk that has ended, the last one first, so that it is still in the cache.
fn pop<A>(free: &Mutex<Vec<Buffer<A>>>) -> Option<Buffer<A>> {
    free.lock().ok()?.pop()
}

fn push<A>(free: &Mutex<Vec<Buffer<A>>>, memory: Buffer<A>) {
    if let Ok(mut free) = free.lock() {
        free.push(memory);
    }
}
