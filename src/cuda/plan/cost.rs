//! The cost of a plan: clocks of a multiprocessor for each token, estimated. On an H200 the plans that it chooses take
//! 3.5 % longer in the mean than the best of those timed (benchmarks/LOG.md, "the first day on a GPU").
//!
//! The model is a closed queue. Each token in flight waits (for memory, for sums), and between its waits the
//! multiprocessor works on it, one token at a time; what moves and what is computed add up. With many tokens in flight
//! the waits are hidden and the work is left. The constants are those of an H100 (132 multiprocessors, 1.755 GHz, 3.35
//! TB/s) from entries of benchmarks/LOG.md, named by their titles; what is only assumed is marked so.

use super::footprint::{moved, registers, shared};
use super::limits::{Limits, MOST_THREADS};
use super::plan::{Plan, Residency};
use crate::cuda::kernel::{Compress, Kernel, RewriteRead};

/// Bytes per clock from device memory, 25 a nanosecond, and from L2, 42 ("a token ahead on the GPU"); from shared memory
/// and the first-level cache, 32 banks of four (CUDA C++ Programming Guide).
const BYTES_PER_CLOCK: [f64; 3] = [14.3, 24.0, 128.0];
/// First-level cache beside the shared memory that the blocks of a multiprocessor can have.
const CACHE_ALONE: usize = 28 << 10;
/// Clocks of a warp for each token, whatever it has of it: 250 instructions ("counted before they are timed"), two of
/// four possible a clock (assumed: the forwards issue in 40 % of their slots, "a token ahead on the GPU").
const WARP: f64 = 125.0;
/// Clocks until device memory answers under load: 0.7 µs ("a token ahead on the GPU").
const DEVICE_WAIT: f64 = 1230.0;
/// Until L2 answers under load (assumed: half of that).
const L2_WAIT: f64 = 600.0;
/// Until a thread has a packet that it loads again, and its parameters (assumed: L2 without load).
const ROW_WAIT: f64 = 300.0;
/// Until a backward has the numbers and the packets of a chain's link, which were prefetched to L2 a token ahead (assumed: L2
/// under load).
const LINK_WAIT: f64 = L2_WAIT;
/// Links of a token in the mean, if one state in four is stored (`spread_anchors` in python/ddl/options.py).
const LINKS: f64 = 1.5;
/// Until a block has a sum, and what each doubling of a cluster adds: 350, and 600 for two ("clusters of blocks").
const SUM_WAIT: [f64; 2] = [350.0, 250.0];
/// Share of the time that each doubling of a cluster loses (assumed): multiprocessors in groups of 16 and 18 have no
/// room for whole clusters, and blocks wait for the slowest of their cluster.
const CLUSTER_LOSS: f64 = 0.08;
/// A kernel that spills is compiled again by another plan (compile/retry.rs), so every plan without a spill is cheaper.
const SPILLED_REGISTER: f64 = 1e7;

/// Clocks of a multiprocessor for each token. Whole ones: the model is no finer.
pub(super) fn clocks(s: &RewriteRead, plan: &Plan, limits: &Limits) -> usize {
    let (slices, blocks) = (plan.slices(s), plan.blocks);
    let [forward, backward] = [Kernel::Forward, Kernel::Backward].map(|kernel| s.kernel == kernel);
    let over_features = forward || backward;
    let doublings = f64::from(plan.cluster.ilog2());
    // Threads beyond the packets do nothing.
    let threads = (slices * plan.threads).min(s.d / plan.features);
    let separate = if plan.sums == Residency::SeparateKernel { s.d / plan.features } else { 0 };
    let cache = (limits.shared_per_multiprocessor + CACHE_ALONE).saturating_sub(blocks * shared(s, plan));
    let bytes = moved(s, plan, cache).into_iter().zip(BYTES_PER_CLOCK);
    let moves: f64 = bytes.map(|(bytes, per_clock)| bytes as f64 / per_clock).sum();
    let instructions = (threads + separate).div_ceil(32) as f64 * WARP;
    let work = (moves + instructions) * (1.0 + CLUSTER_LOSS * doublings);

    let read = s.compress != Compress::None;
    let count = if forward { u8::from(s.rewrite) + u8::from(read) } else { backward.into() };
    let sum = SUM_WAIT[0] + SUM_WAIT[1] * doublings;
    let sums = f64::from(count) * sum;
    let re_reads = over_features && !plan.keep_in_registers;
    let rows = if re_reads { 2.0 * ROW_WAIT * plan.rows(s) as f64 } else { 0.0 };
    let links = if s.chain { LINKS * LINK_WAIT } else { 0.0 };
    // A stage holds one more token of its block, a second one if packets are read from the first again.
    let staged = plan.stages > usize::from(!plan.keep_in_registers);
    let memory = match s.kernel {
        // Asked for as far as L2 a token ahead (PREFETCH in token_stream.cuh).
        _ if re_reads => 0.0,
        Kernel::Backward if !staged && blocks < 3 => L2_WAIT,
        Kernel::Forward if !staged => (DEVICE_WAIT - plan.load_ahead as f64 * sum).max(0.0),
        _ => DEVICE_WAIT,
    };
    // In a block that is alone with its stage, nothing else computes while it waits for a row, a link or its cluster; nor do
    // two blocks with stages overlap the waits of their clusters (timed: 1.05 to 1.2 times as long as without stages).
    let waiting = rows + links + if plan.cluster > 1 { sums } else { 0.0 };
    let idle = if staged && (blocks == 1 || plan.cluster > 1) { waiting } else { 0.0 };
    let (work, wait) = (work + idle * slices as f64, sums + rows + links + memory - idle);

    // Warps that need no sum with others walk by themselves.
    let walkers = if over_features { 1 } else { (threads / slices / 32).max(1) };
    let parts = (slices * walkers) as f64;
    let in_flight = blocks * walkers * (1 + usize::from(staged));
    let time = queue(work / parts, wait, in_flight) * parts;
    let short = registers(s, plan).saturating_sub(limits.most_registers(blocks * plan.threads));
    // Wide blocks that keep their packets were seen to spill ("a token ahead on the GPU").
    let spilled = short + usize::from(plan.keep_in_registers && plan.threads > MOST_THREADS[0]);
    (time + SPILLED_REGISTER * spilled as f64).round() as usize
}

/// Clocks between two tokens if so many are in flight, each of which waits and then has its work done: mean value analysis
/// of a closed queue with one server (Reiser and Lavenberg, 1980).
fn queue(work: f64, wait: f64, in_flight: usize) -> f64 {
    let (mut queued, mut between) = (0.0, 0.0);
    for tokens in 1..=in_flight {
        let stay = work * (1.0 + queued);
        between = (stay + wait) / tokens as f64;
        queued = stay / between;
    }
    between
}
