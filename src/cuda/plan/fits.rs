//! Whether a device can run a plan, and if not, the reason in a sentence.

use std::fmt;

use super::Plan;
use super::footprint::Footprint;
use super::limits::Limits;

/// Bytes of static shared memory that the compiler accepts.
pub(super) const MOST_STATIC: usize = 48 << 10;
/// Threads that may add up their sums (sum_partials in block_sum.cuh): of a power of two of blocks, and of others.
pub(super) const MOST_THREADS_OF_A_SUM: [usize; 2] = [4096, 1024];

/// Why a device cannot run a plan: it needs more of something than there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    Cluster { needs: usize, has: usize },
    ThreadsOfASum { needs: usize, has: usize },
    StaticShared { needs: usize, has: usize },
    SharedPerBlock { needs: usize, has: usize },
    SharedPerMultiprocessor { blocks: usize, needs: usize, has: usize },
    ThreadsPerMultiprocessor { blocks: usize, needs: usize, has: usize },
    BlocksPerMultiprocessor { needs: usize, has: usize },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kib = |bytes: usize| bytes.div_ceil(1024);
        match *self {
            Reason::Cluster { needs, has } => {
                write!(f, "needs clusters of {needs} blocks, this GPU has clusters of {has} at most")
            }
            Reason::ThreadsOfASum { needs, has } => {
                write!(f, "needs sums over {needs} threads, the kernels add up {has} at most")
            }
            Reason::StaticShared { needs, has } => {
                write!(
                    f,
                    "needs {} KiB of static shared memory, the compiler accepts {}",
                    kib(needs),
                    has / 1024
                )
            }
            Reason::SharedPerBlock { needs, has } => {
                write!(f, "needs {} KiB of shared memory, a block has {}", kib(needs), has / 1024)
            }
            Reason::SharedPerMultiprocessor { blocks, needs, has } => write!(
                f,
                "needs {} KiB of shared memory for {blocks} blocks, a multiprocessor has {}",
                kib(needs),
                has / 1024
            ),
            Reason::ThreadsPerMultiprocessor { blocks, needs, has } => {
                write!(f, "needs {needs} threads for {blocks} blocks, a multiprocessor has {has}")
            }
            Reason::BlocksPerMultiprocessor { needs, has } => {
                write!(f, "needs {needs} blocks per multiprocessor, which runs {has} at most")
            }
        }
    }
}

/// The first limit that a plan does not keep. Registers are none: a plan that asks for too many spills.
pub fn fits(plan: &Plan, footprint: &Footprint, limits: &Limits) -> Result<(), Reason> {
    let at_most = |needs, has, reason: Reason| if needs <= has { Ok(()) } else { Err(reason) };
    let (cluster, blocks) = (plan.cluster, plan.blocks);
    at_most(cluster, limits.cluster, Reason::Cluster { needs: cluster, has: limits.cluster })?;
    let (needs, has) = (cluster * plan.threads, most_threads_of_a_sum(cluster));
    at_most(needs, has, Reason::ThreadsOfASum { needs, has })?;
    let (needs, has) = (footprint.static_shared, MOST_STATIC);
    at_most(needs, has, Reason::StaticShared { needs, has })?;
    let (needs, has) = (footprint.shared(), limits.shared_per_block);
    at_most(needs, has, Reason::SharedPerBlock { needs, has })?;
    let (needs, has) = (blocks * footprint.shared(), limits.shared_per_multiprocessor);
    at_most(needs, has, Reason::SharedPerMultiprocessor { blocks, needs, has })?;
    let (needs, has) = (blocks * plan.threads, limits.threads_per_multiprocessor);
    at_most(needs, has, Reason::ThreadsPerMultiprocessor { blocks, needs, has })?;
    let has = limits.blocks_per_multiprocessor;
    at_most(blocks, has, Reason::BlocksPerMultiprocessor { needs: blocks, has })
}

pub(super) fn most_threads_of_a_sum(cluster: usize) -> usize {
    MOST_THREADS_OF_A_SUM[usize::from(!cluster.is_power_of_two())]
}
