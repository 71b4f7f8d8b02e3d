//! The planner: the cheapest candidate that fits, and the next one if its kernel spills registers.

use std::cmp::Reverse;

use super::Plan;
use super::candidates::candidates;
use super::cost::Cost;
use super::fits::{Reason, fits};
use super::footprint::Footprint;
use super::limits::Limits;
use super::overrides::Overrides;
use crate::cuda::kernel::Specialisation;
use crate::error::{Error, Result};

/// A plan, and all that decides whether it is taken.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    pub plan: Plan,
    pub footprint: Footprint,
    pub cost: Cost,
    pub fits: std::result::Result<(), Reason>,
}

impl Candidate {
    fn new(s: &Specialisation, plan: Plan, limits: &Limits) -> Candidate {
        let footprint = Footprint::new(s, &plan);
        let cost = Cost::new(s, &plan, &footprint, limits);
        Candidate { plan, footprint, cost, fits: fits(&plan, &footprint, limits) }
    }

    /// Registers that a thread can have beyond those that it needs. Loads ahead take a few, as the compiler likes.
    fn spare_registers(&self, limits: &Limits) -> (isize, Reverse<usize>) {
        let most = limits.most_registers(self.plan.blocks * self.plan.threads);
        (most as isize - self.footprint.registers as isize, Reverse(self.plan.load_ahead))
    }
}

/// Every candidate with its footprint and its cost.
pub(super) fn judged(
    s: &Specialisation,
    limits: &Limits,
    overrides: &Overrides,
) -> impl Iterator<Item = Candidate> {
    candidates(s, limits, overrides).into_iter().map(|plan| Candidate::new(s, plan, limits))
}

impl Plan {
    /// Fails for overrides that leave no plan, and for so many value channels that no block could add up its sums.
    pub fn new(s: &Specialisation, limits: &Limits, overrides: &Overrides) -> Result<Plan> {
        let fitting = judged(s, limits, overrides).filter(|candidate| candidate.fits.is_ok());
        let cheapest = fitting.min_by_key(|candidate| candidate.cost).map(|candidate| candidate.plan);
        cheapest.ok_or_else(|| refusal(s, limits, overrides))
    }

    /// The next plan to try if this one's kernel spills registers: the next by cost that leaves a thread more of them.
    /// Warm-up decides which kernels are needed before compiling any, so the next plan launches the same ones.
    pub fn after_spill(&self, s: &Specialisation, limits: &Limits) -> Option<Plan> {
        let spilled = Candidate::new(s, *self, limits).spare_registers(limits);
        let free = Overrides::default();
        let others = judged(s, limits, &free)
            .filter(|other| other.fits.is_ok() && other.plan.launches_like(self, s))
            .filter(|other| other.spare_registers(limits) > spilled);
        others.min_by_key(|other| other.cost).map(|other| other.plan)
    }
}

/// Why no candidate is left: the override at fault, if one alone is.
fn refusal(s: &Specialisation, limits: &Limits, overrides: &Overrides) -> Error {
    let none_left =
        |overrides: &Overrides| judged(s, limits, overrides).all(|candidate| candidate.fits.is_err());
    if none_left(&Overrides::default()) {
        return Error::Argument(format!(
            "`state` must have fewer value channels to be worked on by a GPU, got {}: move it to the CPU",
            s.m
        ));
    }
    let alone = overrides.each().into_iter().find(|(_, alone)| none_left(alone));
    let words: Vec<String> = overrides.each().into_iter().map(|(word, _)| word).collect();
    let (words, overrides) = alone.unwrap_or_else(|| (words.join(" "), *overrides));
    let shared = |candidate: &Candidate| candidate.plan.blocks * candidate.footprint.shared();
    let closest = judged(s, limits, &overrides).min_by_key(shared);
    let reason = closest.and_then(|candidate| candidate.fits.err()).map_or_else(
        || format!("the kernel cannot run so with d = {} and m = {}", s.d, s.m),
        |reason| format!("with d = {} and m = {} it {reason}", s.d, s.m),
    );
    Error::Argument(format!(
        "`DDL_PLAN` has {words}, which leaves no plan for `{}`: {reason}",
        s.kernel.name()
    ))
}
