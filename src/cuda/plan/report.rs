//! Lines for a log: the candidates that a plan was chosen from, and why the others were not.

use super::limits::Limits;
use super::overrides::Overrides;
use super::plan::Plan;
use super::planner::{Candidate, judged};
use crate::cuda::kernel::Specialisation;

/// Candidates of each kind that are shown.
const SHOWN: usize = 3;

/// The first candidates by cost that differ in more than their blocks and loads ahead, and the cheapest of those that
/// would have come before them but do not fit.
pub fn report(s: &Specialisation, limits: &Limits, overrides: &Overrides) -> Vec<String> {
    let mut all: Vec<Candidate> = judged(s, limits, overrides).collect();
    all.sort_by_key(|candidate| candidate.clocks);
    let mut first: Vec<&Candidate> = Vec::new();
    for candidate in all.iter().filter(|candidate| candidate.fits.is_ok()) {
        let differs = |other: &&Candidate| {
            let Plan { blocks, load_ahead, .. } = other.plan;
            Plan { blocks, load_ahead, ..candidate.plan } != other.plan
        };
        if first.len() < SHOWN && first.iter().all(differs) {
            first.push(candidate);
        }
    }
    let Some(taken) = first.first().filter(|_| all.len() > 1) else { return Vec::new() };
    let mut lines =
        vec![format!("{} candidates for {}, d = {}, m = {}:", all.len(), s.kernel.name(), s.d, s.m)];
    lines.extend(first.iter().enumerate().map(|(index, Candidate { plan, footprint, clocks, .. })| {
        let (number, shared) = (index + 1, footprint.shared().div_ceil(1024));
        let needs = format!("about {} registers, {shared} KiB of shared memory", footprint.registers);
        format!("  {number}. {}: {needs}; {clocks} clocks a token", choices(plan))
    }));
    let cheaper = all.iter().take_while(|candidate| candidate.clocks < taken.clocks);
    let refused = cheaper.filter_map(|candidate| Some((candidate.plan, candidate.fits.as_ref().err()?)));
    lines.extend(refused.take(SHOWN).map(|(plan, reason)| format!("  not {}: {reason}", choices(&plan))));
    lines
}

fn choices(plan: &Plan) -> String {
    let words = plan.defines().into_iter().filter(|(name, _)| *name != "ALIGN");
    words.map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
}
