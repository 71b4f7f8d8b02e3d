//! A plan: its macros, and the blocks and chunks of tokens that it makes of a call.

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

    /// Bytes of the windows in global memory, for so many blocks: a vector for each tap.
    pub fn scratch(&self, s: &RewriteRead, blocks: usize) -> usize {
        let window = s.taps * self.width(s) * s.real().size();
        if self.window == Residency::Global { blocks * self.slices(s) * window } else { 0 }
    }

    /// Blocks that share a chunk of tokens, a slice of the features each.
    pub fn slices(&self, s: &RewriteRead) -> usize {
        s.d.div_ceil(self.width(s))
    }

    /// Blocks that are planned to run on the device at once.
    pub fn wave(&self, limits: &Limits) -> usize {
        limits.multiprocessors * self.blocks
    }

    /// Tokens that a block walks, so that each of the `wave` blocks that run at once has one chunk.
    pub fn chunk(&self, s: &RewriteRead, wave: usize, limits: &Limits, tokens: usize) -> usize {
        let chunks = |blocks: usize| tokens.div_ceil((blocks / self.slices(s)).max(1));
        // A chunk repeats the K − 1 tokens before it: keep that to a tenth while every multiprocessor has work.
        let long = (10 * (s.taps - 1)).min(chunks(limits.multiprocessors));
        chunks(wave).max(long).max(1)
    }

    /// Features of a block.
    pub(super) fn width(&self, s: &RewriteRead) -> usize {
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
