//! The values of a choice, for the candidates of every kernel.

use super::super::Plan;
use super::super::overrides::Overrides;
use crate::cuda::kernel::Specialisation;

/// Threads of a multiprocessor that keep memory busy: beyond that registers are worth more.
const ENOUGH_THREADS: usize = 1024;
/// Blocks that a multiprocessor of any GPU can have.
const MOST_BLOCKS: usize = 32;

/// The values of one choice: those worth comparing, or the one of an override, if the kernel can run it.
pub fn values<T: Copy + PartialEq>(
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
pub fn worth<T, const N: usize>(values: [(T, bool); N]) -> impl Iterator<Item = T> {
    values.into_iter().filter_map(|(value, worth)| worth.then_some(value))
}

/// Features of a packet: 16 bytes of the state, and at least 4 of the direction, if these divide `width`.
pub fn packet(s: &Specialisation, width: usize) -> usize {
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
pub fn packets_up_to(longest: usize, s: &Specialisation, overrides: &Overrides) -> Vec<Plan> {
    let usual = [8, 4, 2, 1].into_iter().filter(|&features| features <= longest);
    let features = values(overrides.features, usual, |features| s.d.is_multiple_of(features));
    features.into_iter().map(|features| Plan { features, ..Plan::plain(s) }).collect()
}

/// From one block per multiprocessor to those that keep memory busy.
pub fn blocks(plan: Plan, overrides: &Overrides) -> Vec<Plan> {
    let enough = (ENOUGH_THREADS / plan.threads).clamp(1, MOST_BLOCKS);
    let blocks = values(overrides.blocks, 1..=enough, |_| true);
    blocks.into_iter().map(|blocks| Plan { blocks, ..plan }).collect()
}
