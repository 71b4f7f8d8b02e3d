//! The candidates for a plan, in the order of one rule for kernels, sizes and GPUs that nobody has timed: keep a token's
//! packets in registers, share them among few blocks, have as many blocks on a multiprocessor as leave a thread its
//! registers, and stage a token ahead if that costs none of them. An override keeps the candidates with its value.

use std::cmp::Reverse;

use super::footprint::{dynamic_shared, fits, most_threads, registers};
use super::limits::Limits;
use super::overrides::{Choice, Overrides};
use super::plan::Plan;
use crate::cuda::kernel::{Compress, Expand, Kernel, RewriteRead, Specialisation};

/// Threads of a block: usually, and if it re-reads its packets or would spill.
const MOST_THREADS: [usize; 2] = [256, 512];
/// Threads of a block whose threads need no sum with others.
const THREADS_APART: usize = 128;
/// Threads of a multiprocessor that are planned for: beyond that registers are worth more.
const PLANNED_THREADS: usize = 1024;
/// Registers of a thread for the weight of its packet of an expansion.
const MOST_OF_A_WEIGHT: usize = 168;

/// The candidates that a device has room for, the best first.
pub(super) fn candidates(s: &Specialisation, limits: &Limits, overrides: &Overrides) -> Vec<Plan> {
    match s {
        Specialisation::RewriteRead(s) => rewrite_read(s, limits, overrides),
        Specialisation::Expand(s) => expand(s, overrides),
    }
}

fn rewrite_read(s: &RewriteRead, limits: &Limits, overrides: &Overrides) -> Vec<Plan> {
    let [forward, backward, parameters] =
        [Kernel::Forward, Kernel::Backward, Kernel::Parameters].map(|kernel| s.kernel == kernel);
    let (over_features, usual) = (forward || backward, packet(s, s.d, 16));
    let clusters = |n: &usize| *n <= limits.cluster && s.d.is_multiple_of(n * usual);
    // Packets that are re-read cost less in twice the length.
    let bytes = |plan: &Plan| if plan.keep_in_registers { 16 } else { 32 };
    let choices: [Choice; 12] = [
        (over_features, "CLUSTER", &|_| [1, 2, 4, 8].into_iter().filter(clusters).collect()),
        (over_features, "KEEP_IN_REGISTERS", &|_| vec![1, 0]),
        (over_features, "FEATURES", &|plan| vec![packet(s, plan.width(s), bytes(plan))]),
        (over_features, "THREADS", &|plan| threads(s, plan)),
        // Where features do not meet, a thread has one packet of them; short ones leave registers for sums.
        (parameters, "FEATURES", &|_| packets(usual)),
        (parameters, "THREADS", &|_| vec![THREADS_APART]),
        (s.compress == Compress::Token, "WINDOW", &|plan| places(s, plan, s.taps, [1, 2])),
        (backward, "SUMS", &|plan| places(s, plan, s.slots(), [1, 3])),
        (parameters, "SEPARATE_SUMS", &|_| vec![0, 1, 2]),
        (over_features, "STAGES", &|_| vec![0, 1]),
        // Within a read's second sum, where no stage has the token.
        (forward, "LOAD_AHEAD", &|_| (0..=usize::from(s.compress != Compress::None)).collect()),
        (true, "BLOCKS", &|plan| (1..=(PLANNED_THREADS / plan.threads).max(1)).collect()),
    ];
    let choices = if s.kernel == Kernel::Reduce { &[] } else { &choices[..] };
    let mut plans = overrides.vary(Plan::first(s.aligned), choices);
    plans.iter_mut().for_each(|plan| plan.shared = dynamic_shared(s, plan));
    plans.retain(|plan| fits(s, plan, limits));
    plans.sort_by_cached_key(|plan| order(s, plan, limits));
    plans
}

/// The longest packets first; if only short ones leave room to keep the weight, these alone. The grid fills the
/// multiprocessors with threads whatever a block has.
fn expand(s: &Expand, overrides: &Overrides) -> Vec<Plan> {
    let taps = if s.weight.is_some() { s.taps } else { 0 };
    // The packet's weight, its sums, and the numbers of as many tokens as it has taps.
    let registers = |features: usize| 2 * taps * features * (s.m + 1) * s.real().size() / 4;
    let keeps = |features: usize| registers(features) <= MOST_OF_A_WEIGHT;
    let usual = features([s.m * s.state.size(), s.x.size()], s.d, 16);
    let lengths =
        |_: &Plan| packets(usual).into_iter().filter(|&length| keeps(length) || !keeps(1)).collect();
    let choices: [Choice; 3] = [
        (true, "FEATURES", &lengths),
        (true, "THREADS", &|plan| vec![(s.d / plan.features).next_multiple_of(32).min(THREADS_APART)]),
        (s.weight.is_some(), "KEEP_IN_REGISTERS", &|plan| vec![keeps(plan.features).into()]),
    ];
    let mut plans = overrides.vary(Plan::first(s.aligned), &choices);
    plans.retain(|plan| s.d.is_multiple_of(plan.features));
    plans
}

