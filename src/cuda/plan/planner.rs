//! The planner: the plan that was timed to be the fastest, else the first candidate of the rule that fits, and the next
//! one if its kernel spills registers.

use super::candidates::candidates;
use super::expand;
use super::footprint::{exceeds, registers, shared};
use super::limits::Limits;
use super::measured::measured;
use super::overrides::Overrides;
use super::plan::{Plan, Residency};
use crate::cuda::kernel::Specialisation;
use crate::error::{Error, Result};

impl Plan {
    /// Fails for overrides that leave no plan, and for so many value channels that no block could add up its sums.
    pub fn new(s: impl Into<Specialisation>, limits: &Limits, overrides: &Overrides) -> Result<Plan> {
        let s = s.into();
        let timed = measured(&s, limits, overrides);
        let by_rule = || fitting(&s, limits, overrides).next();
        timed.or_else(by_rule).ok_or_else(|| refusal(&s, limits, overrides))
    }

    /// The next plan to try if this one's kernel spills registers: the next of the rule that leaves a thread more of
    /// them. Whether the sums have a kernel of their own may not change: warm-up decides that before it compiles any kernel.
    pub fn after_spill(&self, s: impl Into<Specialisation>, limits: &Limits) -> Option<Plan> {
        let s = s.into();
        let separate = |plan: &Plan| plan.sums == Residency::SeparateKernel;
        let most = |plan: &Plan| limits.most_registers(plan.blocks * plan.threads);
        let needed = |plan: &Plan| match &s {
            Specialisation::RewriteRead(s) => registers(s, plan) + plan.load_ahead, // which takes a few
            Specialisation::Expand(_) => plan.features, // which have their registers each
        };
        fitting(&s, limits, &Overrides::default()).find(|plan| {
            separate(plan) == separate(self) && most(plan) + needed(self) > most(self) + needed(plan)
        })
    }
}

/// The candidates that a device has room for, the best first.
fn fitting(s: &Specialisation, limits: &Limits, overrides: &Overrides) -> impl Iterator<Item = Plan> {
    let all = match s {
        Specialisation::RewriteRead(s) => candidates(s, limits, overrides),
        Specialisation::Expand(s) => expand::candidates(s, overrides),
    };
    let fits =
        |plan: &Plan| !matches!(s, Specialisation::RewriteRead(s) if exceeds(s, plan, limits).is_some());
    all.into_iter().filter(move |plan| fits(plan))
}

/// Why no candidate is left: the override at fault, if one alone is, and what the candidate with the least shared memory
/// needs.
fn refusal(s: &Specialisation, limits: &Limits, overrides: &Overrides) -> Error {
    let parsed = |words: &str| Overrides::parse(words).unwrap_or_default();
    let none_left = |words: &str| fitting(s, limits, &parsed(words)).next().is_none();
    let all = overrides.without("CHUNK").words();
    let words = all.split(' ').find(|word| none_left(word)).unwrap_or(&all);
    let (d, m, reason) = match s {
        Specialisation::Expand(s) => (s.d, s.m, None),
        Specialisation::RewriteRead(s) => {
            let plans = candidates(s, limits, &parsed(words)).into_iter();
            let closest = plans.min_by_key(|plan| plan.blocks * shared(s, plan));
            (s.d, s.m, closest.and_then(|plan| exceeds(s, &plan, limits)))
        }
    };
    if none_left("") {
        let fewer = "`state` must have fewer value channels to be worked on by a GPU, got";
        return Error::Argument(format!("{fewer} {m}: move it to the CPU"));
    }
    let reason = match reason {
        Some(reason) => format!("with d = {d} and m = {m} it {reason}"),
        None => format!("the kernel cannot run so with d = {d} and m = {m}"),
    };
    let kernel = s.kernel().name();
    Error::Argument(format!("`DDL_PLAN` has {words}, which leaves no plan for `{kernel}`: {reason}"))
}
