//! How a kernel is cut for a device: threads, what a thread holds, where sums live, tokens per block.
//!
//! Pure functions of sizes, types and the device's limits. Correctness never depends on what is chosen
//! here; speed does. A kernel streams memory, so it wants many bytes in flight: packets of 16 bytes, several
//! for each thread, what a token needs twice kept in registers, and none of these spilled.

use super::launch::Loaded;
use super::specialisation::{Compress, Kernel, Specialisation};
use crate::error::Result;

mod boundary;
mod cluster;
pub mod expand;
mod forced;

pub use forced::Forced;

/// What a device has to offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub multiprocessors: usize,
    /// dynamic and static shared memory that one block may have
    pub shared_per_block: usize,
    pub shared_per_multiprocessor: usize,
    pub registers_per_multiprocessor: usize,
    pub threads_per_multiprocessor: usize,
    /// blocks of a cluster, at most; 1 where there are no clusters
    pub cluster: usize,
}

/// Where numbers live that a thread keeps; numbered as WINDOW and SUMS in common.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    Registers = 0,
    Shared = 1,
    Global = 2,
    /// with a kernel of their own
    Apart = 3,
}

/// The rest of a kernel's macros, and the dynamic shared memory it is launched with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plan {
    /// blocks that share a token, a slice of its features each
    pub cluster: usize,
    pub threads: usize,
    pub features: usize,
    pub align: usize,
    pub hold: bool,
    pub window: Place,
    pub sums: Place,
    /// of shared memory that a token's rows travel through, ahead
    pub stages: usize,
    /// blocks wanted per multiprocessor
    pub blocks: usize,
    pub shared: usize,
}

/// Every block reserves this much shared memory for itself (from sm_80 on).
pub const RESERVED: usize = 1024;
/// Static shared memory that the compiler accepts.
const MOST_STATIC: usize = 48 << 10;
/// Bytes of the counts of what blocks of a cluster send each other.
const COUNTS: usize = 16;
/// Numbers that a window or sums may take from the registers of one thread.
const FEW: usize = 24;
/// Numbers that a thread may hold of sums that are all it is there for.
const MOST_SUMS: usize = 96;
/// Threads of a multiprocessor that keep memory busy; beyond that registers are worth more.
const ENOUGH_THREADS: usize = 1024;

/// Blocks of a cluster on GPUs of an architecture: those that every one of them has room for. The first compiler that
/// knows how they send each other numbers is that of CUDA 12.1.
pub fn most_of_a_cluster(architecture: u32, compiler: (i32, i32)) -> usize {
    if architecture >= 90 && compiler >= (12, 1) { 8 } else { 1 }
}

impl Plan {
    /// Fails for so many value channels that no block could add up its sums.
    pub fn new(s: &Specialisation, limits: &Limits, forced: &Forced) -> Result<Plan> {
        match s.kernel {
            Kernel::Forward | Kernel::Backward => cluster::plan(s, limits, forced),
            Kernel::Parameters => Ok(parameters(s, limits, forced)),
            Kernel::ExpandForward | Kernel::ExpandBackward => Ok(expand::plan(s, forced)),
            Kernel::Reduce | Kernel::Arrange => Ok(Plan { threads: 256, ..plain(s) }),
        }
    }

    /// The next plan to try where this one spills registers: fewer blocks, then packets read twice; of an
    /// expansion, packets of half the length.
    pub fn relaxed(&self, s: &Specialisation, limits: &Limits) -> Option<Plan> {
        if s.kernel == Kernel::Parameters {
            return (self.blocks > 1).then(|| Plan { blocks: self.blocks - 1, ..*self });
        }
        if !matches!(s.kernel, Kernel::Forward | Kernel::Backward) {
            let half = Forced { features: Some(self.features / 2), ..Forced::default() };
            return (s.kernel.expands() && self.features > 1).then(|| expand::plan(s, &half));
        }
        cluster::relaxed(self, s, limits)
    }

