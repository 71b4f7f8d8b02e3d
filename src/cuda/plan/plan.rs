//! A plan: its macros, and how it divides a token among blocks, threads and packets.

use super::limits::Limits;
use crate::cuda::kernel::{Kernel, RewriteRead};

/// Where the numbers live that a thread keeps; numbered as WINDOW and SUMS in common.cuh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Residency {
    #[default]
    Registers = 0,
    Shared = 1,
    Global = 2,
    /// in a kernel of their own
    SeparateKernel = 3,
}

impl Residency {
    /// In the order of their numbers.
    pub const ALL: [Self; 4] = [Self::Registers, Self::Shared, Self::Global, Self::SeparateKernel];
}

/// The rest of a kernel's macros, and the dynamic shared memory it is launched with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
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
    /// when a forward loads the next token into registers (LOAD_AHEAD in kernels/README.md)
    pub load_ahead: usize,
    /// neighbouring tokens that a forward works on at once; 0 if on one token after the other
    pub tile: usize,
    /// blocks wanted per multiprocessor
    pub blocks: usize,
    /// dynamic shared memory in bytes
    pub shared: usize,
}

impl Plan {
    /// The plan that a kernel's choices change.
    pub(super) fn first(aligned: bool) -> Plan {
        let one = Plan { cluster: 1, threads: 256, features: 1, blocks: 1, ..Plan::default() };
        Plan { align: if aligned { 16 } else { 2 }, keep_in_registers: true, ..one }
    }

    /// The macros that the plan decides.
    pub fn defines(&self) -> [(&'static str, String); 11] {
        [
            ("CLUSTER", self.cluster),
            ("THREADS", self.threads),
            ("FEATURES", self.features),
            ("ALIGN", self.align),
            ("KEEP_IN_REGISTERS", self.keep_in_registers.into()),
            ("WINDOW", self.window as usize),
            ("SUMS", self.sums as usize),
            ("STAGES", self.stages),
            ("LOAD_AHEAD", self.load_ahead),
            ("TILE", self.tile),
            ("BLOCKS", self.blocks),
        ]
        .map(|(name, value)| (name, value.to_string()))
    }

    /// Blocks that share a chunk of tokens, a slice of the features each.
    pub fn slices(&self, s: &RewriteRead) -> usize {
        s.d.div_ceil(self.width(s))
    }

    /// Blocks that are planned to run on the device at once.
    pub fn wave(&self, limits: &Limits) -> usize {
        limits.multiprocessors * self.blocks
    }

    /// Features of a block.
    pub fn width(&self, s: &RewriteRead) -> usize {
        match s.kernel {
            Kernel::Forward | Kernel::Backward => s.d / self.cluster,
            _ => self.threads * self.features,
        }
    }

    /// Packets of a thread.
    pub(super) fn rows(&self, s: &RewriteRead) -> usize {
        (self.width(s) / self.features).div_ceil(self.threads)
    }
}
