//! The candidates for a plan: every way to divide a kernel's work that is worth comparing, as a product of the choices
//! that the kernel leaves open. Those of an expansion are in expand.rs.
//!
//! An override keeps those candidates that have its value. Among what a kernel can run, values that nobody would time
//! are left out (idle warps, packets of odd lengths) unless an override names them.

use std::collections::BTreeSet;

use super::cost::clocks;
use super::footprint::{dynamic_shared, most_threads, token_inputs};
use super::limits::{Limits, MOST_THREADS};
use super::overrides::Overrides;
use super::plan::{Plan, Residency};
use crate::cuda::kernel::{Compress, Kernel, RewriteRead};

/// Most registers of a thread for a window or for sums, and for both of a token read's backward. The second limit is higher,
/// because in shared memory these would move five times the bytes of a token.
const FEW: [usize; 2] = [24, 104];
/// Threads of a block whose threads need no sum with others.
pub(super) const THREADS_APART: usize = 128;
/// Threads of a multiprocessor that are planned for: beyond that registers are worth more.
const PLANNED_THREADS: usize = 1024;

/// The values of a choice to compare after the choices before it, if the kernel has it.
type Values<'a> = &'a dyn Fn(&Plan) -> Vec<usize>;

/// The candidates, the cheapest first.
pub(super) fn candidates(s: &RewriteRead, limits: &Limits, overrides: &Overrides) -> Vec<Plan> {
    let [forward, backward, parameters] =
        [Kernel::Forward, Kernel::Backward, Kernel::Parameters].map(|kernel| s.kernel == kernel);
    let token = s.compress == Compress::Token;
    let over_features = forward || backward;
    let slices = |n: &usize| *n <= limits.cluster && s.d.is_multiple_of(n * packet(s, s.d, false));
    // A read has a second sum to load within, a rewrite has β and v.
    let worth = [true, s.compress != Compress::None, s.rewrite];
    let choices: [(bool, &str, Values); 12] = [
        (over_features, "CLUSTER", &|_| [1, 2, 4, 8].into_iter().filter(slices).collect()),
        (over_features, "KEEP_IN_REGISTERS", &|_| vec![1, 0]),
        (over_features, "FEATURES", &|plan| vec![packet(s, plan.width(s), !plan.keep_in_registers)]),
        (over_features, "THREADS", &|plan| threads(s, plan)),
        // Where features do not meet, a thread has one packet of them and walks tokens; short ones leave registers for sums.
        (parameters, "FEATURES", &|_| packets(packet(s, s.d, false))),
        (parameters, "THREADS", &|_| vec![THREADS_APART, 64, 32]),
        (token, "WINDOW", &|plan| places(s, plan, s.taps, [1, 2])),
        (backward, "SUMS", &|plan| places(s, plan, s.slots(), [1, 3])),
        (parameters, "SEPARATE_SUMS", &|_| vec![0, 1, 2]),
        // Packets that are kept free their stage at once: a second stage is of no use to them.
        (over_features, "STAGES", &|plan| (0..=2 - usize::from(plan.keep_in_registers)).collect()),
        (forward, "LOAD_AHEAD", &|_| (0..=2).rev().filter(|ahead| worth[*ahead]).collect()),
        (true, "BLOCKS", &|plan| (1..=(PLANNED_THREADS / plan.threads).max(1)).rev().collect()),
    ];
    let align = if s.aligned { 16 } else { 2 };
    let one = Plan { cluster: 1, threads: 256, features: 1, align, blocks: 1, ..Plan::default() };
    let mut plans = vec![Plan { keep_in_registers: true, ..one }];
    for (_, choice, usual) in choices.iter().filter(|(has, ..)| *has && s.kernel != Kernel::Reduce) {
        let varied = plans.iter().flat_map(|plan| overrides.vary(plan, choice, usual(plan)));
        plans = varied.filter(|plan| can_run(s, plan)).collect();
    }
    plans.iter_mut().for_each(|plan| plan.shared = dynamic_shared(s, plan));
    plans.sort_by_cached_key(|plan| clocks(s, plan, limits));
    plans
}