    /// The macros that the plan decides.
    pub fn defines(&self) -> [(&'static str, String); 9] {
        [
            ("CLUSTER", self.cluster.to_string()),
            ("THREADS", self.threads.to_string()),
            ("FEATURES", self.features.to_string()),
            ("ALIGN", self.align.to_string()),
            ("KEEP_IN_REGISTERS", u8::from(self.hold).to_string()),
            ("WINDOW", (self.window as u8).to_string()),
            ("SUMS", (self.sums as u8).to_string()),
            ("STAGES", self.stages.to_string()),
            ("BLOCKS", self.blocks.to_string()),
        ]
    }

    /// Bytes of the window in global memory, for so many blocks.
    pub fn scratch(&self, s: &Specialisation, blocks: usize) -> usize {
        let width = self.width(s) / self.cluster;
        if self.window == Place::Global { blocks * self.slices(s) * window_bytes(s, width) } else { 0 }
    }

    /// Blocks that share a chunk of tokens, a slice of the features each.
    pub fn slices(&self, s: &Specialisation) -> usize {
        self.cluster * s.d.div_ceil(self.width(s))
    }

    /// Blocks that run on the device at once, where nothing else says it.
    pub fn wave(&self, limits: &Limits) -> usize {
        limits.multiprocessors * self.blocks
    }

    /// Features of a block; of a whole cluster where `s` is not of one block of it.
    fn width(&self, s: &Specialisation) -> usize {
        if s.kernel == Kernel::Parameters { self.threads * self.features } else { s.d }
    }
}

fn plain(s: &Specialisation) -> Plan {
    Plan {
        cluster: 1,
        threads: 32,
        features: 1,
        align: if s.aligned { 16 } else { 2 },
        hold: true,
        window: Place::Registers,
        sums: Place::Registers,
        stages: 0,
        blocks: 1,
        shared: 0,
    }
}

/// A thread has one packet. Its sums are the most that it holds: short packets keep them in registers.
fn parameters(s: &Specialisation, limits: &Limits, forced: &Forced) -> Plan {
    let most = MOST_SUMS * 4 / s.real().size();
    let mut plan =
        Plan { threads: 128, features: forced.features.unwrap_or_else(|| features(s)), ..plain(s) };
    while plan.features.is_multiple_of(2) && plan.features * s.slots() > most && forced.features.is_none() {
        plan.features /= 2;
    }
    plan.threads = forced.threads.unwrap_or(plan.threads);
    let room = limits.shared_per_block.saturating_sub(RESERVED);
    if plan.features * s.slots() > most {
        plan.sums = Place::Shared;
    }
    if s.compress == Compress::Token && plan.features * s.taps > FEW * 4 / s.real().size() {
        plan.window = Place::Shared;
    }
    while shared(s, &plan) > room && plan.threads > 32 && forced.threads.is_none() {
        plan.threads /= 2;
    }
    if shared(s, &plan) > room {
        plan.sums = Place::Global;
        plan.threads = forced.threads.unwrap_or(128);
    }
    if shared(s, &plan) > room {
        plan.window = Place::Global;
    }
    plan.window = forced.window.unwrap_or(plan.window);
    plan.sums = forced.sums_apart.unwrap_or(plan.sums);
    plan.shared = shared(s, &plan);
    plan.blocks = forced.blocks.unwrap_or_else(|| blocks(s, &plan, limits));
    plan
}

/// A packet is 16 bytes of the state, and at least 4 of the direction, where these divide d.
fn features(s: &Specialisation) -> usize {
    let too_small = |features: usize| {
        features * s.m * s.types.state.size() < 16 || features * s.types.direction.size() < 4
    };
    let mut features = 1;
    while too_small(features) && s.d.is_multiple_of(2 * features) {
        features *= 2;
    }
    features
}

/// As many blocks as leave each thread the registers and each block the shared memory it needs, so that
/// others work while one waits for its sums.
fn blocks(s: &Specialisation, plan: &Plan, limits: &Limits) -> usize {
    let most = (limits.shared_per_multiprocessor / shared_in_all(s, plan))
        .min(limits.threads_per_multiprocessor.min(ENOUGH_THREADS) / plan.threads)
        .clamp(1, 32);
    let needed = registers(s, plan);
    (1..=most).rev().find(|blocks| needed <= most_registers(limits, blocks * plan.threads)).unwrap_or(1)
}

/// Registers that a thread can have when so many threads share a multiprocessor: each of its four parts
/// deals them out to its warps, eight at a time.
fn most_registers(limits: &Limits, threads: usize) -> usize {
    let warps = threads.div_ceil(32).div_ceil(4);
    (limits.registers_per_multiprocessor / 4 / 32 / warps / 8 * 8).min(255)
}

/// Registers that a thread needs, at the least: fitted to the fewest with which code for sm_90 does not
/// spill. Where it still does, `compiler::build` relaxes the plan.
fn registers(s: &Specialisation, plan: &Plan) -> usize {
    let rows = (plan.width(s) / plan.features).div_ceil(plan.threads);
    let elements = plan.features * s.m;
    let held_rows = if plan.hold { rows } else { 1 };
    let packet = if s.kernel == Kernel::Backward { 4 * elements } else { 3 * elements / 2 };
    let held = held_rows * (packet + plan.features);
    let window = if plan.window == Place::Registers { rows * plan.features * (s.taps - 1) } else { 0 };
    let has_sums = s.kernel != Kernel::Forward;
    let sums = if has_sums && plan.sums == Place::Registers { rows * plan.features * s.slots() } else { 0 };
    16 + (2 * s.m + held + window + sums) * s.real().size() / 4
}

/// Bytes of its multiprocessor's shared memory that a block takes.
fn shared_in_all(s: &Specialisation, plan: &Plan) -> usize {
    plan.shared + static_shared(s, plan.cluster * plan.threads) + RESERVED
}

/// Bytes of the two buffers for sums over so many threads.
fn static_shared(s: &Specialisation, threads: usize) -> usize {
    let sums = match s.kernel {
        Kernel::Backward => 1 + 2 * s.m,
        Kernel::Parameters => 0,
        _ => 2 + s.m,
    };
    2 * sums * threads.div_ceil(32) * s.real().size() + COUNTS
}

fn window_bytes(s: &Specialisation, width: usize) -> usize {
    s.taps * width * s.real().size()
}

/// Bytes of the columns that wait between the passes over a token where its packets are not held.
fn columns(s: &Specialisation, sums: Place) -> usize {
    let count = match (s.kernel, sums) {
        (Kernel::Backward, Place::Apart) => 2, // dh' waits for the sums alone
        (Kernel::Backward, _) => 3,
        _ => 1,
    };
    count * s.d * s.real().size()
}

/// Bytes of one token's rows, each in slots of 16.
fn stage(s: &Specialisation) -> usize {
    feeds(s).map(|numbers| (s.d * numbers).next_multiple_of(16)).sum()
}

/// Bytes per feature of what a token brings along.
fn feeds(s: &Specialisation) -> impl Iterator<Item = usize> {
    let types = &s.types;
    let backward = s.kernel == Kernel::Backward;
    [
        (true, s.m * types.state.size()),
        (s.rewrite, types.direction.size()),
        (backward, s.m * types.state.size()),
        (backward && s.compress != Compress::None, types.context.size()),
        (backward && s.compress == Compress::Token, types.state.size()),
    ]
    .into_iter()
    .filter_map(|(there, bytes)| there.then_some(bytes))
}

/// Dynamic shared memory: the stages, the window, the columns, the sums.
fn shared(s: &Specialisation, plan: &Plan) -> usize {
    let width = plan.width(s);
    let window = if plan.window == Place::Shared { window_bytes(s, width) } else { 0 };
    let columns = if plan.hold { 0 } else { columns(s, plan.sums) };
    let sums = if plan.sums == Place::Shared { s.slots() * width * s.real().size() } else { 0 };
    let stages = if plan.stages > 0 { plan.stages * stage(s) } else { 0 };
    stages + window + columns + sums
}

/// Tokens of a chunk: as many as give each of the `wave` blocks that run at once one of them.
pub fn chunk(s: &Specialisation, loaded: &Loaded, limits: &Limits, forced: &Forced, tokens: usize) -> usize {
    let slices = loaded.plan.slices(s);
    let chunks = |blocks: usize| tokens.div_ceil((blocks / slices).max(1));
    // A chunk repeats the K − 1 tokens before it: keep that to a tenth while every multiprocessor has work.
    let long = (10 * (s.taps - 1)).min(chunks(limits.multiprocessors));
    forced.chunk.unwrap_or(chunks(loaded.wave).max(long)).max(1)
}

#[cfg(test)]
mod tests;
