//! `expand` on a device.

use super::arguments::{self, ExpandBackward, Reduce, are_aligned};
use super::boundary::launch_reduce;
use super::launch::{Call, Loaded};
use super::plan::{self, MOST_CHUNKS};
use super::specialisation::{Kernel, Specialisation};
use crate::error::Result;
use crate::problem::Expand;
use crate::tensor::Tensor;

/// Fills `state` from `x`.
pub fn forward(expand: &Expand, x: &Tensor, state: &Tensor, call: &Call<'_>) -> Result<()> {
    let mut argument = arguments::Expand {
        x: x.address(),
        weight: expand.weight.as_ref().map_or(0, Tensor::address),
        state: state.address(),
        ..Default::default()
    };
    let mut specialisation = Specialisation::expand(Kernel::ExpandForward, expand, x.dtype, state.dtype);
    specialisation.aligned = are_aligned(&[argument.x, argument.weight, argument.state]);
    if expand.sizes.tokens() == 0 {
        return Ok(());
    }
    let loaded = call.loaded(&specialisation)?;
    let grid = Grid::new(expand, &specialisation, &loaded, call);
    argument.time = grid.time as i64;
    argument.chunk = grid.chunk as i64;
    for (first, sequences) in grid.launches() {
        let tokens = first * grid.time;
        argument.x = x.address_of(tokens * specialisation.d);
        argument.state = state.address_of(tokens * specialisation.d * specialisation.m);
        argument.sequences = sequences as i64;
        call.launch(&loaded, [grid.across, sequences * grid.chunks], argument)?;
    }
    Ok(())
}

/// dX (`grad`) → dx and, where there is a weight, dw.
pub fn backward(
    expand: &Expand,
    x: &Tensor,
    grad: &Tensor,
    grad_x: &Tensor,
    grad_weight: &Option<Tensor>,
    call: &Call<'_>,
) -> Result<()> {
    let mut argument =
        ExpandBackward { weight: expand.weight.as_ref().map_or(0, Tensor::address), ..Default::default() };
    let mut specialisation = Specialisation::expand(Kernel::ExpandBackward, expand, x.dtype, grad.dtype);
    specialisation.aligned = are_aligned(&[x.address(), argument.weight, grad.address(), grad_x.address()]);
    let (mut partial, mut rows) = (0, 0);
    if expand.sizes.tokens() > 0 {
        let loaded = call.loaded(&specialisation)?;
        let grid = Grid::new(expand, &specialisation, &loaded, call);
        let row = specialisation.partial_row() * specialisation.real().size();
        if grad_weight.is_some() {
            rows = grid.sequences * grid.chunks;
            partial = (call.allocate)(rows * row)?;
        }
        argument.time = grid.time as i64;
        argument.chunk = grid.chunk as i64;
        for (first, sequences) in grid.launches() {
            let tokens = first * grid.time;
            argument.x = x.address_of(tokens * specialisation.d);
            argument.grad_state = grad.address_of(tokens * specialisation.d * specialisation.m);
            argument.grad_x = grad_x.address_of(tokens * specialisation.d);
            argument.sequences = sequences as i64;
            if partial > 0 {
                argument.partial = partial + (first * grid.chunks * row) as u64;
            }
            call.launch(&loaded, [grid.across, sequences * grid.chunks], argument)?;
        }
    }
    let Some(grad_weight) = grad_weight else { return Ok(()) };
    let sums = Reduce { partial, blocks: rows as i64, compress: grad_weight.address(), ..Default::default() };
    launch_reduce(&specialisation, sums, call)
}

/// Chunks of sequences along the second axis of the grid, packets along the first.
struct Grid {
    across: usize,
    sequences: usize,
    time: usize,
    chunk: usize,
    /// per sequence
    chunks: usize,
}

impl Grid {
    fn new(expand: &Expand, specialisation: &Specialisation, loaded: &Loaded, call: &Call<'_>) -> Grid {
        let plan = &loaded.plan;
        // Repetition does not look back: all tokens are one sequence.
        let (sequences, time) = match expand.weight {
            Some(_) => (expand.sizes.sequences, expand.sizes.time),
            None => (1, expand.sizes.tokens()),
        };
        let (limits, forced) = (call.device.limits(), call.device.forced());
        let chunk = plan::expand_chunk(specialisation, plan, limits, &forced, sequences, time);
        let across = (specialisation.d / plan.features).div_ceil(plan.threads);
        Grid { across, sequences, time, chunk, chunks: time.div_ceil(chunk) }
    }

    /// First sequence and number of sequences of every launch: one, unless there are more chunks than a
    /// grid takes.
    fn launches(&self) -> impl Iterator<Item = (usize, usize)> {
        let most = MOST_CHUNKS / self.chunks;
        let sequences = self.sequences;
        (0..sequences).step_by(most).map(move |first| (first, most.min(sequences - first)))
    }
}