/// Whether the kernel can run the plan on any device.
fn can_run(s: &RewriteRead, plan: &Plan) -> bool {
    // Copies ahead take four bytes at least, from addresses that are multiples of their size.
    let can_stage = s.aligned && token_inputs(s).iter().all(|size| (plan.features * size).is_multiple_of(4));
    s.d.is_multiple_of(plan.cluster * plan.features)
        && (plan.stages == 0 || can_stage)
        && (plan.load_ahead == 0 || plan.keep_in_registers && plan.stages == 0)
}

/// Features of a packet. Packets that are re-read cost less in twice the length.
pub(super) fn packet(s: &RewriteRead, width: usize, re_read: bool) -> usize {
    let bytes = [s.m * s.types.state.size(), s.types.direction.size()];
    usual_packet(bytes, width, if re_read { 32 } else { 16 })
}

/// Features of a packet: `least` bytes of the state, and at least 4 of the vector beside it, if these divide `width`.
pub(super) fn usual_packet([state, vector]: [usize; 2], width: usize, least: usize) -> usize {
    let enough = |features: usize| features * state >= least && features * vector >= 4;
    let fits = |features: &usize| enough(*features) || !width.is_multiple_of(2 * features);
    [1, 2, 4, 8].into_iter().find(fits).unwrap_or(16)
}

/// Packets up to the usual length, the longest first.
pub(super) fn packets(usual: usize) -> Vec<usize> {
    [8, 4, 2, 1].into_iter().filter(|&features| features <= usual).collect()
}

/// Threads of a block: the fewest warps for each number of packets that a thread may have. Code for sm_90 keeps `wanted`
/// packets in registers without spills, and `wide` if fewer would take too many threads. Both are halved for packets of more
/// than 8 numbers of the state. Packets of more than 16 are not kept.
fn threads(s: &RewriteRead, plan: &Plan) -> Vec<usize> {
    let keep = plan.keep_in_registers;
    let short = packet(s, plan.width(s), false);
    let (packets, numbers) = (plan.width(s) / short, short * s.m);
    let (wanted, wide) = if s.kernel == Kernel::Backward { (4, 4) } else { (6, 8) };
    let share = if numbers <= 8 { 1 } else { 2 };
    let (wanted, wide) = (wanted / share, if numbers <= 16 { wide / share } else { 0 });
    let [usual, alone, spilling] = MOST_THREADS.map(|threads| threads.min(most_threads(s, plan.cluster)));
    let most = [usual, if keep { spilling } else { alone }];
    let least = packets.div_ceil(usual.max(1));
    let rows = if keep { least..=wanted.max(least).min(wide) } else { 1..=wanted };
    let fewest = |rows: usize| most.map(|most| packets.div_ceil(rows).next_multiple_of(32).min(most));
    let threads = rows.flat_map(fewest).chain(keep.then_some(spilling)).filter(|threads| *threads > 0);
    threads.collect::<BTreeSet<_>>().into_iter().collect()
}

/// Registers, if a thread that keeps its packets has them for `numbers` of each feature, then other places. The sums of a
/// token read's backward may join its window in registers. That is counted for two packets at least, because with long
/// ones, of which a thread could keep only one, it would cost more warps than it saves.
fn places(s: &RewriteRead, plan: &Plan, numbers: usize, others: [usize; 2]) -> Vec<usize> {
    let registers = |rows: usize, numbers: usize| rows * plan.features * numbers * s.real().size() / 4;
    let both = s.kernel == Kernel::Backward && s.compress == Compress::Token;
    let together = both && plan.window == Residency::Registers;
    let few = registers(plan.rows(s), numbers) <= FEW[0]
        || together && registers(plan.rows(s).max(2), s.slots() + s.taps) <= FEW[1];
    if plan.keep_in_registers && few { vec![0, others[0], others[1]] } else { others.to_vec() }
}
