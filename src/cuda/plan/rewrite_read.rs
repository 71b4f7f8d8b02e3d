//! How the kernels of `rewrite_read` are planned: a block has all of a token, since sums run over its features, or a slice of them
//! that is planned here as if it were all.

use super::footprint::{
    self, FEW, MOST_STATIC, Plan, columns, features, feeds, most_registers, plain, shared, shared_in_all,
    static_shared,
};
use super::limits::{Limits, RESERVED};
use super::overrides::{Overrides, Residency};
use crate::cuda::kernel::{Compress, Kernel, Specialisation};
use crate::error::{Error, Result};

/// Numbers of the state that one packet may have if several of them are held.
const MOST_HELD: usize = 8;
/// Numbers of a token read's sums and window that a thread may hold beside its packets.
const MOST_KEPT: usize = 104;
/// Threads that may add up their sums (sum_partials in block_sum.cuh): of a power of two of blocks, and of others.
const MOST_TOGETHER: [usize; 2] = [4096, 1024];
/// Threads of a block, if several blocks share a multiprocessor.
const MOST_THREADS: usize = 256;
/// Threads of a block that has a multiprocessor to itself, if packets are not held.
const MOST_ALONE: usize = 512;

/// If few blocks share a multiprocessor, or packets are read twice, a token's rows go through stages.
pub fn plan(s: &Specialisation, limits: &Limits, overrides: &Overrides) -> Result<Plan> {
    let unstaged = plan_block(s, limits, overrides)?;
    // Blocks that keep memory busy by themselves, one loading while others wait. A forward that holds its packets
    // asks for the next token's before it is done with this one, stage or not.
    let enough = if s.kernel == Kernel::Forward { 2 } else { 3 };
    let busy = unstaged.hold && unstaged.blocks >= enough;
    if overrides.stages.is_some() || busy || !may_stage(s, &unstaged) {
        return Ok(unstaged);
    }
    let sums = (s.kernel == Kernel::Backward).then_some(unstaged.sums);
    let blocks = if unstaged.hold { unstaged.blocks } else { 1 };
    let staged = [1, 2]
        .into_iter()
        .filter(|stages| !unstaged.hold || *stages == 1)
        .filter_map(|stages| {
            plan_block(
                s,
                limits,
                &Overrides { stages: Some(stages), hold: Some(unstaged.hold), sums, ..*overrides },
            )
            .ok()
        })
        .filter(|plan| plan.window == unstaged.window && fits(s, plan, limits, blocks))
        .max_by_key(|plan| (plan.blocks.min(2), plan.stages));
    Ok(staged.unwrap_or(unstaged))
}

/// The next plan to try if this one spills registers: fewer blocks, a token read's sums out of them, more threads,
/// then packets taken twice.
pub fn relaxed(plan: &Plan, s: &Specialisation, limits: &Limits) -> Option<Plan> {
    let registers = |blocks| most_registers(limits, blocks * plan.threads);
    let fewer = (1..plan.blocks).rev().find(|blocks| registers(*blocks) > registers(plan.blocks));
    let over_time = s.kernel == Kernel::Backward && s.compress == Compress::Token;
    let kept = over_time && plan.sums == Residency::Registers;
    // Sums that are in shared memory stay there.
    let sums = (over_time && plan.sums == Residency::Shared).then_some(Residency::Shared);
    let free = Overrides { cluster: Some(plan.cluster), ..Overrides::default() };
    let same = Overrides { hold: Some(plan.hold), sums, ..free };
    let overrides = match fewer {
        Some(blocks) if plan.stages > 0 => return Some(Plan { blocks, ..*plan }),
        Some(_) => Overrides { threads: Some(plan.threads), blocks: fewer, ..same },
        None if kept => Overrides { sums: Some(Residency::Shared), ..free },
        None if plan.hold && 2 * plan.threads <= MOST_THREADS => {
            Overrides { threads: Some(2 * plan.threads), ..same }
        }
        None if plan.hold => Overrides { hold: Some(false), ..same },
        None if plan.threads > MOST_THREADS => Overrides { threads: Some(MOST_THREADS), ..same },
        None => return None,
    };
    let next = self::plan(s, limits, &overrides).ok()?;
    // Warm-up decides whether parameters_bwd is needed before compiling, so relaxing a plan may not change that.
    let same_kernels = (next.sums == Residency::SeparateKernel) == (plan.sums == Residency::SeparateKernel);
    (same_kernels && fits(s, &next, limits, 1)).then_some(next)
}

/// Whether shared memory has room for so many blocks.
fn fits(s: &Specialisation, plan: &Plan, limits: &Limits, blocks: usize) -> bool {
    let shared = shared_in_all(s, plan);
    shared <= limits.shared_per_block && blocks * shared <= limits.shared_per_multiprocessor
}

/// Copies ahead take four bytes at least, from addresses that are multiples of their size.
fn may_stage(s: &Specialisation, plan: &Plan) -> bool {
    s.aligned && feeds(s).all(|bytes| (plan.features * bytes).is_multiple_of(4))
}