/// The rule: the least comes first. A block that is alone on its multiprocessor waits for memory if it has no stage, and
/// for the others of a cluster.
fn order(s: &RewriteRead, plan: &Plan, limits: &Limits) -> impl Ord + use<> {
    let [window, sums] = [plan.window, plan.sums].map(|place| place as usize);
    let alone = plan.blocks == 1 && s.kernel != Kernel::Parameters;
    (
        (short(s, plan, limits), window / 2, alone && plan.stages == 0, sums / 2),
        (!plan.keep_in_registers, alone && plan.cluster > 1, plan.cluster, window, sums),
        Reverse((plan.features, plan.blocks * plan.threads, plan.stages, plan.load_ahead)),
    )
}

/// Registers that a thread lacks, and packets that it keeps beyond those with which code for sm_90 does not spill.
pub(super) fn short(s: &RewriteRead, plan: &Plan, limits: &Limits) -> usize {
    let lacking = registers(s, plan).saturating_sub(limits.most_registers(plan.blocks * plan.threads));
    let crowded = plan.rows(s).saturating_sub(rows(s)[1]) + usize::from(plan.threads > MOST_THREADS[0]);
    lacking + if plan.keep_in_registers && s.kernel != Kernel::Parameters { crowded } else { 0 }
}

/// Features of a packet with `least` bytes of the state.
pub(super) fn packet(s: &RewriteRead, width: usize, least: usize) -> usize {
    features([s.m * s.types.state.size(), s.types.direction.size()], width, least)
}

/// Features of a packet: `least` bytes of the state, and at least 4 of the vector beside it, if these divide `width`.
fn features([state, vector]: [usize; 2], width: usize, least: usize) -> usize {
    let enough = |features: usize| features * state >= least && features * vector >= 4;
    let fits = |features: &usize| enough(*features) || !width.is_multiple_of(2 * features);
    [1, 2, 4, 8].into_iter().find(fits).unwrap_or(16)
}

/// Packets up to the usual length, the longest first.
fn packets(usual: usize) -> Vec<usize> {
    [8, 4, 2, 1].into_iter().filter(|&features| features <= usual).collect()
}

/// Packets of a thread, wanted and kept at most: half of them with more than 8 numbers of the state, and none kept with
/// more than 16.
fn rows(s: &RewriteRead) -> [usize; 2] {
    let [wanted, most] = match s.kernel {
        Kernel::Backward if s.compress == Compress::Token => [2, 4],
        Kernel::Backward => [4, 4],
        _ => [6, 8],
    };
    match packet(s, s.d, 16) * s.m {
        ..=8 => [wanted, most],
        9..=16 => [wanted / 2, most / 2],
        _ => [wanted / 2, 0],
    }
}

/// Threads of a block: the fewest warps with the wanted packets each.
fn threads(s: &RewriteRead, plan: &Plan) -> Vec<usize> {
    let packets = plan.width(s) / packet(s, plan.width(s), 16);
    let fewest = packets.div_ceil(rows(s)[0]).next_multiple_of(32);
    let mut threads =
        MOST_THREADS.map(|most| fewest.min(most).min(most_threads(s, plan.cluster)).max(32)).to_vec();
    threads.dedup();
    threads
}

/// Registers, if a thread that keeps its packets has them for `numbers` of each feature, then other places. In shared
/// memory the window and the sums of a token read's backward would move five times a token's bytes.
fn places(s: &RewriteRead, plan: &Plan, numbers: usize, others: [usize; 2]) -> Vec<usize> {
    let registers = plan.rows(s) * plan.features * numbers * s.real().size() / 4;
    let few = if s.kernel == Kernel::Backward && s.compress == Compress::Token { 104 } else { 24 };
    if plan.keep_in_registers && registers <= few { vec![0, others[0], others[1]] } else { others.to_vec() }
}
