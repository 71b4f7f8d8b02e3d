//! `expand` on a device.

use super::auxiliary::{launch_reduce, partial};
use super::device::{Call, Loaded};
use super::kernel::arguments::{self, Address, ExpandBackward, Reduce, are_aligned};
use super::kernel::{self, Kernel};
use crate::error::Result;
use crate::problem::Expand;
use crate::tensor::Tensor;

/// Computes `state` from `x`, and what a cached step leaves for the next.
pub fn forward(expand: &Expand, state: &Tensor, new_before: &Option<Tensor>, call: &Call<'_>) -> Result<()> {
    let mut argument = arguments::Expand {
        x: expand.x.address(),
        weight: expand.weight.as_ref().map_or(0, Tensor::address),
        state: state.address(),
        before: expand.before.as_ref().map_or(0, Tensor::address),
        new_before: new_before.as_ref().map_or(0, Tensor::address),
        document_starts: expand.document_starts.as_ref().map_or(0, Tensor::address),
        ..Default::default()
    };
    let mut specialisation = kernel::Expand::new(Kernel::ExpandForward, expand, state.dtype);
    let arguments::Expand { x, weight, state, before, new_before, .. } = argument;
    specialisation.aligned = are_aligned(&[x, weight, state, before, new_before]);
    if expand.sizes.tokens() == 0 {
        return Ok(());
    }
    let loaded = call.loaded(&specialisation)?;
    argument.weight = weight_address(expand, &loaded, call)?;
    let grid = Grid::new(expand, &specialisation, &loaded, call);
    (argument.chunks, argument.time, argument.chunk) = grid.arguments();
    call.launch(&loaded, [grid.across, grid.down], argument)
}

/// Computes dx and, if there is a weight, dw from dX (`grad`).
pub fn backward(
    expand: &Expand,
    grad: &Tensor,
    grad_x: &Tensor,
    grad_weight: &Option<Tensor>,
    call: &Call<'_>,
) -> Result<()> {
    let mut argument = ExpandBackward {
        x: expand.x.address(),
        weight: expand.weight.as_ref().map_or(0, Tensor::address),
        grad_state: grad.address(),
        grad_x: grad_x.address(),
        document_starts: expand.document_starts.as_ref().map_or(0, Tensor::address),
        ..Default::default()
    };
    let mut specialisation = kernel::Expand::new(Kernel::ExpandBackward, expand, grad.dtype);
    specialisation.aligned =
        are_aligned(&[argument.x, argument.weight, argument.grad_state, argument.grad_x]);
    let mut blocks = 0;
    if expand.sizes.tokens() > 0 {
        let loaded = call.loaded(&specialisation)?;
        argument.weight = weight_address(expand, &loaded, call)?;
        let grid = Grid::new(expand, &specialisation, &loaded, call);
        if grad_weight.is_some() {
            blocks = grid.down;
            argument.partial = partial(&specialisation.reduce(), blocks, call)?;
        }
        (argument.chunks, argument.time, argument.chunk) = grid.arguments();
        call.launch(&loaded, [grid.across, grid.down], argument)?;
    }
    let Some(grad_weight) = grad_weight else { return Ok(()) };
    let (partial, blocks, grad_compress) = (argument.partial, blocks as i64, grad_weight.address());
    let sums = Reduce { partial, blocks, grad_compress, ..Default::default() };
    launch_reduce(&specialisation.reduce(), sums, call)
}

/// Returns the address of the weight, in the layout that the kernel expects.
fn weight_address(expand: &Expand, loaded: &Loaded, call: &Call<'_>) -> Result<Address> {
    match &expand.weight {
        None => Ok(0),
        Some(weight) if loaded.plan.keep_in_registers => Ok(weight.address()),
        Some(weight) => call.memory.last_axis_first(weight),
    }
}

/// The grid: packets along its first axis; along the second, blocks that share the chunks of sequences.
struct Grid {
    across: usize,
    down: usize,
    chunks: usize,
    time: usize,
    chunk: usize,
}

impl Grid {
    fn new(expand: &Expand, specialisation: &kernel::Expand, loaded: &Loaded, call: &Call<'_>) -> Grid {
        let plan = &loaded.plan;
        // Repetition does not look back: all tokens are one sequence.
        let (sequences, time) = match expand.weight {
            Some(_) => (expand.sizes.sequences, expand.sizes.time),
            None => (1, expand.sizes.tokens()),
        };
        let limits = call.device.limits();
        let planned = plan.expand_chunk(specialisation, limits, sequences * time);
        let chunk = call.device.overrides().get("CHUNK").unwrap_or(planned).clamp(1, time);
        let chunks = sequences * time.div_ceil(chunk);
        let down = chunks.min(plan.expand_blocks(specialisation, limits));
        Grid { across: plan.expand_slices(specialisation), down, chunks, time, chunk }
    }

    /// Returns (chunks, time, chunk).
    fn arguments(&self) -> (i64, i64, i64) {
        (self.chunks as i64, self.time as i64, self.chunk as i64)
    }
}
