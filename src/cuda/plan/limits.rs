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
    pub blocks_per_multiprocessor: usize,
    /// blocks of a cluster, at most; 1 if there are no clusters
    pub cluster: usize,
}

impl Limits {
    /// Registers that a thread can have if so many threads share a multiprocessor: each of its four parts deals
    /// them out to its warps, eight at a time.
    pub(super) fn most_registers(&self, threads: usize) -> usize {
        let warps = threads.div_ceil(32).div_ceil(4);
        (self.registers_per_multiprocessor / 4 / 32 / warps / 8 * 8).min(255)
    }
}

/// Blocks of a cluster on GPUs of an architecture: those that every one of them has room for. The first compiler that
/// knows how they send each other numbers is that of CUDA 12.1.
pub fn most_of_a_cluster(architecture: u32, compiler: (i32, i32)) -> usize {
    if architecture >= 90 && compiler >= (12, 1) { 8 } else { 1 }
}
