//! How `parameters_bwd` is planned, which does nothing but sum the parameters' gradients.

use super::footprint::{FEW, Plan, blocks, features, plain, shared};
use super::limits::{Limits, RESERVED};
use super::overrides::{Overrides, Residency};
use crate::cuda::kernel::{Compress, Specialisation};

/// Most accumulators per thread in `parameters_bwd`, which does nothing else.
const MOST_SUMS: usize = 96;

/// A thread has one packet. Its sums are the most that it holds: short packets keep them in registers.
pub fn plan(s: &Specialisation, limits: &Limits, overrides: &Overrides) -> Plan {
    let most = MOST_SUMS * 4 / s.real().size();
    let mut plan =
        Plan { threads: 128, features: overrides.features.unwrap_or_else(|| features(s)), ..plain(s) };
    while plan.features.is_multiple_of(2) && plan.features * s.slots() > most && overrides.features.is_none()
    {
        plan.features /= 2;
    }
    plan.threads = overrides.threads.unwrap_or(plan.threads);
    let room = limits.shared_per_block.saturating_sub(RESERVED);
    if plan.features * s.slots() > most {
        plan.sums = Residency::Shared;
    }
    if s.compress == Compress::Token && plan.features * s.taps > FEW * 4 / s.real().size() {
        plan.window = Residency::Shared;
    }
    while shared(s, &plan) > room && plan.threads > 32 && overrides.threads.is_none() {
        plan.threads /= 2;
    }
    if shared(s, &plan) > room {
        plan.sums = Residency::Global;
        plan.threads = overrides.threads.unwrap_or(128);
    }
    if shared(s, &plan) > room {
        plan.window = Residency::Global;
    }
    plan.window = overrides.window.unwrap_or(plan.window);
    plan.sums = overrides.separate_sums.unwrap_or(plan.sums);
    plan.shared = shared(s, &plan);
    plan.blocks = overrides.blocks.unwrap_or_else(|| blocks(s, &plan, limits));
    plan
}
