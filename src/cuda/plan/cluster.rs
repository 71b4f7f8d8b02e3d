//! How many blocks share a token: one, or where that cannot do all there is to do with it at once, a cluster of blocks
//! with a slice of the features each. They add up their sums through each other's shared memory.

use std::iter::once;

use super::{Forced, Limits, Place, Plan, boundary, features, shared_in_all};
use crate::cuda::specialisation::{Compress, Parts, Specialisation};
use crate::error::Result;
use crate::tensor::Dtype;

/// First-level cache beside what the blocks of a multiprocessor can have of the same memory.
const CACHE_ALONE: usize = 28 << 10;

pub fn plan(s: &Specialisation, limits: &Limits, forced: &Forced) -> Result<Plan> {
    if let Some(cluster) = forced.cluster.filter(|&cluster| s.d.is_multiple_of(cluster)) {
        return of(cluster, s, limits, forced);
    }
    let alone = of(1, s, limits, forced)?;
    if forced.cluster.is_some() || is_whole(s, &alone, limits) {
        return Ok(alone);
    }
    // Two blocks on a multiprocessor at least, so that one works while the other waits: fewer of these may be enough, or
    // a small cluster is. Then one.
    let sizes = [2, 4, 8].into_iter().filter(|size| *size <= limits.cluster);
    let two = once(1).chain(sizes.clone()).map(|size| (size, 2));
    let mut wanted = two.chain(sizes.map(|size| (size, 1)));
    Ok(wanted.find_map(|(size, blocks)| together(size, blocks, s, limits, forced)).unwrap_or(alone))
}

/// The next plan to try where this one spills registers.
pub fn relaxed(plan: &Plan, s: &Specialisation, limits: &Limits) -> Option<Plan> {
    boundary::relaxed(plan, &slice(s, plan.cluster), limits)
}

/// What one block of a cluster has of a token: it is cut like a block with a narrower state.
fn slice(s: &Specialisation, cluster: usize) -> Specialisation {
    Specialisation { d: s.d / cluster, ..*s }
}

fn of(cluster: usize, s: &Specialisation, limits: &Limits, forced: &Forced) -> Result<Plan> {
    boundary::plan(&slice(s, cluster), limits, &Forced { cluster: Some(cluster), ..*forced })
}

/// Clusters of so many blocks, as many of these on a multiprocessor as leave them whole, but so many at least.
fn together(
    cluster: usize,
    least: usize,
    s: &Specialisation,
    limits: &Limits,
    forced: &Forced,
) -> Option<Plan> {
    if !s.d.is_multiple_of(cluster * features(s)) {
        return None;
    }
    let most = of(cluster, s, limits, forced).ok()?.blocks;
    (least..=most)
        .rev()
        .filter_map(|blocks| of(cluster, s, limits, &Forced { blocks: Some(blocks), ..*forced }).ok())
        .find(|plan| is_whole(s, plan, limits))
}

/// Whether a token crosses memory once each way, and nothing else crosses it with every token: no sums of parameters'
/// gradients, no window, and no parameters.
fn is_whole(s: &Specialisation, plan: &Plan, limits: &Limits) -> bool {
    let near = |place| matches!(place, Place::Registers | Place::Shared);
    let shared = plan.blocks * shared_in_all(s, plan);
    let cache = (limits.shared_per_multiprocessor + CACHE_ALONE).saturating_sub(shared);
    // The blocks of a multiprocessor may all have different slices.
    let parameters = parameter_bytes(s) / plan.cluster * plan.blocks.min(plan.cluster);
    plan.hold && near(plan.window) && near(plan.sums) && parameters <= cache
}

/// Bytes of the parameters that every token needs.
fn parameter_bytes(s: &Specialisation) -> usize {
    let Parts { norm_weight, gate, value, .. } = s.parts;
    let compress = matches!(s.compress, Compress::Channel | Compress::Token);
    let bytes = |there: bool, rows: usize, dtype: Dtype| if there { rows * s.d * dtype.size() } else { 0 };
    bytes(compress, s.m * s.taps, s.types.compress)
        + bytes(norm_weight, 1, s.types.norm)
        + bytes(gate, 1, s.types.gate)
        + bytes(value, s.m, s.types.value)
}