/// Plans one block.
fn plan_block(s: &Specialisation, limits: &Limits, overrides: &Overrides) -> Result<Plan> {
    let cluster = overrides.cluster.unwrap_or(1);
    let together = MOST_TOGETHER[usize::from(!cluster.is_power_of_two())];
    let most = (MOST_STATIC / static_shared(s, 32 * cluster) * 32).min(together / cluster / 32 * 32);
    if most == 0 {
        let channels = s.m;
        return Err(Error::Argument(format!(
            "`state` must have fewer value channels to be worked on by a GPU, got {channels}: \
             move it to the CPU"
        )));
    }
    let room = limits.shared_per_block.saturating_sub(RESERVED + static_shared(s, cluster * most.min(1024)));
    let mut plan = divide(s, overrides, most, room);
    plan.stages = overrides.stages.filter(|_| may_stage(s, &plan)).unwrap_or(0);
    place(&mut plan, s, overrides, room);
    plan.shared = shared(s, &plan);
    // Memory that has room for one such block alone leaves it the threads of two.
    let more = (s.d / plan.features).next_multiple_of(32).min(MOST_ALONE).min(most);
    let alone = 2 * shared_in_all(s, &Plan { threads: more, ..plan }) > limits.shared_per_multiprocessor;
    if alone && !plan.hold && overrides.threads.is_none() {
        plan.threads = plan.threads.max(more);
    }
    plan.blocks = overrides.blocks.unwrap_or_else(|| footprint::blocks(s, &plan, limits));
    Ok(plan)
}

/// A token's features among threads. A warp pays a fixed price for each token, so few threads with many packets each
/// do best, as long as they can hold these. Where they cannot, packets are taken twice and columns wait in shared
/// memory.
fn divide(s: &Specialisation, overrides: &Overrides, most: usize, room: usize) -> Plan {
    let mut features = features(s);
    let (rows, most_rows) = if s.kernel == Kernel::Backward { (4, 4) } else { (6, 8) };
    // Packets of twice the length in half the rows, as of eight channels in bfloat16, are held as well.
    let longer = usize::from(features * s.m > MOST_HELD);
    let (rows, most_rows, most_held) = (rows >> longer, most_rows >> longer, MOST_HELD << longer);
    let (rows, most_rows) =
        rows_with_sums(s, features, overrides).map_or((rows, most_rows), |rows| (rows, rows));
    let packets = s.d / overrides.features.unwrap_or(features);
    let threads = packets.div_ceil(rows).next_multiple_of(32);
    let may_hold = packets.div_ceil(threads.min(MOST_THREADS)) <= most_rows && features * s.m <= most_held;
    let hold = overrides.hold.unwrap_or(may_hold || columns(s, Residency::SeparateKernel) > room);
    let too_wide = hold && !may_hold; // for the columns, or to be held without spills
    // Packets that are taken one by one cost less in twice the length.
    while !hold && features * s.m * s.types.state.size() < 32 && s.d.is_multiple_of(2 * features) {
        features *= 2;
    }
    let threads = threads.min(if too_wide { 1024 } else { MOST_THREADS });
    let features = overrides.features.unwrap_or(features);
    let threads = overrides.threads.unwrap_or(threads).min(most);
    Plan { cluster: overrides.cluster.unwrap_or(1), threads, features, hold, ..plain(s) }
}

/// Packets of a thread that keeps a token read's sums and window in registers, too. In shared memory these move five
/// times the bytes of a token, and leave the cache no room for the weights.
fn rows_with_sums(s: &Specialisation, features: usize, overrides: &Overrides) -> Option<usize> {
    let kept = |rows: usize| rows * features * (s.slots() + s.taps) * s.real().size() / 4 <= MOST_KEPT;
    let threads = |rows| (s.d / features).div_ceil(rows);
    let wanted = s.kernel == Kernel::Backward
        && s.compress == Compress::Token
        && overrides.sums.is_none_or(|sums| sums == Residency::Registers);
    [4, 2].into_iter().find(|&rows| wanted && kept(rows) && threads(rows) <= MOST_THREADS)
}

/// Places the numbers that outlive a token: in registers if they are few, else in shared memory if that has room. The
/// window comes first, as a token needs it twice. The sums have a kernel of their own, with the fewest columns, until
/// they have room.
fn place(plan: &mut Plan, s: &Specialisation, overrides: &Overrides, room: usize) {
    let owned = (s.d / plan.features).div_ceil(plan.threads) * plan.features;
    let few = FEW * 4 / s.real().size();
    let has_sums = s.kernel == Kernel::Backward;
    let kept = plan.hold
        && rows_with_sums(s, plan.features, overrides).is_some_and(|rows| owned <= rows * plan.features);
    if has_sums {
        plan.sums = Residency::SeparateKernel;
    }
    if s.compress == Compress::Token && !kept && (owned * s.taps > few || !plan.hold) {
        plan.window = Residency::Shared;
        plan.window = if shared(s, plan) <= room { Residency::Shared } else { Residency::Global };
    }
    plan.window = overrides.window.unwrap_or(plan.window);
    if has_sums {
        let held = kept || plan.hold && owned * s.slots() <= few;
        let place = if held { Residency::Registers } else { Residency::Shared };
        let there = Plan { sums: place, ..*plan };
        plan.sums = if shared(s, &there) <= room { place } else { Residency::SeparateKernel };
    }
    plan.sums = overrides.sums.unwrap_or(plan.sums);
}

/// Tokens of a chunk: as many as give each of the `wave` blocks that run at once one of them.
pub fn chunk(
    s: &Specialisation,
    plan: &Plan,
    wave: usize,
    limits: &Limits,
    overrides: &Overrides,
    tokens: usize,
) -> usize {
    let slices = plan.slices(s);
    let chunks = |blocks: usize| tokens.div_ceil((blocks / slices).max(1));
    // A chunk repeats the K − 1 tokens before it: keep that to a tenth while every multiprocessor has work.
    let long = (10 * (s.taps - 1)).min(chunks(limits.multiprocessors));
    overrides.chunk.unwrap_or(chunks(wave).max(long)).max(1)
}
