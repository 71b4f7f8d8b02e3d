//! How the kernels of an expansion are cut: features do not meet, so a thread has a packet of them and walks tokens.

use super::{Forced, Limits, Plan, features, plain};
use crate::cuda::specialisation::{Compress, Kernel, Specialisation};

/// Numbers that the backward of an expansion may hold of its kernel.
const MOST_OF_A_KERNEL: usize = 160;
/// Tokens of a chunk of an expansion's backward: keeps its row of sums small beside its tokens.
const EXPAND_CHUNK: usize = 64;
/// Blocks that a grid may have along its second axis.
const MOST_BLOCKS: usize = 65_535;

/// A thread has one packet, as long as it can hold the weights, their sums, and what K tokens leave.
pub fn plan(s: &Specialisation, forced: &Forced) -> Plan {
    let taps = if s.compress == Compress::Token { s.taps } else { 0 };
    let held = |features: usize| 2 * taps * features * (s.m + 1) * s.real().size() / 4;
    let mut features = forced.features.unwrap_or_else(|| features(s));
    let mut shorter = features;
    while held(shorter) > MOST_OF_A_KERNEL && shorter.is_multiple_of(2) && forced.features.is_none() {
        shorter /= 2;
    }
    let hold = taps == 0 || forced.hold.unwrap_or(held(shorter) <= MOST_OF_A_KERNEL);
    if hold {
        features = shorter;
    }
    let threads = (s.d / features).next_multiple_of(32).min(128);
    Plan { features, hold, threads: forced.threads.unwrap_or(threads), ..plain(s) }
}

/// Tokens per chunk of an expansion of sequences of `time` tokens: a few waves of blocks.
pub fn chunk(
    s: &Specialisation,
    plan: &Plan,
    limits: &Limits,
    forced: &Forced,
    sequences: usize,
    time: usize,
) -> usize {
    let [across, wanted] = wave(s, plan, limits);
    let even = (sequences * time).div_ceil(wanted.div_ceil(across));
    let least = match (s.kernel, s.compress) {
        (Kernel::ExpandBackward, Compress::Token) => EXPAND_CHUNK.max(2 * s.taps),
        _ => 2 * s.taps, // as many tokens are read twice as there are taps
    };
    forced.chunk.unwrap_or(even.max(least)).clamp(1, time)
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
