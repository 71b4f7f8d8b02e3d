//! The candidates of `rewrite_read_fwd` and `rewrite_read_bwd`. Sums run over a token's features, so a block has all of
//! them, or the blocks of a cluster have a slice each.

use super::super::Plan;
use super::super::fits::{MOST_STATIC, most_threads_of_a_sum};
use super::super::footprint::{static_shared, token_inputs};
use super::super::limits::{Limits, RESERVED};
use super::super::overrides::Overrides;
use super::super::residency::Residency;
use super::choices::{blocks, packet, values, worth};
use crate::cuda::kernel::{Compress, Kernel, Specialisation};

/// Numbers of the state that a packet has. Longer packets, as of eight channels in bfloat16, count double.
const NUMBERS_OF_A_PACKET: usize = 8;
/// Numbers that a window or sums may take from the registers of one thread.
pub(super) const FEW: usize = 24;
/// Numbers that a token read's window and sums may take together: in shared memory they would move five times the bytes
/// of a token.
const FEW_TOGETHER: usize = 104;
/// Threads of a block that keeps its packets in registers.
const MOST_THREADS: usize = 256;
/// Threads of a block that is alone on its multiprocessor and re-reads its packets.
const MOST_THREADS_ALONE: usize = 512;
/// Threads of a block that keeps more than its registers hold, because shared memory has no room either, or by hand.
const MOST_THREADS_THAT_SPILL: usize = 1024;

pub fn candidates(s: &Specialisation, limits: &Limits, overrides: &Overrides) -> Vec<Plan> {
    let plans = clusters(s, limits, overrides).into_iter();
    plans
        .flat_map(|plan| packets(s, plan, overrides))
        .flat_map(|plan| threads(s, plan, limits, overrides))
        .flat_map(|plan| windows(s, plan, overrides))
        .flat_map(|plan| sums(s, plan, overrides))
        .flat_map(|plan| stages(s, plan, overrides))
        .flat_map(|plan| loads_ahead(s, plan, overrides))
        .flat_map(|plan| blocks(plan, overrides))
        .collect()
}

fn clusters(s: &Specialisation, limits: &Limits, overrides: &Overrides) -> Vec<Plan> {
    let slices = |cluster: usize| s.d.is_multiple_of(cluster * packet(s, s.d));
    let usual = [1, 2, 4, 8].into_iter().filter(|&cluster| cluster <= limits.cluster && slices(cluster));
    let clusters = values(overrides.cluster, usual, |cluster| s.d.is_multiple_of(cluster));
    clusters.into_iter().map(|cluster| Plan { cluster, ..Plan::plain(s) }).collect()
}

/// Packets that are kept in registers, and packets that are re-read: these cost less in twice the length.
fn packets(s: &Specialisation, plan: Plan, overrides: &Overrides) -> Vec<Plan> {
    let width = plan.width(s);
    let short = packet(s, width);
    let long = if short * s.m * s.types.state.size() < 32 { 2 * short } else { short };
    let long = if width.is_multiple_of(long) { long } else { short };
    let with = |keep_in_registers: bool| {
        let usual = if keep_in_registers { short } else { long };
        let features = values(overrides.features, [usual], |features| width.is_multiple_of(features));
        features.into_iter().map(move |features| Plan { keep_in_registers, features, ..plan })
    };
    values(overrides.keep_in_registers, [true, false], |_| true).into_iter().flat_map(with).collect()
}

/// The fewest warps for each number of packets that a thread may have.
fn threads(s: &Specialisation, plan: Plan, limits: &Limits, overrides: &Overrides) -> Vec<Plan> {
    let width = plan.width(s);
    let short = packet(s, width);
    let packets = width / short;
    let most = most_threads(s, plan.cluster);
    if most == 0 {
        return Vec::new();
    }
    let narrow = MOST_THREADS.min(most);
    let least = packets.div_ceil(narrow);
    let (wanted, wide) = packets_of_a_thread(s, short);
    let short = short * s.m <= 2 * NUMBERS_OF_A_PACKET;
    let spills = overrides.keep_in_registers.is_some() || !has_room_to_re_read(s, &plan, limits);
    let (rows, widest) = match plan.keep_in_registers {
        false => (1..=wanted, &[narrow, MOST_THREADS_ALONE][..]),
        true if short && packets <= wide * narrow => (least..=wanted.max(least), &[narrow][..]),
        true if spills => (1..=wanted, &[MOST_THREADS_THAT_SPILL][..]),
        true => (1..=wanted, &[][..]),
    };
    let fewest = |rows: usize| packets.div_ceil(rows).next_multiple_of(32).min(most);
    let mut usual: Vec<usize> =
        rows.flat_map(|rows| widest.iter().map(move |&widest| fewest(rows).min(widest))).collect();
    usual.sort_unstable();
    let threads = values(overrides.threads, usual, |threads| threads > 0);
    threads.into_iter().map(|threads| Plan { threads, ..plan }).collect()
}

