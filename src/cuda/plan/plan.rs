//! A plan.

use super::limits::Limits;
use super::overrides::Choice;
use super::residency::Residency;
use crate::cuda::kernel::{Kernel, Specialisation};

/// The rest of a kernel's macros, and the dynamic shared memory it is launched with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plan {
    /// blocks that share a token, a slice of its features each
    pub cluster: usize,
    pub threads: usize,
    /// features per packet
    pub features: usize,
    pub align: usize,
    /// whether a thread keeps its packets in registers between the passes over a token, or re-reads them
    pub keep_in_registers: bool,
    pub window: Residency,
    pub sums: Residency,
    /// depth of the cp.async pipeline (0 = none): tokens staged in shared memory
    pub stages: usize,
    /// what a forward without a stage loads ahead within its second sum: 0 nothing (X and k right before it), 1 X and k,
    /// 2 β and v, too
    pub load_ahead: usize,
    /// blocks wanted per multiprocessor
    pub blocks: usize,
    /// dynamic shared memory in bytes
    pub shared: usize,
}

impl Plan {
    /// One warp that keeps everything in registers: the candidates differ from it in what their kernel can choose.
    pub(super) fn plain(s: &Specialisation) -> Plan {
        Plan {
            cluster: 1,
            threads: 32,
            features: 1,
            align: if s.aligned { 16 } else { 2 },
            keep_in_registers: true,
            window: Residency::Registers,
            sums: Residency::Registers,
            stages: 0,
            load_ahead: 0,
            blocks: 1,
            shared: 0,
        }
    }

    /// The plan with one choice made.
    pub(super) fn with(mut self, choice: Choice, value: usize) -> Plan {
        match choice {
            Choice::Cluster => self.cluster = value,
            Choice::Threads => self.threads = value,
            Choice::Features => self.features = value,
            Choice::KeepInRegisters => self.keep_in_registers = value != 0,
            Choice::Window => self.window = Residency::ALL[value],
            Choice::Sums | Choice::SeparateSums => self.sums = Residency::ALL[value],
            Choice::Stages => self.stages = value,
            Choice::LoadAhead => self.load_ahead = value,
            Choice::Blocks => self.blocks = value,
            Choice::Chunk => {} // no part of a plan
        }
        self
    }

    /// Bytes of the window in global memory, for so many blocks.
    pub fn scratch(&self, s: &Specialisation, blocks: usize) -> usize {
        if self.window == Residency::Global { blocks * self.slices(s) * self.window_bytes(s) } else { 0 }
    }

    /// Blocks that share a chunk of tokens, a slice of the features each.
    pub fn slices(&self, s: &Specialisation) -> usize {
        s.d.div_ceil(self.width(s))
    }

    /// Blocks that are planned to run on the device at once.
    pub fn wave(&self, limits: &Limits) -> usize {
        limits.multiprocessors * self.blocks
    }

    /// Features of a block.
    pub(super) fn width(&self, s: &Specialisation) -> usize {
        match s.kernel {
            Kernel::Forward | Kernel::Backward => s.d / self.cluster,
            _ => self.threads * self.features,
        }
    }

    /// Packets of a thread.
    pub(super) fn rows(&self, s: &Specialisation) -> usize {
        (self.width(s) / self.features).div_ceil(self.threads)
    }

    /// Bytes of a block's window, which keeps a row of its features for each tap.
    pub(super) fn window_bytes(&self, s: &Specialisation) -> usize {
        s.taps * self.width(s) * s.real().size()
    }

    /// Whether a call launches the same kernels with both plans: sums in a kernel of their own need that kernel,
    /// and a re-read weight of an expansion needs a copy with the taps outermost.
    pub(super) fn launches_like(&self, other: &Plan, s: &Specialisation) -> bool {
        let separate = |plan: &Plan| plan.sums == Residency::SeparateKernel;
        let weight = |plan: &Plan| s.kernel.expands() && plan.keep_in_registers;
        separate(self) == separate(other) && weight(self) == weight(other)
    }
}
