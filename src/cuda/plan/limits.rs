//! The limits of a device that a plan keeps to.

/// Sizes of a device's memories, and how much runs on it at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub multiprocessors: usize,
    /// dynamic and static shared memory that one block may have
    pub shared_per_block: usize,
    pub shared_per_multiprocessor: usize,
    pub registers_per_multiprocessor: usize,
    pub threads_per_multiprocessor: usize,
    /// blocks of a cluster, at most; 1 if there are no clusters
    pub cluster: usize,
}

/// Every block reserves this much shared memory for itself (from sm_80 on).
pub const RESERVED: usize = 1024;

/// Blocks of a cluster on GPUs of an architecture: those that every one of them has room for. The first compiler that
/// knows how they send each other numbers is that of CUDA 12.1.
pub fn most_of_a_cluster(architecture: u32, compiler: (i32, i32)) -> usize {
    if architecture >= 90 && compiler >= (12, 1) { 8 } else { 1 }
}