/// Packets of a thread that code for sm_90 keeps in registers without spills; the second number only if a block would
/// otherwise have too many threads.
fn packets_of_a_thread(s: &Specialisation, features: usize) -> (usize, usize) {
    let (wanted, wide) = if s.kernel == Kernel::Backward { (4, 4) } else { (6, 8) };
    let double = usize::from(features * s.m > NUMBERS_OF_A_PACKET);
    (wanted >> double, wide >> double)
}

/// Threads of a block, so that the kernels can add up their sums.
fn most_threads(s: &Specialisation, cluster: usize) -> usize {
    let of_a_sum = most_threads_of_a_sum(cluster) / cluster / 32 * 32;
    of_a_sum.min(MOST_STATIC / static_shared(s, 32 * cluster) * 32)
}

/// Whether shared memory has room for the columns that wait for re-read packets.
fn has_room_to_re_read(s: &Specialisation, plan: &Plan, limits: &Limits) -> bool {
    let columns = 2 * plan.width(s) * s.real().size();
    columns + RESERVED + static_shared(s, plan.cluster * MOST_THREADS) <= limits.shared_per_block
}

/// Registers that a thread needs for so many numbers of each of its features.
fn numbers(s: &Specialisation, plan: &Plan, per_feature: usize) -> usize {
    plan.rows(s) * plan.features * per_feature * s.real().size() / 4
}

/// Whether a token read's backward keeps its window and its sums in registers together. Long packets, of which a
/// thread could have only one, would cost more warps than that saves.
fn fit_together(s: &Specialisation, plan: &Plan) -> bool {
    let two = numbers(s, plan, s.slots() + s.taps) * plan.rows(s).max(2) / plan.rows(s);
    s.kernel == Kernel::Backward && plan.keep_in_registers && two <= FEW_TOGETHER
}

fn windows(s: &Specialisation, plan: Plan, overrides: &Overrides) -> Vec<Plan> {
    use Residency::{Global, Registers, Shared};
    if s.compress != Compress::Token {
        return vec![plan];
    }
    let few = plan.keep_in_registers && numbers(s, &plan, s.taps) <= FEW;
    let usual = worth([(Registers, few || fit_together(s, &plan)), (Shared, true), (Global, true)]);
    let windows = values(overrides.window, usual, |_| true);
    windows.into_iter().map(|window| Plan { window, ..plan }).collect()
}

fn sums(s: &Specialisation, plan: Plan, overrides: &Overrides) -> Vec<Plan> {
    use Residency::{Registers, SeparateKernel, Shared};
    if s.kernel == Kernel::Forward {
        return vec![plan];
    }
    let few = plan.keep_in_registers && numbers(s, &plan, s.slots()) <= FEW;
    let with_window = s.compress == Compress::Token && plan.window == Registers && fit_together(s, &plan);
    let usual = worth([(Registers, few || with_window), (Shared, true), (SeparateKernel, true)]);
    let sums = values(overrides.sums, usual, |_| true);
    sums.into_iter().map(|sums| Plan { sums, ..plan }).collect()
}

/// Copies ahead take four bytes at least, from addresses that are multiples of their size.
fn stages(s: &Specialisation, plan: Plan, overrides: &Overrides) -> Vec<Plan> {
    let can_stage = s.aligned && token_inputs(s).all(|bytes| (plan.features * bytes).is_multiple_of(4));
    // Packets that are kept free their stage at once: a second stage is of no use to them.
    let most = if plan.keep_in_registers { 1 } else { 2 };
    let stages = values(overrides.stages, 0..=most, |stages| stages == 0 || can_stage);
    stages.into_iter().map(|stages| Plan { stages, ..plan }).collect()
}

/// A read has a second sum to load within, a rewrite has β and v.
fn loads_ahead(s: &Specialisation, plan: Plan, overrides: &Overrides) -> Vec<Plan> {
    if s.kernel != Kernel::Forward {
        return vec![plan];
    }
    let can = plan.keep_in_registers && plan.stages == 0;
    let usual = worth([(0, true), (1, s.compress != Compress::None), (2, s.rewrite)]);
    let loads_ahead = values(overrides.load_ahead, usual, |load_ahead| load_ahead == 0 || can);
    loads_ahead.into_iter().map(|load_ahead| Plan { load_ahead, ..plan }).collect()
}
