//! The planner: the plan that was timed to be the fastest, else the cheapest candidate that fits, and the next one if its
//! kernel spills registers.

use std::collections::HashSet;

use super::candidates::candidates;
use super::cost::clocks;
use super::expand;
use super::footprint::{exceeds, registers, shared};
use super::limits::Limits;
use super::overrides::{Overrides, no_plan};
use super::plan::{Plan, Residency};
use super::tile::tiled;
use super::timed::timed;
use crate::cuda::kernel::{RewriteRead, Specialisation};
use crate::error::{Error, Result};

impl Plan {
    /// Fails for overrides that leave no plan, and for so many value channels that no block could add up its sums.
    pub fn new(s: impl Into<Specialisation>, limits: &Limits, overrides: &Overrides) -> Result<Plan> {
        let s = &match s.into() {
            Specialisation::RewriteRead(s) => s,
            Specialisation::Expand(s) => return expand::plan(&s, limits, overrides),
        };
        match tiled(s, limits, overrides) {
            Some(plan) => Ok(plan),
            None => Plan::untiled(s, limits, overrides),
        }
    }

    fn untiled(s: &RewriteRead, limits: &Limits, overrides: &Overrides) -> Result<Plan> {
        if let Some(plan) = timed(s, limits, overrides) {
            return Ok(plan);
        }
        let mut plans = candidates(s, limits, overrides).into_iter();
        plans.find(|plan| exceeds(s, plan, limits).is_none()).ok_or_else(|| refusal(s, limits, overrides))
    }

    /// The next plan to try if this one's kernel spills registers: the next by cost that leaves a thread more of them.
    /// Whether the sums have a kernel of their own may not change: warm-up decides that before it compiles any kernel.
    pub fn after_spill(&self, s: impl Into<Specialisation>, limits: &Limits) -> Option<Plan> {
        let s = &match s.into() {
            Specialisation::RewriteRead(s) => s,
            Specialisation::Expand(s) => return expand::after_spill(self, &s, limits),
        };
        if self.tile > 0 {
            return Plan::untiled(s, limits, &Overrides::default()).ok();
        }
        let separate = |plan: &Plan| plan.sums == Residency::SeparateKernel;
        let most = |plan: &Plan| limits.most_registers(plan.blocks * plan.threads);
        let needed = |plan: &Plan| registers(s, plan) + plan.load_ahead; // loads ahead take a few, as the compiler likes
        candidates(s, limits, &Overrides::default()).into_iter().find(|plan| {
            separate(plan) == separate(self)
                && most(plan) + needed(self) > most(self) + needed(plan)
                && exceeds(s, plan, limits).is_none()
        })
    }
}

/// Why no candidate is left: the override at fault, if one alone is.
fn refusal(s: &RewriteRead, limits: &Limits, overrides: &Overrides) -> Error {
    let (d, m, kernel) = (s.d, s.m, s.kernel.name());
    let plans = |words: &str| candidates(s, limits, &Overrides::parse(words).unwrap_or_default());
    let none_left = |words: &str| plans(words).iter().all(|plan| exceeds(s, plan, limits).is_some());
    if none_left("") {
        return Error::Argument(format!(
            "`state` must have fewer value channels to be worked on by a GPU, got {m}: move it to the CPU"
        ));
    }
    let all = overrides.without("CHUNK").words();
    let words = all.split(' ').find(|word| none_left(word)).unwrap_or(&all);
    let closest = plans(words).into_iter().min_by_key(|plan| plan.blocks * shared(s, plan));
    let reason = match closest.and_then(|plan| exceeds(s, &plan, limits)) {
        Some(reason) => format!("with d = {d} and m = {m} it {reason}"),
        None => format!("the kernel cannot run so with d = {d} and m = {m}"),
    };
    no_plan(words, kernel, &reason)
}

/// Lines for a log: the first three candidates by cost that differ in more than their blocks and loads ahead, and three of
/// those that would have come before them but do not fit.
pub fn report(s: impl Into<Specialisation>, limits: &Limits, overrides: &Overrides) -> Vec<String> {
    let s = &match s.into() {
        Specialisation::RewriteRead(s) => s,
        Specialisation::Expand(s) => return expand::report(&s, limits, overrides),
    };
    let all = candidates(s, limits, overrides);
    let words = |plan: &Plan| plan.defines().map(|(name, value)| format!("{name}={value}")).join(" ");
    let mut kinds = HashSet::new();
    let fitting = all.iter().filter(|plan| exceeds(s, plan, limits).is_none());
    let first = fitting.filter(|plan| kinds.insert(Plan { blocks: 0, load_ahead: 0, ..**plan }));
    let mut lines =
        vec![format!("{} candidates for {}, d = {}, m = {}:", all.len(), s.kernel.name(), s.d, s.m)];
    if let Some(plan) = tiled(s, limits, overrides) {
        lines.push(format!("  in tiles: {}", words(&plan)));
    }
    if let Some(plan) = timed(s, limits, overrides) {
        lines.push(format!("  as timed: {}", words(&plan)));
    }
    lines.extend(first.take(3).zip(1..).map(|(plan, number)| {
        let (words, registers, kib) = (words(plan), registers(s, plan), shared(s, plan).div_ceil(1024));
        let needs = format!("about {registers} registers, {kib} KiB of shared memory");
        format!("  {number}. {words}: {needs}; {} clocks a token", clocks(s, plan, limits))
    }));
    let refused = all.iter().map_while(|plan| Some((plan, exceeds(s, plan, limits)?)));
    lines.extend(refused.take(3).map(|(plan, reason)| format!("  not {}: {reason}", words(plan))));
    if all.len() > 1 { lines } else { Vec::new() }
}
