//! The small kernel that both operators launch after their own, and the memory that it reads.

use super::device::Call;
use super::kernel::RewriteRead;
use super::kernel::arguments::{Address, Reduce};
use crate::error::Result;

/// Launches `reduce` with 32 columns per block.
pub fn launch_reduce(specialisation: &RewriteRead, argument: Reduce, call: &Call<'_>) -> Result<()> {
    let loaded = call.loaded(specialisation)?;
    call.launch(&loaded, [specialisation.sums_per_block().div_ceil(32), 1], argument)
}

/// Allocates the sums of each block.
pub fn partial(specialisation: &RewriteRead, blocks: usize, call: &Call<'_>) -> Result<Address> {
    call.memory.allocate(blocks * specialisation.sums_per_block() * specialisation.real().size())
}
