//! The planner: the cheapest candidate that fits, and the next one if its kernel spills registers.

use std::cmp::Reverse;

use super::candidates::candidates;
use super::cost::clocks;
use super::fits::fits;
use super::footprint::Footprint;
use super::limits::Limits;
use super::overrides::Overrides;
use super::plan::Plan;
use crate::cuda::kernel::Specialisation;
use crate::error::{Error, Result};

/// A plan, and all that decides whether it is taken.
pub struct Candidate {
    pub plan: Plan,
    pub footprint: Footprint,
    /// of a multiprocessor for each token
    pub clocks: usize,
    pub fits: std::result::Result<(), String>,
}

impl Candidate {
    fn new(s: &Specialisation, plan: Plan, limits: &Limits) -> Candidate {
        let footprint = Footprint::new(s, &plan);
        let clocks = clocks(s, &plan, &footprint, limits);
        Candidate { plan, footprint, clocks, fits: fits(&plan, &footprint, limits) }
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
) -> impl Iterator<Item = Candidate> + use<> {
    let (s, limits) = (*s, *limits);
    candidates(&s, &limits, overrides).into_iter().map(move |plan| Candidate::new(&s, plan, &limits))
}

impl Plan {
    /// Fails for overrides that leave no plan, and for so many value channels that no block could add up its sums.
    pub fn new(s: &Specialisation, limits: &Limits, overrides: &Overrides) -> Result<Plan> {
        let fitting = judged(s, limits, overrides).filter(|candidate| candidate.fits.is_ok());
        let cheapest = fitting.min_by_key(|candidate| candidate.clocks).map(|candidate| candidate.plan);
        cheapest.ok_or_else(|| refusal(s, limits, overrides))
    }

    /// The next plan to try if this one's kernel spills registers: the next by cost that leaves a thread more of them.
    /// Warm-up decides which kernels are needed before compiling any, so the next plan launches the same ones.
    pub fn after_spill(&self, s: &Specialisation, limits: &Limits) -> Option<Plan> {
        let spilled = Candidate::new(s, *self, limits).spare_registers(limits);
        let others = judged(s, limits, &Overrides::default())
            .filter(|other| other.fits.is_ok() && other.plan.launches_like(self, s))
            .filter(|other| other.spare_registers(limits) > spilled);
        others.min_by_key(|other| other.clocks).map(|other| other.plan)
    }
}

/// Why no candidate is left: the override at fault, if one alone is.
fn refusal(s: &Specialisation, limits: &Limits, overrides: &Overrides) -> Error {
    let (d, m) = (s.d, s.m);
    let none_left =
        |overrides: &Overrides| judged(s, limits, overrides).all(|candidate| candidate.fits.is_err());
    if none_left(&Overrides::default()) {
        return Error::Argument(format!(
            "`state` must have fewer value channels to be worked on by a GPU, got {m}: move it to the CPU"
        ));
    }
    let each = overrides.each();
    let all = || (each.iter().map(|(word, _)| word.as_str()).collect::<Vec<_>>().join(" "), *overrides);
    let (words, overrides) = each.iter().find(|(_, alone)| none_left(alone)).cloned().unwrap_or_else(all);
    let closest = judged(s, limits, &overrides)
        .min_by_key(|candidate| candidate.plan.blocks * candidate.footprint.shared());
    let reason = match closest.and_then(|candidate| candidate.fits.err()) {
        Some(reason) => format!("with d = {d} and m = {m} it {reason}"),
        None => format!("the kernel cannot run so with d = {d} and m = {m}"),
    };
    let kernel = s.kernel.name();
    Error::Argument(format!("`DDL_PLAN` has {words}, which leaves no plan for `{kernel}`: {reason}"))
}
