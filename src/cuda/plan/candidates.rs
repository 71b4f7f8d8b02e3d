//! The candidates for a plan: every way to divide a kernel's work that is worth comparing, as a product of the choices
//! that the kernel leaves open. Of equal cost the first is taken.
//!
//! An override keeps those candidates that have its value. Among what a kernel can run, values that nobody would time
//! are left out (idle warps, packets of odd lengths) unless an override names them.

use super::fits::most_threads;
use super::footprint::{dynamic_shared, token_inputs};
use super::limits::Limits;
use super::overrides::{Choice, Overrides};
use super::plan::Plan;
use super::residency::Residency;
use crate::cuda::kernel::{Compress, Kernel, Specialisation};

/// Numbers that a window or sums may take from the registers of one thread.
const FEW: usize = 24;
/// Numbers that a token read's window and sums may take together: in shared memory they would move five times the bytes
/// of a token.
const FEW_TOGETHER: usize = 104;
/// Threads of a block that keeps its packets in registers, that re-reads them alone on its multiprocessor, and that spills
/// because nothing else fits, or by hand.
pub(super) const MOST_THREADS: [usize; 3] = [256, 512, 1024];
/// Threads of a block whose threads need no sum with others.
const THREADS_APART: usize = 128;
/// Threads of a multiprocessor that are planned for: beyond that registers are worth more.
const PLANNED_THREADS: usize = 1024;
/// Registers of a thread for an expansion's weight and its sums.
const MOST_OF_A_WEIGHT: usize = 168;
/// Blocks that a multiprocessor of any GPU can have.
const MOST_RESIDENT_BLOCKS: usize = 32;

pub fn candidates(s: &Specialisation, limits: &Limits, overrides: &Overrides) -> Vec<Plan> {
    let token = s.compress == Compress::Token;
    let space = Space { s, overrides, plans: vec![Plan::plain(s)] };
    let mut plans = match s.kernel {
        Kernel::Forward | Kernel::Backward => space
            .vary(true, Choice::Cluster, |_| clusters(s, limits))
            .vary(true, Choice::KeepInRegisters, |_| vec![1, 0])
            .vary(true, Choice::Features, |plan| vec![packet_of(s, plan)])
            .vary(true, Choice::Threads, |plan| threads(s, plan))
            .vary(token, Choice::Window, |plan| windows(s, plan))
            .vary(s.kernel == Kernel::Backward, Choice::Sums, |plan| sums(s, plan))
            // Packets that are kept free their stage at once: a second stage is of no use to them.
            .vary(true, Choice::Stages, |plan| (0..=2 - usize::from(plan.keep_in_registers)).collect())
            .vary(s.kernel == Kernel::Forward, Choice::LoadAhead, |_| loads_ahead(s))
            .vary(true, Choice::Blocks, blocks),
        // No sum runs over the features, so every thread has one packet; short ones leave registers for the sums.
        Kernel::Parameters => space
            .vary(true, Choice::Features, |_| packets_up_to(s))
            .vary(true, Choice::Threads, |_| vec![THREADS_APART, 64, 32])
            .vary(token, Choice::Window, |plan| windows(s, plan))
            .vary(true, Choice::SeparateSums, |_| vec![0, 1, 2])
            .vary(true, Choice::Blocks, blocks),
        // Features do not meet, so a thread has a packet of them and walks tokens.
        Kernel::ExpandForward | Kernel::ExpandBackward => space
            .vary(true, Choice::Features, |_| packets_up_to(s))
            .vary(token, Choice::KeepInRegisters, |plan| weights_kept(s, plan))
            .vary(true, Choice::Threads, |plan| {
                vec![(s.d / plan.features).next_multiple_of(32).min(THREADS_APART)]
            }),
        Kernel::Reduce => Space { plans: vec![Plan { threads: 256, ..Plan::plain(s) }], ..space },
    }
    .plans;
    plans.iter_mut().for_each(|plan| plan.shared = dynamic_shared(s, plan));
    plans
}

/// Plans that differ in the choices made so far.
struct Space<'a> {
    s: &'a Specialisation,
    overrides: &'a Overrides,
    plans: Vec<Plan>,
}

impl Space<'_> {
    /// Every plan with every value of one more choice, if the kernel has it: the usual ones, or the one of an override.
    fn vary(mut self, open: bool, choice: Choice, usual: impl Fn(&Plan) -> Vec<usize>) -> Self {
        let values = |plan: &Plan| match self.overrides.get(choice) {
            Some(value) => vec![value],
            None => usual(plan),
        };
        let with =
            |plan: &Plan| values(plan).into_iter().map(|value| plan.with(choice, value)).collect::<Vec<_>>();
        if open {
            self.plans = self.plans.iter().flat_map(with).filter(|plan| can_run(self.s, plan)).collect();
        }
        self
    }
}

/// Whether the kernel can run the plan on any device.
fn can_run(s: &Specialisation, plan: &Plan) -> bool {
    // Copies ahead take four bytes at least, from addresses that are multiples of their size.
    let can_stage = s.aligned && token_inputs(s).all(|bytes| (plan.features * bytes).is_multiple_of(4));
    s.d.is_multiple_of(plan.cluster * plan.features)
        && (plan.stages == 0 || can_stage)
        && (plan.load_ahead == 0 || plan.keep_in_registers && plan.stages == 0)
}

