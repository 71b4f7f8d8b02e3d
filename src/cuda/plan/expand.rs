//! How the kernels of an expansion are planned: features do not meet, so a thread has a packet of them and walks tokens.

use super::footprint::{Plan, features, plain};
use super::limits::Limits;
use super::overrides::Overrides;
use crate::cuda::kernel::{Compress, Kernel, Specialisation};

/// Numbers of its weight that a thread of an expansion's backward may hold.
const MOST_OF_A_WEIGHT: usize = 160;
/// Tokens of a chunk of an expansion's backward: keeps its row of sums small beside its tokens.
const EXPAND_CHUNK: usize = 64;
/// Blocks that a grid may have along its second axis.
const MOST_BLOCKS: usize = 65_535;

/// A thread has one packet, as long as it can hold the weights, their sums, and the numbers of K tokens.
pub fn plan(s: &Specialisation, overrides: &Overrides) -> Plan {
    let taps = if s.compress == Compress::Token { s.taps } else { 0 };
    let held = |features: usize| 2 * taps * features * (s.m + 1) * s.real().size() / 4;
    let mut features = overrides.features.unwrap_or_else(|| features(s));
    let mut shorter = features;
    while held(shorter) > MOST_OF_A_WEIGHT && shorter.is_multiple_of(2) && overrides.features.is_none() {
        shorter /= 2;
    }
    let hold = taps == 0 || overrides.hold.unwrap_or(held(shorter) <= MOST_OF_A_WEIGHT);
    if hold {
        features = shorter;
    }
    let threads = (s.d / features).next_multiple_of(32).min(128);
    Plan { features, hold, threads: overrides.threads.unwrap_or(threads), ..plain(s) }
}

/// Tokens per chunk of an expansion of sequences of `time` tokens: a few waves of blocks.
pub fn chunk(
    s: &Specialisation,
    plan: &Plan,
    limits: &Limits,
    overrides: &Overrides,
    sequences: usize,
    time: usize,
) -> usize {
    let [across, wanted] = wave(s, plan, limits);
    let even = (sequences * time).div_ceil(wanted.div_ceil(across));
    let least = match (s.kernel, s.compress) {
        (Kernel::ExpandBackward, Compress::Token) => EXPAND_CHUNK.max(2 * s.taps),
        _ => 2 * s.taps, // as many tokens are read twice as there are taps
    };
    overrides.chunk.unwrap_or(even.max(least)).clamp(1, time)
}

/// Blocks of an expansion's grid: across the features, and at most a few waves of them down the chunks, so
/// that rows of sums stay few however many sequences there are.
pub fn blocks(s: &Specialisation, plan: &Plan, limits: &Limits, chunks: usize) -> [usize; 2] {
    let [across, wanted] = wave(s, plan, limits);
    [across, chunks.min(wanted.div_ceil(across)).min(MOST_BLOCKS)]
}

/// Blocks across the features, and blocks in all that fill the device.
fn wave(s: &Specialisation, plan: &Plan, limits: &Limits) -> [usize; 2] {
    let across = (s.d / plan.features).div_ceil(plan.threads);
    [across, limits.multiprocessors * (limits.threads_per_multiprocessor / plan.threads).max(1)]
}
