//! The cost of a plan: terms in the order of their weight, compared one after the other.

use std::cmp::Reverse;

use super::Plan;
use super::footprint::Footprint;
use super::limits::Limits;
use crate::cuda::kernel::{Kernel, Specialisation};

/// Clocks that a warp takes for each token whatever it has of it: sums over the block, scalars, addresses.
const CLOCKS_OF_A_WARP: usize = 250;
/// Bytes that a multiprocessor's shared memory moves per clock.
const SHARED_PER_CLOCK: usize = 128;
/// Threads that keep memory busy if packets are re-read.
const ENOUGH_THREADS: usize = 512;
/// Threads of a block of `parameters_bwd`.
const THREADS_OF_PARAMETERS: usize = 128;

/// The lower, the better: the first term that differs decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cost {
    /// Registers that a thread needs but cannot have: the compiler moves them to memory.
    pub spilled: usize,
    /// Bytes of a token that come from device memory a second time. Kernels wait for device memory above all.
    pub memory: usize,
    /// Bytes of a token that come from L2 or go there: re-read packets, a window, sums.
    pub l2: usize,
    /// Re-read packets cost instructions, and shared memory for the columns that wait for them.
    pub re_reads: bool,
    /// A multiprocessor has nothing to do while a block waits for memory, or for the sums of its cluster.
    pub idles: bool,
    /// Bytes of the parameters that come from L2 with every token, because the first-level cache cannot keep them.
    pub parameters: usize,
    /// Blocks that wait for each other's sums.
    pub cluster: usize,
    /// Threads that are missing to keep memory busy.
    pub missing_threads: usize,
    /// Each warp has a fixed price for a token, and shared memory has a width.
    pub clocks: usize,
    /// Blocks that are missing, so that others load while one waits.
    pub missing_blocks: usize,
    /// Stages that are missing, so that a block loads ahead by itself.
    pub missing_stages: usize,
    /// Stages take from the first-level cache.
    pub stages: usize,
    /// More blocks hide more latency.
    pub blocks: Reverse<usize>,
    /// Loads within a sum do not share the waits of other loads.
    pub load_ahead: Reverse<usize>,
}

impl Cost {
    pub fn new(s: &Specialisation, plan: &Plan, footprint: &Footprint, limits: &Limits) -> Cost {
        let enough = enough_blocks(s, plan);
        let cache = limits.cache_beside(plan.blocks * footprint.shared());
        // Threads beyond the packets do nothing.
        let threads = (plan.slices(s) * plan.threads).min(s.d / plan.features);
        Cost {
            spilled: footprint.registers.saturating_sub(limits.most_registers(plan.blocks * plan.threads)),
            memory: footprint.moved.memory,
            l2: footprint.moved.l2,
            re_reads: !plan.keep_in_registers,
            idles: idles(plan, footprint, limits, enough),
            parameters: if footprint.parameters > cache { footprint.parameters } else { 0 },
            cluster: plan.cluster,
            missing_threads: enough_threads(s, plan).saturating_sub(plan.threads),
            clocks: threads * CLOCKS_OF_A_WARP / 32 + footprint.moved.shared / SHARED_PER_CLOCK,
            missing_blocks: enough.saturating_sub(plan.blocks),
            missing_stages: enough_stages(plan, enough).saturating_sub(plan.stages),
            stages: plan.stages,
            blocks: Reverse(plan.blocks),
            load_ahead: Reverse(plan.load_ahead),
        }
    }

    /// Every term with its name, in their order.
    pub fn terms(&self) -> [(&'static str, usize); 14] {
        [
            ("registers spilled", self.spilled),
            ("bytes from device memory again", self.memory),
            ("bytes from L2 again", self.l2),
            ("re-reads packets", usize::from(self.re_reads)),
            ("idles", usize::from(self.idles)),
            ("bytes of parameters from L2", self.parameters),
            ("blocks in a cluster", self.cluster),
            ("threads missing", self.missing_threads),
            ("clocks", self.clocks),
            ("blocks missing", self.missing_blocks),
            ("stages missing", self.missing_stages),
            ("stages", self.stages),
            ("blocks per multiprocessor", self.blocks.0),
            ("loads ahead within a sum", self.load_ahead.0),
        ]
    }
}

/// Blocks that keep memory busy by themselves, one loading while others wait. A forward that keeps its packets asks for
/// the next token's before it is done with this one. In other kernels no block waits for a sum.
fn enough_blocks(s: &Specialisation, plan: &Plan) -> usize {
    match s.kernel {
        Kernel::Backward if plan.keep_in_registers => 3,
        Kernel::Forward | Kernel::Backward => 2,
        _ => 0,
    }
}

/// If packets are re-read, one stage is filled while the other is read a second time.
fn enough_stages(plan: &Plan, enough_blocks: usize) -> usize {
    if plan.keep_in_registers { usize::from(plan.blocks < enough_blocks) } else { 2 }
}

fn enough_threads(s: &Specialisation, plan: &Plan) -> usize {
    match s.kernel {
        Kernel::Forward | Kernel::Backward if !plan.keep_in_registers && plan.blocks == 1 => ENOUGH_THREADS,
        Kernel::Parameters => THREADS_OF_PARAMETERS,
        _ => 0,
    }
}

/// Whether too few blocks load nothing ahead; or a block is alone although it waits for its cluster, or although
/// registers have room for another one.
fn idles(plan: &Plan, footprint: &Footprint, limits: &Limits, enough_blocks: usize) -> bool {
    let has_room = footprint.registers <= limits.most_registers(2 * plan.threads);
    let alone = plan.blocks == 1 && (plan.cluster > 1 || has_room);
    let loads_ahead = plan.stages > 0 || plan.blocks >= enough_blocks;
    enough_blocks > 0 && (alone || !loads_ahead)
}
