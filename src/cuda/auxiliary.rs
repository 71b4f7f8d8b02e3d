//! The small kernel that both operators launch after their own.

use super::device::Call;
use super::kernel::Specialisation;
use super::kernel::arguments::Reduce;
use crate::error::Result;

/// Launches `reduce` with 32 columns per block.
pub fn launch_reduce(backward: &Specialisation, argument: Reduce, call: &Call<'_>) -> Result<()> {
    let specialisation = backward.reduce();
    let loaded = call.loaded(&specialisation)?;
    call.launch(&loaded, [specialisation.partial_row().div_ceil(32), 1], argument)
}
