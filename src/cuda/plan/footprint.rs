//! A plan of a kernel, and its footprint: registers, shared memory, blocks per multiprocessor.

use super::limits::{Limits, RESERVED};
use super::overrides::Residency;
use crate::cuda::kernel::{Compress, Kernel, Specialisation};

/// The rest of a kernel's macros, and the dynamic shared memory it is launched with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plan {
    /// blocks that share a token, a slice of its features each
    pub cluster: usize,
    pub threads: usize,
    pub features: usize,
    pub align: usize,
    pub hold: bool,
    pub window: Residency,
    pub sums: Residency,
    /// depth of the cp.async pipeline (0 = none): tokens staged in shared memory
    pub stages: usize,
    /// blocks wanted per multiprocessor
    pub blocks: usize,
    pub shared: usize,
}

/// Static shared memory that the compiler accepts.
pub(super) const MOST_STATIC: usize = 48 << 10;
/// Bytes of the counters for the numbers that blocks of a cluster send each other.
const COUNTS: usize = 16;
/// Numbers that a window or sums may take from the registers of one thread.
pub(super) const FEW: usize = 24;
/// Threads of a multiprocessor that keep memory busy; beyond that registers are worth more.
const ENOUGH_THREADS: usize = 1024;

impl Plan {
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
        if self.window == Residency::Global { blocks * self.slices(s) * window_bytes(s, width) } else { 0 }
    }

    /// Blocks that share a chunk of tokens, a slice of the features each.
    pub fn slices(&self, s: &Specialisation) -> usize {
        self.cluster * s.d.div_ceil(self.width(s))
    }

    /// Blocks that run on the device at once, unless clusters do not find room side by side.
    pub fn wave(&self, limits: &Limits) -> usize {
        limits.multiprocessors * self.blocks
    }

    /// Features of a block, or of a whole cluster if `s` is that of the cluster.
    fn width(&self, s: &Specialisation) -> usize {
        if s.kernel == Kernel::Parameters { self.threads * self.features } else { s.d }
    }
}

pub(super) fn plain(s: &Specialisation) -> Plan {
    Plan {
        cluster: 1,
        threads: 32,
        features: 1,
        align: if s.aligned { 16 } else { 2 },
        hold: true,
        window: Residency::Registers,
        sums: Residency::Registers,
        stages: 0,
        blocks: 1,
        shared: 0,
    }
}

/// A packet is 16 bytes of the state, and at least 4 of the direction, if these divide d.
pub(super) fn features(s: &Specialisation) -> usize {
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
pub(super) fn blocks(s: &Specialisation, plan: &Plan, limits: &Limits) -> usize {
    let most = (limits.shared_per_multiprocessor / shared_in_all(s, plan))
        .min(limits.threads_per_multiprocessor.min(ENOUGH_THREADS) / plan.threads)
        .clamp(1, 32);
    let needed = registers(s, plan);
    (1..=most).rev().find(|blocks| needed <= most_registers(limits, blocks * plan.threads)).unwrap_or(1)
}

/// Registers that a thread can have when so many threads share a multiprocessor: each of its four parts
/// deals them out to its warps, eight at a time.
pub(super) fn most_registers(limits: &Limits, threads: usize) -> usize {
    let warps = threads.div_ceil(32).div_ceil(4);
    (limits.registers_per_multiprocessor / 4 / 32 / warps / 8 * 8).min(255)
}

/// Registers that a thread needs, at the least: fitted to the fewest with which code for sm_90 does not
/// spill. If it still spills, `compile::build` relaxes the plan.
fn registers(s: &Specialisation, plan: &Plan) -> usize {
    let rows = (plan.width(s) / plan.features).div_ceil(plan.threads);
    let elements = plan.features * s.m;
    let held_rows = if plan.hold { rows } else { 1 };
    let packet = if s.kernel == Kernel::Backward { 4 * elements } else { 3 * elements / 2 };
    let held = held_rows * (packet + plan.features);
    let window = if plan.window == Residency::Registers { rows * plan.features * (s.taps - 1) } else { 0 };
    let has_sums = s.kernel != Kernel::Forward;
    let sums =
        if has_sums && plan.sums == Residency::Registers { rows * plan.features * s.slots() } else { 0 };
    16 + (2 * s.m + held + window + sums) * s.real().size() / 4
}

/// Bytes of its multiprocessor's shared memory that a block takes.
pub(super) fn shared_in_all(s: &Specialisation, plan: &Plan) -> usize {
    plan.shared + static_shared(s, plan.cluster * plan.threads) + RESERVED
}

/// Bytes of the two buffers for sums over so many threads.
pub(super) fn static_shared(s: &Specialisation, threads: usize) -> usize {
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

/// Bytes of the columns that wait between the passes over a token, if its packets are not held.
pub(super) fn columns(s: &Specialisation, sums: Residency) -> usize {
    let count = match (s.kernel, sums) {
        (Kernel::Backward, Residency::SeparateKernel) => 2, // dh' waits for the sums alone
        (Kernel::Backward, _) => 3,
        _ => 1,
    };
    count * s.d * s.real().size()
}

/// Bytes of one token's rows, each in slots of 16.
fn stage(s: &Specialisation) -> usize {
    feeds(s).map(|numbers| (s.d * numbers).next_multiple_of(16)).sum()
}

/// Bytes per feature of each of a token's inputs.
pub(super) fn feeds(s: &Specialisation) -> impl Iterator<Item = usize> {
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
pub(super) fn shared(s: &Specialisation, plan: &Plan) -> usize {
    let width = plan.width(s);
    let window = if plan.window == Residency::Shared { window_bytes(s, width) } else { 0 };
    let columns = if plan.hold { 0 } else { columns(s, plan.sums) };
    let sums = if plan.sums == Residency::Shared { s.slots() * width * s.real().size() } else { 0 };
    let stages = if plan.stages > 0 { plan.stages * stage(s) } else { 0 };
    stages + window + columns + sums
}
