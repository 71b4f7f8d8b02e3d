//! The candidates for a plan, in the order of one rule for kernels and sizes that nobody has timed: keep a token's packets
//! in registers, share them among as few blocks as leave a thread few, have as many blocks on a multiprocessor as leave a
//! thread its registers, and stage a token ahead where that is one block. An override keeps the candidates with its value.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::footprint::{dynamic_shared, most_threads, registers, token_inputs};
use super::limits::Limits;
use super::overrides::Overrides;
use super::plan::{Plan, Residency};
use crate::cuda::kernel::{Compress, Kernel, RewriteRead};

/// Most registers of a thread for a window or for sums, and for both of a token read's backward.
const FEW: [usize; 2] = [24, 104];
/// Threads of a block: usually, if it re-reads its packets alone on its multiprocessor, and if it keeps them and spills.
const MOST_THREADS: [usize; 3] = [256, 512, 1024];
/// Threads of a block whose threads need no sum with others.
pub(super) const THREADS_APART: usize = 128;
/// Threads of a multiprocessor that are planned for: beyond that registers are worth more.
const PLANNED_THREADS: usize = 1024;

/// The values of a choice after the choices before it, if the kernel has it.
type Values<'a> = &'a dyn Fn(&Plan) -> Vec<usize>;

/// The candidates, the best first.
pub(super) fn candidates(s: &RewriteRead, limits: &Limits, overrides: &Overrides) -> Vec<Plan> {
    let [forward, backward, parameters] =
        [Kernel::Forward, Kernel::Backward, Kernel::Parameters].map(|kernel| s.kernel == kernel);
    let (token, over_features) = (s.compress == Compress::Token, forward || backward);
    let slices = |n: &usize| *n <= limits.cluster && s.d.is_multiple_of(n * packet(s, s.d, false));
    // A read has a second sum to load within, a rewrite has β and v.
    let worth = [true, s.compress != Compress::None, s.rewrite];
    let choices: [(bool, &str, Values); 11] = [
        (over_features, "CLUSTER", &|_| [1, 2, 4, 8].into_iter().filter(slices).collect()),
        (over_features, "KEEP_IN_REGISTERS", &|_| vec![1, 0]),
        (over_features, "FEATURES", &|plan| vec![packet(s, plan.width(s), !plan.keep_in_registers)]),
        // Where features do not meet, a thread has one packet of them; short ones leave registers for sums.
        (parameters, "FEATURES", &|_| packets(packet(s, s.d, false))),
        (over_features || parameters, "THREADS", &|plan| threads(s, plan)),
        (token, "WINDOW", &|plan| places(s, plan, s.taps, [1, 2])),
        (backward, "SUMS", &|plan| places(s, plan, s.slots(), [1, 3])),
        (parameters, "SEPARATE_SUMS", &|_| vec![0, 1, 2]),
        (over_features, "STAGES", &|_| vec![0, 1]),
        (forward, "LOAD_AHEAD", &|_| (0..=2).rev().filter(|ahead| worth[*ahead]).collect()),
        (true, "BLOCKS", &|plan| (1..=(PLANNED_THREADS / plan.threads).max(1)).collect()),
    ];
    let align = if s.aligned { 16 } else { 2 };
    let one = Plan { cluster: 1, threads: 256, features: 1, align, blocks: 1, ..Plan::default() };
    let mut plans = vec![Plan { keep_in_registers: true, ..one }];
    for (_, choice, usual) in choices.iter().filter(|(has, ..)| *has && s.kernel != Kernel::Reduce) {
        let varied = plans.iter().flat_map(|plan| overrides.vary(plan, choice, usual(plan)));
        plans = varied.filter(|plan| can_run(s, plan)).collect();
    }
    plans.iter_mut().for_each(|plan| plan.shared = dynamic_shared(s, plan));
    plans.sort_by_cached_key(|plan| order(s, plan, limits));
    plans
}

/// The rule: the least comes first.
fn order(s: &RewriteRead, plan: &Plan, limits: &Limits) -> impl Ord + use<> {
    let places = [plan.window, plan.sums].map(|place| place as usize);
    let idle = plan.blocks == 1 && plan.stages + plan.load_ahead == 0 && s.kernel != Kernel::Parameters;
    let alone = plan.blocks == 1 && plan.cluster > 1;
    let stages = usize::from(plan.blocks == 1 || !plan.keep_in_registers);
    (
        (short(s, plan, limits), places[0] / 2, idle, places[1] / 2),
        (!plan.keep_in_registers, alone, plan.cluster),
        (plan.stages.abs_diff(stages), places),
        Reverse((plan.features, plan.blocks * plan.threads, plan.load_ahead)),
    )
}

/// Registers that a thread lacks, and packets that it keeps beyond those with which code for sm_90 does not spill.
pub(super) fn short(s: &RewriteRead, plan: &Plan, limits: &Limits) -> usize {
    let lacking = registers(s, plan).saturating_sub(limits.most_registers(plan.blocks * plan.threads));
    let crowded = plan.rows(s).saturating_sub(rows(s)[1]) + usize::from(plan.threads > MOST_THREADS[0]);
    lacking + if plan.keep_in_registers && s.kernel != Kernel::Parameters { crowded } else { 0 }
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

/// Packets of a thread, wanted and kept at most: half of them with more than 8 numbers of the state, and none kept with
/// more than 16.
fn rows(s: &RewriteRead) -> [usize; 2] {
    let [wanted, most] = match s.kernel {
        Kernel::Backward if joined(s, packet(s, s.d, false), 2) => [2, 4],
        Kernel::Backward => [4, 4],
        _ => [6, 8],
    };
    match packet(s, s.d, false) * s.m {
        ..=8 => [wanted, most],
        9..=16 => [wanted / 2, most / 2],
        _ => [wanted / 2, 0],
    }
}

/// Threads of a block: the fewest warps with the wanted packets each.
fn threads(s: &RewriteRead, plan: &Plan) -> Vec<usize> {
    if s.kernel == Kernel::Parameters {
        return vec![THREADS_APART];
    }
    let packets = plan.width(s) / packet(s, plan.width(s), false);
    let [usual, alone, spilling] = MOST_THREADS.map(|threads| threads.min(most_threads(s, plan.cluster)));
    let most = [usual, if plan.keep_in_registers { spilling } else { alone }];
    let fewest = most.map(|most| packets.div_ceil(rows(s)[0]).next_multiple_of(32).min(most));
    let threads: BTreeSet<_> = fewest.into_iter().filter(|threads| *threads > 0).collect();
    threads.into_iter().collect()
}

/// Registers, if a thread that keeps its packets has them for `numbers` of each feature, then other places.
fn places(s: &RewriteRead, plan: &Plan, numbers: usize, others: [usize; 2]) -> Vec<usize> {
    let few = plan.rows(s) * plan.features * numbers * s.real().size() / 4 <= FEW[0]
        || plan.window == Residency::Registers && joined(s, plan.features, plan.rows(s));
    if plan.keep_in_registers && few { vec![0, others[0], others[1]] } else { others.to_vec() }
}

/// Whether the sums of a token read's backward join its window in registers, for two packets at least: in shared memory
/// both would move five times a token's bytes.
fn joined(s: &RewriteRead, features: usize, rows: usize) -> bool {
    let registers = rows.max(2) * features * (s.slots() + s.taps) * s.real().size() / 4;
    s.kernel == Kernel::Backward && s.compress == Compress::Token && registers <= FEW[1]
}
