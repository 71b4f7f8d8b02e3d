//! How many tokens a block walks: a chunk, for the blocks that run at once.

use super::limits::Limits;
use super::overrides::{Choice, Overrides};
use super::plan::Plan;
use crate::cuda::kernel::{Compress, Kernel, Specialisation};

/// Tokens of a chunk of an expansion's backward: keeps its row of sums small beside its tokens.
const EXPAND_CHUNK: usize = 64;
/// Blocks that a grid may have along its second axis.
const MOST_GRID_BLOCKS: usize = 65_535;

/// Tokens of a chunk, so that each of the `wave` blocks that run at once has one chunk.
pub fn chunk(
    s: &Specialisation,
    plan: &Plan,
    wave: usize,
    limits: &Limits,
    overrides: &Overrides,
    tokens: usize,
) -> usize {
    let slices = plan.slices(s);
    let chunks = |blocks: usize| tokens.div_ceil((blocks / slices).max(1));
    // A chunk repeats the K − 1 tokens before it: keep that to a tenth while every multiprocessor has work.
    let long = (10 * (s.taps - 1)).min(chunks(limits.multiprocessors));
    overrides.get(Choice::Chunk).unwrap_or(chunks(wave).max(long)).max(1)
}

/// Tokens per chunk of an expansion of sequences of `time` tokens: a few waves of blocks.
pub fn expand_chunk(
    s: &Specialisation,
    plan: &Plan,
    limits: &Limits,
    overrides: &Overrides,
    sequences: usize,
    time: usize,
) -> usize {
    let [across, wanted] = expand_wave(s, plan, limits);
    let even = (sequences * time).div_ceil(wanted.div_ceil(across));
    let least = match (s.kernel, s.compress) {
        (Kernel::ExpandBackward, Compress::Token) => EXPAND_CHUNK.max(2 * s.taps),
        _ => 2 * s.taps, // as many tokens are read twice as there are taps
    };
    overrides.get(Choice::Chunk).unwrap_or(even.max(least)).clamp(1, time)
}

/// Blocks of an expansion's grid: across the features, and at most a few waves of them down the chunks, so
/// that rows of sums stay few however many sequences there are.
pub fn expand_blocks(s: &Specialisation, plan: &Plan, limits: &Limits, chunks: usize) -> [usize; 2] {
    let [across, wanted] = expand_wave(s, plan, limits);
    [across, chunks.min(wanted.div_ceil(across)).min(MOST_GRID_BLOCKS)]
}

/// Blocks across the features, and blocks in all that fill the device.
fn expand_wave(s: &Specialisation, plan: &Plan, limits: &Limits) -> [usize; 2] {
    let across = (s.d / plan.features).div_ceil(plan.threads);
    [across, limits.multiprocessors * (limits.threads_per_multiprocessor / plan.threads).max(1)]
}
