//! The small kernels that both operators launch: `arrange` before their own, `reduce` after it.

use super::device::Call;
use super::kernel::Specialisation;
use super::kernel::arguments::{Address, Arrange, Reduce};
use crate::error::Result;

/// Copies the weight of a token read, or of an expansion, with its taps outermost; returns the copy's address.
pub fn arrange(s: &Specialisation, from: Address, call: &Call<'_>) -> Result<Address> {
    let specialisation = s.arrange();
    let numbers = s.d * s.m * s.taps;
    let to = (call.allocate)(numbers * s.types.compress.size())?;
    let loaded = call.loaded(&specialisation)?;
    call.launch(&loaded, [numbers.div_ceil(256), 1], Arrange { from, to })?;
    Ok(to)
}

/// Launches `reduce` with 32 columns per block.
pub fn launch_reduce(backward: &Specialisation, argument: Reduce, call: &Call<'_>) -> Result<()> {
    let specialisation = backward.reduce();
    let loaded = call.loaded(&specialisation)?;
    call.launch(&loaded, [specialisation.partial_row().div_ceil(32), 1], argument)
}
