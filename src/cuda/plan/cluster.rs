//! How many blocks share a token: one, or if one cannot do all of it in one pass, a cluster of blocks with a slice of
//! the features each. They add up their sums through each other's shared memory.

use std::iter::once;

use super::footprint::{Plan, features, shared_in_all};
use super::limits::Limits;
use super::overrides::{Overrides, Residency};
use super::rewrite_read;
use crate::cuda::kernel::{Compress, Parts, Specialisation};
use crate::error::Result;
use crate::tensor::Dtype;

/// First-level cache beside what the blocks of a multiprocessor can have of the same memory.
const CACHE_ALONE: usize = 28 << 10;

pub fn plan(s: &Specialisation, limits: &Limits, overrides: &Overrides) -> Result<Plan> {
    if let Some(cluster) = overrides.cluster.filter(|&cluster| s.d.is_multiple_of(cluster)) {
        return for_cluster(cluster, s, limits, overrides);
    }
    let alone = for_cluster(1, s, limits, overrides)?;
    if overrides.cluster.is_some() || is_whole(s, &alone, limits) {
        return Ok(alone);
    }
    // First two blocks on a multiprocessor at least, so that one works while the other waits; then one. Small clusters
    // first.
    let sizes = [2, 4, 8].into_iter().filter(|size| *size <= limits.cluster);
    let two = once(1).chain(sizes.clone()).map(|size| (size, 2));
    let mut wanted = two.chain(sizes.map(|size| (size, 1)));
    Ok(wanted
        .find_map(|(size, blocks)| fill_multiprocessor(size, blocks, s, limits, overrides))
        .unwrap_or(alone))
}

/// The next plan to try if this one spills registers.
pub fn relaxed(plan: &Plan, s: &Specialisation, limits: &Limits) -> Option<Plan> {
    rewrite_read::relaxed(plan, &slice(s, plan.cluster), limits)
}

/// One block's share of the cluster's features: it is planned like a block with a narrower state.
fn slice(s: &Specialisation, cluster: usize) -> Specialisation {
    Specialisation { d: s.d / cluster, ..*s }
}

/// The plan of a block in a cluster of `cluster` blocks.
fn for_cluster(cluster: usize, s: &Specialisation, limits: &Limits, overrides: &Overrides) -> Result<Plan> {
    rewrite_read::plan(&slice(s, cluster), limits, &Overrides { cluster: Some(cluster), ..*overrides })
}

/// The plan with the most blocks per multiprocessor, but `least` at least, that keeps clusters of `cluster` blocks
/// whole ([`is_whole`]).
fn fill_multiprocessor(
    cluster: usize,
    least: usize,
    s: &Specialisation,
    limits: &Limits,
    overrides: &Overrides,
) -> Option<Plan> {
    if !s.d.is_multiple_of(cluster * features(s)) {
        return None;
    }
    let most = for_cluster(cluster, s, limits, overrides).ok()?.blocks;
    (least..=most)
        .rev()
        .filter_map(|blocks| {
            for_cluster(cluster, s, limits, &Overrides { blocks: Some(blocks), ..*overrides }).ok()
        })
        .find(|plan| is_whole(s, plan, limits))
}

/// Whether a token crosses memory once each way, and nothing else crosses it with every token: no sums of parameters'
/// gradients, no window, and no parameters.
fn is_whole(s: &Specialisation, plan: &Plan, limits: &Limits) -> bool {
    let near = |place| matches!(place, Residency::Registers | Residency::Shared);
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