/// Features of a packet: 16 bytes of the state, and at least 4 of the direction, if these divide `width`.
pub(super) fn packet(s: &Specialisation, width: usize) -> usize {
    let too_small = |features: usize| {
        features * s.m * s.types.state.size() < 16 || features * s.types.direction.size() < 4
    };
    let mut features = 1;
    while too_small(features) && width.is_multiple_of(2 * features) {
        features *= 2;
    }
    features
}

/// Packets that are re-read cost less in twice the length.
fn packet_of(s: &Specialisation, plan: &Plan) -> usize {
    let short = packet(s, plan.width(s));
    let double = !plan.keep_in_registers && short * s.m * s.types.state.size() < 32;
    if double && plan.width(s).is_multiple_of(2 * short) { 2 * short } else { short }
}

fn packets_up_to(s: &Specialisation) -> Vec<usize> {
    [8, 4, 2, 1].into_iter().filter(|&features| features <= packet(s, s.d)).collect()
}

/// A weight of an expansion that fits is kept, with its sums; if it fits into short packets alone, then in these.
fn weights_kept(s: &Specialisation, plan: &Plan) -> Vec<usize> {
    let fits = |features: usize| 2 * s.taps * features * (s.m + 1) * s.real().size() / 4 <= MOST_OF_A_WEIGHT;
    match (fits(plan.features), fits(1)) {
        (true, _) => vec![1],
        (false, true) => Vec::new(),
        (false, false) => vec![0],
    }
}

fn clusters(s: &Specialisation, limits: &Limits) -> Vec<usize> {
    let slices = |cluster: usize| s.d.is_multiple_of(cluster * packet(s, s.d));
    [1, 2, 4, 8].into_iter().filter(|&cluster| cluster <= limits.cluster && slices(cluster)).collect()
}

/// The fewest warps for each number of packets that a thread may have, at the end those of a block that spills.
fn threads(s: &Specialisation, plan: &Plan) -> Vec<usize> {
    let most = most_threads(s, plan.cluster);
    let [narrow, alone, spilling] = MOST_THREADS.map(|threads| threads.min(most));
    let short = packet(s, plan.width(s));
    let packets = plan.width(s) / short;
    let (wanted, wide) = packets_of_a_thread(s, short * s.m);
    let fewest = |rows: usize| packets.div_ceil(rows).next_multiple_of(32);
    let mut threads: Vec<usize> = if plan.keep_in_registers {
        let least = packets.div_ceil(narrow.max(1));
        (least..=wanted.max(least).min(wide)).map(|rows| fewest(rows).min(narrow)).chain([spilling]).collect()
    } else {
        (1..=wanted).flat_map(|rows| [fewest(rows).min(narrow), fewest(rows).min(alone)]).collect()
    };
    threads.retain(|&threads| threads > 0);
    threads.sort_unstable();
    threads.dedup();
    threads
}

/// Packets of a thread that code for sm_90 keeps in registers without spills; the second number only if a block would
/// otherwise have too many threads. Packets of more than eight numbers of the state count double, long ones are not kept.
fn packets_of_a_thread(s: &Specialisation, numbers: usize) -> (usize, usize) {
    let (wanted, wide) = if s.kernel == Kernel::Backward { (4, 4) } else { (6, 8) };
    match numbers {
        ..=8 => (wanted, wide),
        9..=16 => (wanted / 2, wide / 2),
        _ => (wanted / 2, 0),
    }
}

/// Registers that a thread needs for so many numbers of each of its features.
fn numbers(s: &Specialisation, plan: &Plan, per_feature: usize) -> usize {
    plan.rows(s) * plan.features * per_feature * s.real().size() / 4
}

/// Whether a token read's backward keeps its window and its sums in registers together. Long packets, of which a
/// thread could have only one, would cost more warps than that saves.
fn fit_together(s: &Specialisation, plan: &Plan) -> bool {
    let two = numbers(s, plan, s.slots() + s.taps) * plan.rows(s).max(2) / plan.rows(s);
    s.kernel == Kernel::Backward && two <= FEW_TOGETHER
}

fn windows(s: &Specialisation, plan: &Plan) -> Vec<usize> {
    let held = plan.keep_in_registers && (numbers(s, plan, s.taps) <= FEW || fit_together(s, plan));
    (usize::from(!held)..=Residency::Global as usize).collect()
}

fn sums(s: &Specialisation, plan: &Plan) -> Vec<usize> {
    let beside_window =
        s.compress == Compress::Token && plan.window == Residency::Registers && fit_together(s, plan);
    let held = plan.keep_in_registers && (numbers(s, plan, s.slots()) <= FEW || beside_window);
    let places = [Residency::Registers, Residency::Shared, Residency::SeparateKernel];
    places[usize::from(!held)..].iter().map(|&place| place as usize).collect()
}

/// A read has a second sum to load within, a rewrite has β and v.
fn loads_ahead(s: &Specialisation) -> Vec<usize> {
    let worth = [(2, s.rewrite), (1, s.compress != Compress::None), (0, true)];
    worth.into_iter().filter_map(|(value, worth)| worth.then_some(value)).collect()
}

/// From those blocks per multiprocessor that keep memory busy to one.
fn blocks(plan: &Plan) -> Vec<usize> {
    (1..=(PLANNED_THREADS / plan.threads).clamp(1, MOST_RESIDENT_BLOCKS)).rev().collect()
}
