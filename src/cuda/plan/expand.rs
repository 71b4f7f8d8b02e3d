//! The plan of an expansion: how long a packet is, and whether its weight stays in registers. The grid fills the
//! multiprocessors with threads whatever a block has, so shorter packets only add instructions.

use super::candidates::{THREADS_APART, packets, usual_packet};
use super::limits::Limits;
use super::overrides::Overrides;
use super::plan::Plan;
use crate::cuda::kernel::{Expand, Kernel};

/// Registers of a thread for its packet's weight.
const MOST_OF_A_WEIGHT: usize = 168;
/// Tokens of a chunk of the backward: keeps a block's sums small beside its tokens.
const CHUNK: usize = 64;
/// Blocks that a grid may have along its second axis.
const MOST_GRID_BLOCKS: usize = 65_535;

/// The candidates, the best first: the longest packets.
pub(super) fn candidates(s: &Expand, overrides: &Overrides) -> Vec<Plan> {
    let lengths = overrides.get("FEATURES").map_or_else(|| lengths(s), |features| vec![features]);
    let possible = lengths.into_iter().filter(|features| s.d.is_multiple_of(*features));
    possible.map(|features| planned(s, features, overrides)).collect()
}

/// Packets up to the usual length. If only short ones leave room to keep the weight, then these.
fn lengths(s: &Expand) -> Vec<usize> {
    let usual = usual_packet([s.m * s.state.size(), s.x.size()], s.d, 16);
    let kept = |features: usize| weight_registers(s, features) <= MOST_OF_A_WEIGHT;
    packets(usual).into_iter().filter(|&features| kept(features) || !kept(1)).collect()
}

fn planned(s: &Expand, features: usize, overrides: &Overrides) -> Plan {
    let fits = weight_registers(s, features) <= MOST_OF_A_WEIGHT;
    let by_hand = overrides.get("KEEP_IN_REGISTERS").filter(|_| s.weight.is_some());
    let threads = (s.d / features).next_multiple_of(32).min(THREADS_APART);
    Plan {
        cluster: 1,
        threads: overrides.get("THREADS").unwrap_or(threads),
        features,
        align: if s.aligned { 16 } else { 2 },
        keep_in_registers: by_hand.map_or(fits, |keep| keep != 0),
        blocks: 1,
        ..Plan::default()
    }
}

/// Registers for a packet's weight, its sums, and the numbers of as many tokens as it has taps.
fn weight_registers(s: &Expand, features: usize) -> usize {
    let taps = if s.weight.is_some() { s.taps } else { 0 };
    2 * taps * features * (s.m + 1) * s.real().size() / 4
}

impl Plan {
    /// Tokens per chunk of an expansion of so many tokens in all, for `expand_blocks`.
    pub fn expand_chunk(&self, s: &Expand, limits: &Limits, tokens: usize) -> usize {
        let sums = s.kernel == Kernel::ExpandBackward && s.weight.is_some();
        // As many tokens are read twice as there are taps.
        let least = (2 * s.taps).max(if sums { CHUNK } else { 1 });
        tokens.div_ceil(self.expand_blocks(s, limits)).max(least)
    }

    /// Blocks of an expansion's grid down the chunks: a few waves of them at most, so that their sums stay few however
    /// many sequences there are.
    pub fn expand_blocks(&self, s: &Expand, limits: &Limits) -> usize {
        let wave = limits.multiprocessors * (limits.threads_per_multiprocessor / self.threads).max(1);
        wave.div_ceil(self.expand_slices(s)).min(MOST_GRID_BLOCKS)
    }

    /// Blocks of an expansion's grid across the features.
    pub fn expand_slices(&self, s: &Expand) -> usize {
        s.d.div_ceil(self.threads * self.features)
    }
}
