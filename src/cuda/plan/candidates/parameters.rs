//! The candidates of `parameters_bwd`, which does nothing but sum the parameters' gradients. No sum runs over the
//! features, so every thread has one packet.

use super::super::Plan;
use super::super::overrides::Overrides;
use super::super::residency::Residency;
use super::choices::{blocks, packet, packets_up_to, values, worth};
use super::rewrite_read::FEW;
use crate::cuda::kernel::{Compress, Specialisation};

/// Most accumulators per thread.
const MOST_SUMS: usize = 96;

pub fn candidates(s: &Specialisation, overrides: &Overrides) -> Vec<Plan> {
    let plans = packets_up_to(packet(s, s.d), s, overrides).into_iter();
    plans
        .flat_map(|plan| threads(plan, overrides))
        .flat_map(|plan| residencies(s, plan, overrides))
        .flat_map(|plan| blocks(plan, overrides))
        .collect()
}

fn threads(plan: Plan, overrides: &Overrides) -> Vec<Plan> {
    let threads = values(overrides.threads, [128, 64, 32], |_| true);
    threads.into_iter().map(|threads| Plan { threads, ..plan }).collect()
}

fn residencies(s: &Specialisation, plan: Plan, overrides: &Overrides) -> Vec<Plan> {
    use Residency::{Global, Registers, Shared};
    let usual = |per_feature: usize, most: usize| {
        let few = plan.features * per_feature * s.real().size() / 4 <= most;
        worth([(Registers, few), (Shared, true), (Global, true)])
    };
    let windows = match s.compress {
        Compress::Token => values(overrides.window, usual(s.taps, FEW), |_| true),
        _ => vec![Registers],
    };
    let sums = values(overrides.separate_sums, usual(s.slots(), MOST_SUMS), |_| true);
    let with = |&window: &Residency| sums.iter().map(move |&sums| Plan { window, sums, ..plan });
    windows.iter().flat_map(with).collect()
}
