//! Registers and memory that a plan takes of a device, and whether the device has them.

use super::limits::Limits;
use super::plan::{Plan, Residency};
use crate::cuda::kernel::{Compress, Kernel, RewriteRead};
use crate::problem::stats_before;

/// Every block reserves this much shared memory for itself (from sm_80 on).
pub const RESERVED: usize = 1024;
/// Bytes of static shared memory that the compiler accepts.
pub(super) const MOST_STATIC: usize = 48 << 10;
/// Bytes of the counters for the numbers that blocks of a cluster send each other.
const COUNTS: usize = 16;

/// Registers that a thread needs, at the least: fitted to the fewest with which code for sm_90 does not spill. If it
/// still spills, the next candidate is compiled.
pub(super) fn registers(s: &RewriteRead, plan: &Plan) -> usize {
    let (rows, features, size) = (plan.rows(s), plan.features, s.real().size() / 4);
    let kept_rows = if plan.keep_in_registers { rows } else { 1 };
    let elements = features * s.m;
    let packet = if s.kernel == Kernel::Backward { 4 * elements } else { 3 * elements / 2 };
    let window = if plan.window == Residency::Registers { s.taps - 1 } else { 0 };
    let sums = if plan.sums == Residency::Registers { s.slots() } else { 0 };
    let kept = kept_rows * (packet + s.rewrites * features) + rows * features * (window + sums);
    16 + (2 * s.m * s.rewrites.max(s.next) + kept) * size
}

/// Bytes of its multiprocessor's shared memory that a block takes.
pub(super) fn shared(s: &RewriteRead, plan: &Plan) -> usize {
    plan.shared + plan.tile.max(1) * static_shared(s, plan.cluster * plan.threads) + RESERVED
}

/// Bytes of the two buffers for sums over so many threads.
pub(super) fn static_shared(s: &RewriteRead, threads: usize) -> usize {
    let sums = match s.kernel {
        Kernel::Backward => 1 + 2 * s.rewrites * s.m,
        Kernel::Forward => stats_before(s.rewrites, s.m).max(1 + s.next * (1 + s.m)),
        _ => 0,
    };
    2 * sums * threads.div_ceil(32) * s.real().size() + COUNTS
}

/// The stages (a multiple of 16 bytes for each input of a token), the window, the kept vectors, the sums.
pub(super) fn dynamic_shared(s: &RewriteRead, plan: &Plan) -> usize {
    let width = plan.width(s);
    let stage: usize = token_inputs(s).map(|bytes| (width * bytes).next_multiple_of(16)).iter().sum();
    let window = if plan.window == Residency::Shared { s.taps } else { 0 };
    let sums = if plan.sums == Residency::Shared { s.slots() } else { 0 };
    plan.stages * plan.tile.max(1) * stage + (window + kept_vectors(s, plan) + sums) * width * s.real().size()
}

/// Vectors that wait between the passes over a token if its packets are re-read, one of them for the sums alone.
fn kept_vectors(s: &RewriteRead, plan: &Plan) -> usize {
    match s.kernel {
        _ if plan.keep_in_registers => 0,
        Kernel::Backward => 3 - usize::from(plan.sums == Residency::SeparateKernel),
        _ => 1,
    }
}

/// Whether the kernel can run a plan and the device has room for it. Registers are no limit: a plan that asks for too many
/// spills.
pub(super) fn fits(s: &RewriteRead, plan: &Plan, limits: &Limits) -> bool {
    // Copies ahead take four bytes at least, from addresses that are multiples of their size.
    let one_direction = usize::from(s.rewrite) * s.types.direction.size();
    let inputs = token_inputs(s).into_iter().chain([one_direction]);
    let can_stage = s.aligned && inputs.map(|size| plan.features * size).all(|bytes| bytes.is_multiple_of(4));
    let shared = shared(s, plan);
    s.d.is_multiple_of(plan.cluster * plan.features)
        && plan.threads.is_multiple_of(32)
        && (plan.stages == 0 || can_stage)
        && (plan.load_ahead == 0 || plan.keep_in_registers && plan.stages == 0)
        && plan.cluster <= limits.cluster
        && plan.threads <= most_threads(s, plan.cluster)
        && shared <= limits.shared_per_block
        && plan.blocks * shared <= limits.shared_per_multiprocessor
        && plan.blocks * plan.threads <= limits.threads_per_multiprocessor
        && plan.blocks <= limits.blocks_per_multiprocessor
}

/// Threads of a block, so that the kernels can add up their sums (sum_partials in block_sum.cuh).
pub(super) fn most_threads(s: &RewriteRead, cluster: usize) -> usize {
    let of_a_sum = if cluster.is_power_of_two() { 4096 } else { 1024 };
    (of_a_sum / cluster / 32).min(MOST_STATIC / static_shared(s, 32 * cluster)) * 32
}

/// Bytes per feature of each of a token's inputs: X, k, G, dh, x. The second pass needs the first three.
pub(super) fn token_inputs(s: &RewriteRead) -> [usize; 5] {
    let (types, state, backward) = (&s.types, s.types.state.size(), s.kernel == Kernel::Backward);
    let read = backward && s.compress != Compress::None;
    let token = backward && s.compress == Compress::Token;
    let there = [true, s.rewrite, backward, read, token].map(usize::from);
    let bytes = [s.m * state, s.rewrites * types.direction.size(), s.m * state, types.context.size(), state];
    std::array::from_fn(|input| there[input] * bytes[input])
}
