//! Whether a device can run a plan, and if not, the reason in a sentence.

use super::footprint::{Footprint, static_shared};
use super::limits::Limits;
use super::plan::Plan;
use crate::cuda::kernel::Specialisation;

/// Bytes of static shared memory that the compiler accepts.
pub(super) const MOST_STATIC: usize = 48 << 10;

/// Fails with the first limit that a plan does not keep. Registers are none: a plan that asks for too many spills.
pub fn fits(plan: &Plan, footprint: &Footprint, limits: &Limits) -> Result<(), String> {
    let (cluster, blocks, shared) = (plan.cluster, plan.blocks, footprint.shared());
    let (one, kib) = (1, 1024);
    let needs_and_has = [
        (cluster, limits.cluster, one, "clusters of # blocks, this GPU has clusters of % at most"),
        (
            cluster * plan.threads,
            threads_of_a_sum(cluster),
            one,
            "sums over # threads, the kernels add up % at most",
        ),
        (footprint.static_shared, MOST_STATIC, kib, "# KiB of static shared memory, the compiler accepts %"),
        (shared, limits.shared_per_block, kib, "# KiB of shared memory, a block has %"),
        (
            blocks * shared,
            limits.shared_per_multiprocessor,
            kib,
            "# KiB of shared memory for @ blocks, a multiprocessor has %",
        ),
        (
            blocks * plan.threads,
            limits.threads_per_multiprocessor,
            one,
            "# threads for @ blocks, a multiprocessor has %",
        ),
        (blocks, limits.blocks_per_multiprocessor, one, "# blocks per multiprocessor, which runs % at most"),
    ];
    match needs_and_has.iter().find(|(needs, has, ..)| needs > has) {
        None => Ok(()),
        Some((needs, has, unit, text)) => {
            let (needs, has) = (needs.div_ceil(*unit).to_string(), (has / unit).to_string());
            let text = text.replace('#', &needs).replace('%', &has).replace('@', &blocks.to_string());
            Err(format!("needs {text}"))
        }
    }
}

/// Threads that may add up their sums (sum_partials in block_sum.cuh): of a power of two of blocks, and of others.
fn threads_of_a_sum(cluster: usize) -> usize {
    if cluster.is_power_of_two() { 4096 } else { 1024 }
}

/// Threads of a block, so that the kernels can add up their sums.
pub(super) fn most_threads(s: &Specialisation, cluster: usize) -> usize {
    let of_a_sum = threads_of_a_sum(cluster) / cluster / 32 * 32;
    of_a_sum.min(MOST_STATIC / static_shared(s, 32 * cluster) * 32)
}
