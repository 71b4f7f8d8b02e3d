//! The plan of an expansion: how long a packet is, and whether its weight stays in registers. The grid fills the
//! multiprocessors with threads whatever a block has, so shorter packets only add instructions.

use super::candidates::{THREADS_APART, packets, usual_packet};
use super::limits::Limits;
use super::overrides::{Overrides, no_plan};
use super::plan::Plan;
use crate::cuda::kernel::{Expand, Kernel};
use crate::error::Result;

/// Registers of a thread for its packet's weight.
const MOST_OF_A_WEIGHT: usize = 168;
/// Tokens of a chunk of the backward: keeps a block's sums small beside its tokens.
const CHUNK: usize = 64;
/// Blocks that a grid may have along its second axis.
const MOST_GRID_BLOCKS: usize = 65_535;

/// Fails for packets that do not divide the features.
pub(super) fn plan(s: &Expand, limits: &Limits, overrides: &Overrides) -> Result<Plan> {
    candidates(s, limits, overrides).into_iter().next().ok_or_else(|| {
        let words = overrides.get("FEATURES").map(|features| format!("FEATURES={features}"));
        let reason = format!("the kernel cannot run so with d = {} and m = {}", s.d, s.m);
        no_plan(&words.unwrap_or_default(), s.kernel.name(), &reason)
    })
}

/// The next plan to try if a plan's kernel spills registers.
pub(super) fn after_spill(plan: &Plan, s: &Expand, limits: &Limits) -> Option<Plan> {
    let plans = candidates(s, limits, &Overrides::default());
    plans.into_iter().find(|shorter| shorter.features < plan.features)
}

/// Lines for a log: the first three candidates.
pub(super) fn report(s: &Expand, limits: &Limits, overrides: &Overrides) -> Vec<String> {
    let all = candidates(s, limits, overrides);
    let mut lines =
        vec![format!("{} candidates for {}, d = {}, m = {}:", all.len(), s.kernel.name(), s.d, s.m)];
    lines.extend(all.iter().take(3).zip(1..).map(|(plan, number)| {
        let words = plan.defines().map(|(name, value)| format!("{name}={value}")).join(" ");
        format!("  {number}. {words}: needs about {} registers", registers(s, plan))
    }));
    if all.len() > 1 { lines } else { Vec::new() }
}

/// The candidates, the best first: the longest packets, but those that are known to spill come last.
pub(super) fn candidates(s: &Expand, limits: &Limits, overrides: &Overrides) -> Vec<Plan> {
    let lengths = overrides.get("FEATURES").map_or_else(|| lengths(s), |features| vec![features]);
    let possible = lengths.into_iter().filter(|features| s.d.is_multiple_of(*features));
    let mut plans: Vec<Plan> = possible.map(|features| planned(s, features, overrides)).collect();
    plans.sort_by_key(|plan| registers(s, plan).saturating_sub(limits.most_registers(plan.threads)));
    plans
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

/// Registers that a thread needs, at the least.
fn registers(s: &Expand, plan: &Plan) -> usize {
    let weight = if plan.keep_in_registers { weight_registers(s, plan.features) } else { 0 };
    16 + plan.features * (s.m + 1) + weight
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
