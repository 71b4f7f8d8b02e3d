//! `expand` on a device.

use super::auxiliary::{launch_reduce, partial};
use super::device::{Call, Loaded};
use super::kernel::arguments::{self, Address, ExpandBackward, Reduce, are_aligned};
use super::kernel::{self, Kernel};
use super::plan::{Limits, Plan};
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
    let grid = grid(expand, &specialisation, &loaded, call);
    (argument.chunks, argument.time, argument.chunk) = grid.arguments;
    call.launch(&loaded, grid.blocks, argument)
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
        let grid = grid(expand, &specialisation, &loaded, call);
        if grad_weight.is_some() {
            blocks = grid.blocks[1];
            argument.partial = partial(&specialisation.reduce(), blocks, call)?;
        }
        (argument.chunks, argument.time, argument.chunk) = grid.arguments;
        call.launch(&loaded, grid.blocks, argument)?;
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

/// Tokens of a chunk of the backward: keeps a block's sums small beside its tokens.
const CHUNK: usize = 64;
/// Blocks that a grid may have along its second axis.
const MOST_GRID_BLOCKS: usize = 65_535;

/// Packets along a grid's first axis; along the second, blocks that share the chunks of sequences.
struct Grid {
    blocks: [usize; 2],
    /// (chunks, time, chunk)
    arguments: (i64, i64, i64),
}

fn grid(expand: &Expand, s: &kernel::Expand, loaded: &Loaded, call: &Call<'_>) -> Grid {
    // Repetition does not look back: all tokens are one sequence.
    let sequences = if expand.weight.is_some() { expand.sizes.sequences } else { 1 };
    let chunk = call.device.overrides().get("CHUNK");
    Grid::new(s, &loaded.plan, call.device.limits(), [sequences, expand.sizes.tokens() / sequences], chunk)
}

impl Grid {
    /// `chunk`: tokens of a chunk, if they are chosen by hand.
    fn new(
        s: &kernel::Expand,
        plan: &Plan,
        limits: &Limits,
        [sequences, time]: [usize; 2],
        chunk: Option<usize>,
    ) -> Grid {
        let across = s.d.div_ceil(plan.threads * plan.features);
        // A few waves of blocks at most, so that their sums stay few however many sequences there are.
        let wave = limits.multiprocessors * (limits.threads_per_multiprocessor / plan.threads).max(1);
        let most = wave.div_ceil(across).min(MOST_GRID_BLOCKS);
        let sums = s.kernel == Kernel::ExpandBackward && s.weight.is_some();
        // As many tokens are read twice as there are taps.
        let least = (2 * s.taps).max(if sums { CHUNK } else { 1 });
        let planned = (sequences * time).div_ceil(most).max(least);
        let chunk = chunk.unwrap_or(planned).clamp(1, time);
        let chunks = sequences * time.div_ceil(chunk);
        Grid { blocks: [across, chunks.min(most)], arguments: (chunks as i64, time as i64, chunk as i64) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::plan::samples;
    use crate::tensor::Dtype;

    #[test]
    fn chunks_fit_a_grid() {
        let limits = samples::LARGE;
        let many = Limits { multiprocessors: 30_000, ..limits };
        for weight in [Some(Dtype::F32), None] {
            let expansion = samples::expansion(Kernel::ExpandBackward, 768, 4, 4, Dtype::Bf16);
            let s = kernel::Expand { weight, ..expansion };
            let plan = Plan::new(&s, &limits, &Default::default()).unwrap();
            let grid = |limits: &Limits, tokens| Grid::new(&s, &plan, limits, [1, tokens], None);
            for tokens in [1, 100, 455_000, 10_000_000] {
                let Grid { blocks: [across, down], arguments: (chunks, _, chunk) } = grid(&limits, tokens);
                assert_eq!((across, down), (3, chunks as usize));
                assert!(down <= 704 && chunk as usize * down >= tokens, "{tokens} × {chunk}");
                assert!(chunk as usize >= tokens.min(if weight.is_some() { 64 } else { 8 }));
            }
            let down = grid(&many, 100_000_000).blocks[1];
            assert!((65_000..=65_535).contains(&down), "the most along a grid's second axis: {down}");
            assert_eq!(Grid::new(&s, &plan, &limits, [3, 50], Some(7)).arguments, (24, 50, 7));
        }
    }
}
