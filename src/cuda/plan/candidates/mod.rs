//! The candidates for a plan: every way to divide a kernel's work that is worth comparing, as a product of the choices
//! that the kernel leaves open.
//!
//! An override keeps those candidates that have its value. Among what a kernel can run, values that nobody would time
//! are left out (idle warps, packets of odd lengths) unless an override names them.

mod expand;
mod parameters;
mod rewrite_read;

use super::footprint::dynamic_shared;
use super::limits::Limits;
use super::overrides::Overrides;
use super::plan::Plan;
use crate::cuda::kernel::{Kernel, Specialisation};

/// Threads of a multiprocessor that keep memory busy: beyond that registers are worth more.
const ENOUGH_THREADS: usize = 1024;
/// Blocks that a multiprocessor can have.
const MOST_BLOCKS: usize = 32;

pub fn candidates(s: &Specialisation, limits: &Limits, overrides: &Overrides) -> Vec<Plan> {
    let mut plans = match s.kernel {
        Kernel::Forward | Kernel::Backward => rewrite_read::candidates(s, limits, overrides),
        Kernel::Parameters => parameters::candidates(s, overrides),
        Kernel::ExpandForward | Kernel::ExpandBackward => expand::candidates(s, overrides),
        Kernel::Reduce | Kernel::Arrange => vec![Plan { threads: 256, ..Plan::plain(s) }],
    };
    plans.iter_mut().for_each(|plan| plan.shared = dynamic_shared(s, plan));
    plans
}

/// The values of one choice: those worth comparing, or the one of an override, if the kernel can run it.
fn values<T: Copy + PartialEq>(
    by_hand: Option<T>,
    usual: impl IntoIterator<Item = T>,
    can_run: impl Fn(T) -> bool,
) -> Vec<T> {
    let mut values: Vec<T> = match by_hand {
        Some(value) => vec![value],
        None => usual.into_iter().collect(),
    };
    values.retain(|&value| can_run(value));
    values.dedup();
    values
}

/// The values that go with `true`.
fn worth<T, const N: usize>(values: [(T, bool); N]) -> impl Iterator<Item = T> {
    values.into_iter().filter_map(|(value, worth)| worth.then_some(value))
}

/// Features of a packet: 16 bytes of the state, and at least 4 of the direction, if these divide `width`.
pub(super) fn packet(s: &Specialisation, width: usize) -> usize {
    let too_small = |features: usize| {
        features * s.m * s.types.state.size() < 16 || features * s.types.direction.size() < 4
    };
    let mut features = 1;
    while too_small(features) && width.is_multiple_of(2 * features) {
        features *= 2;
    }
    features
}

/// Plans with packets of `longest` features and shorter: short ones leave registers for sums.
fn packets_up_to(longest: usize, s: &Specialisation, overrides: &Overrides) -> Vec<Plan> {
    let usual = [8, 4, 2, 1].into_iter().filter(|&features| features <= longest);
    let features = values(overrides.features, usual, |features| s.d.is_multiple_of(features));
    features.into_iter().map(|features| Plan { features, ..Plan::plain(s) }).collect()
}

/// From one block per multiprocessor to those that keep memory busy.
fn blocks(plan: Plan, overrides: &Overrides) -> Vec<Plan> {
    let enough = (ENOUGH_THREADS / plan.threads).clamp(1, MOST_BLOCKS);
    let blocks = values(overrides.blocks, 1..=enough, |_| true);
    blocks.into_iter().map(|blocks| Plan { blocks, ..plan }).collect()
}
