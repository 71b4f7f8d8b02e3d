//! What a plan takes of a device, why that may be too much, and the bytes that move for every token.

use super::limits::Limits;
use super::plan::{Plan, Residency};
use crate::cuda::kernel::{Compress, Kernel, ParameterSums, Parts, RewriteRead};
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

/// Vectors that wait between the passes over a token, if its packets are re-read.
fn kept_vectors(s: &RewriteRead, plan: &Plan) -> usize {
    match s.kernel {
        _ if plan.keep_in_registers => 0,
        Kernel::Backward if plan.sums == Residency::SeparateKernel => 2, // dh' waits for the sums alone
        Kernel::Backward => 3,
        _ => 1,
    }
}

/// The first limit that a plan does not keep. Registers are none: a plan that asks for too many spills.
pub(super) fn exceeds(s: &RewriteRead, plan: &Plan, limits: &Limits) -> Option<String> {
    let Plan { cluster, threads, blocks, .. } = *plan;
    let (sum, total, one) = (cluster * threads, blocks * threads, shared(s, plan));
    let [fixed, all] = [static_shared(s, sum), blocks * one].map(|bytes| bytes.div_ceil(1024));
    let most = limits.shared_per_multiprocessor / 1024;
    let needs_and_has = [
        (cluster, limits.cluster, "clusters of # blocks, this GPU has clusters of % at most"),
        (sum, threads_of_a_sum(cluster), "sums over # threads, the kernels add up % at most"),
        (fixed, MOST_STATIC / 1024, "# KiB of static shared memory, the compiler accepts %"),
        (one.div_ceil(1024), limits.shared_per_block / 1024, "# KiB of shared memory, a block has %"),
        (all, most, "# KiB of shared memory for @ blocks, a multiprocessor has %"),
        (total, limits.threads_per_multiprocessor, "# threads for @ blocks, a multiprocessor has %"),
        (blocks, limits.blocks_per_multiprocessor, "# blocks per multiprocessor, which runs % at most"),
    ];
    let (needs, has, text) = needs_and_has.into_iter().find(|(needs, has, _)| needs > has)?;
    let text = text.replace('#', &needs.to_string()).replace('%', &has.to_string());
    Some(format!("needs {}", text.replace('@', &blocks.to_string())))
}

/// Threads that may add up their sums (sum_partials in block_sum.cuh): of a power of two of blocks, and of others.
fn threads_of_a_sum(cluster: usize) -> usize {
    if cluster.is_power_of_two() { 4096 } else { 1024 }
}

/// Threads of a block, so that the kernels can add up their sums.
pub(super) fn most_threads(s: &RewriteRead, cluster: usize) -> usize {
    let of_a_sum = threads_of_a_sum(cluster) / cluster / 32 * 32;
    of_a_sum.min(MOST_STATIC / static_shared(s, 32 * cluster) * 32)
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

/// Bytes that move for every token: of device memory, of L2, and of shared memory or the first-level cache, of which the
/// blocks of a multiprocessor have `cache` bytes.
pub(super) fn moved(s: &RewriteRead, plan: &Plan, cache: usize) -> [usize; 3] {
    let (slices, vector) = (plan.slices(s), s.d * s.real().size());
    let inputs = token_inputs(s).map(|bytes| s.d * bytes);
    let (all, state) = (inputs.iter().sum::<usize>(), inputs[0]);
    let outputs = if s.kernel == Kernel::Parameters { 0 } else { state + s.d * s.types.direction.size() };
    // The second kernel reads all of a token but G.
    let separate = if plan.sums == Residency::SeparateKernel { all - state } else { 0 };
    // From a stage, else from memory (L2 may have lost them).
    let second = if plan.keep_in_registers { 0 } else { inputs[..3].iter().sum() };
    // A stage is written and read, and read again.
    let (again, staged) = if plan.stages == 0 { (second, 0) } else { (0, all + second) };
    // Every vector of the window and of the sums is read and written.
    let vectors = |place| {
        let window = if s.compress == Compress::Token && plan.window == place { s.taps } else { 0 };
        2 * (window + if plan.sums == place { s.slots() } else { 0 }) * vector
    };
    let parameters = parameter_bytes(s);
    // The blocks may all have different slices; packets that are read again pass through the cache beside them.
    let cached = parameters / slices * plan.blocks.min(slices) + again / slices * plan.blocks;
    let uncached = if cached <= cache { 0 } else { parameters };
    [
        all + outputs + separate + again,
        vectors(Residency::Global) + uncached,
        vectors(Residency::Shared) + staged + 2 * kept_vectors(s, plan) * vector,
    ]
}

/// Bytes of the parameters that every token needs: as many vectors as their sums, in the type of one. Other kernels' blocks
/// have few of them each.
fn parameter_bytes(s: &RewriteRead) -> usize {
    let (Parts { norm_weight: norm, gate, value, .. }, types) = (s.parts, &s.types);
    let compress = matches!(s.compress, Compress::Channel | Compress::Token);
    let all = RewriteRead { sums: ParameterSums { compress, norm, gate, value }, ..*s };
    let vectors = if matches!(s.kernel, Kernel::Forward | Kernel::Backward) { all.slots() } else { 0 };
    vectors * s.d * if compress { types.compress } else { types.gate }.size()
}
