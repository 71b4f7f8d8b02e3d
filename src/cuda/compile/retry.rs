//! The retry after a spill: a plan whose kernel spills registers is followed by the next one of the planner's rule.

use std::time::Instant;

use super::compiler::{Built, build_as_planned};
use super::nvrtc::Target;
use crate::cuda::kernel::Specialisation;
use crate::cuda::plan::{Limits, Overrides, Plan};
use crate::environment;
use crate::error::Result;

/// Builds a kernel as planned. If that spills registers, tries the plans that follow and keeps the one that spills
/// least. A plan with choices made by hand is built as it is.
pub fn build(
    specialisation: &Specialisation,
    plan: Plan,
    limits: &Limits,
    overrides: &Overrides,
    target: Target,
) -> Result<Built> {
    let start = Instant::now();
    let mut best = build_as_planned(specialisation, plan, target)?;
    let mut cached = best.cached;
    let mut plan = plan;
    while best.binary.spilled > 0 && *overrides == Overrides::default() {
        let Some(next) = plan.after_spill(*specialisation, limits) else { break };
        plan = next;
        let next = build_as_planned(specialisation, plan, target)?;
        cached &= next.cached;
        if next.binary.spilled < best.binary.spilled {
            best = next;
        }
    }
    let built = Built { seconds: start.elapsed().as_secs_f64(), cached, ..best };
    if environment::kernels::logs_kernels() {
        built.log();
    }
    Ok(built)
}
