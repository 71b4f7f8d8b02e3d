//! The candidates of an expansion's kernels. Features do not meet, so a thread has a packet of them and walks tokens.

use super::super::Plan;
use super::super::footprint::weight_registers;
use super::super::overrides::Overrides;
use super::choices::{packet, packets_up_to, values, worth};
use crate::cuda::kernel::{Compress, Specialisation};

/// Registers that a thread may have for its weight, the sums of its gradient, and the tokens that these need.
const MOST_OF_A_WEIGHT: usize = 160;
const MOST_THREADS: usize = 128;

pub fn candidates(s: &Specialisation, overrides: &Overrides) -> Vec<Plan> {
    let plans = packets_up_to(packet(s, s.d), s, overrides).into_iter();
    plans.flat_map(|plan| weights(s, plan, overrides)).flat_map(|plan| threads(s, plan, overrides)).collect()
}

fn weights(s: &Specialisation, plan: Plan, overrides: &Overrides) -> Vec<Plan> {
    if s.compress != Compress::Token {
        return vec![plan];
    }
    let usual = worth([(true, weight_registers(s, plan.features) <= MOST_OF_A_WEIGHT), (false, true)]);
    let keep = values(overrides.keep_in_registers, usual, |_| true);
    keep.into_iter().map(|keep_in_registers| Plan { keep_in_registers, ..plan }).collect()
}

fn threads(s: &Specialisation, plan: Plan, overrides: &Overrides) -> Vec<Plan> {
    let usual = (s.d / plan.features).next_multiple_of(32).min(MOST_THREADS);
    let threads = values(overrides.threads, [usual], |_| true);
    threads.into_iter().map(|threads| Plan { threads, ..plan }).collect()
}
