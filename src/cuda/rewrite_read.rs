//! `rewrite`, `read` and `rewrite_read` on a device: which kernels, with which arguments.

use super::arguments::{self, Address, Arrange, Backward, Reduce, are_aligned};
use super::launch::{Call, Loaded};
use super::plan::{self, Place};
use super::specialisation::{Compress, Kernel, Specialisation};
use crate::cpu::backward::{Gradients, Incoming};
use crate::cpu::forward::Outputs;
use crate::error::{Error, Result};
use crate::problem::{Boundary, Read};
use crate::tensor::Tensor;

/// Runs a boundary forward into `outputs`.
pub fn forward(boundary: &Boundary, outputs: &Outputs, call: &Call<'_>) -> Result<()> {
    check_outputs(boundary, outputs)?;
    let mut argument = inputs(boundary);
    argument.new_state = address(&outputs.state);
    argument.context = address(&outputs.context);
    saved(&mut argument, outputs);
    let context = outputs.context.as_ref().map(|context| context.dtype);
    let mut specialisation = Specialisation::boundary(Kernel::Forward, boundary, context);
    specialisation.aligned = are_aligned(&argument.packets());
    if boundary.sizes.tokens() == 0 {
        return Ok(());
    }
    let loaded = call.loaded(&specialisation)?;
    argument.compress = arranged(&specialisation, argument.compress, call)?;
    let blocks = cut(&mut argument, boundary, &specialisation, &loaded, call)?;
    call.launch(&loaded, [blocks, loaded.plan.slices(&specialisation)], argument)
}

/// Runs a boundary backward; `saved` is what its forward filled.
pub fn backward(
    boundary: &Boundary,
    saved_outputs: &Outputs,
    incoming: &Incoming,
    gradients: &Gradients,
    call: &Call<'_>,
) -> Result<()> {
    check_gradients(boundary, saved_outputs, incoming, gradients)?;
    let mut argument = Backward { boundary: inputs(boundary), ..Default::default() };
    saved(&mut argument.boundary, saved_outputs);
    argument.gradients = arguments::Gradients {
        grad_state: address(&incoming.state),
        grad_context: address(&incoming.context),
        grad_new_value: address(&incoming.value),
        grad_new_gate: address(&incoming.gate),
        state: address(&gradients.state),
        direction: address(&gradients.direction),
        value: address(&gradients.value),
        gate: address(&gradients.gate),
        ..Default::default()
    };
    let context = incoming.context.as_ref().map(|grad| grad.dtype);
    let mut specialisation = Specialisation::boundary(Kernel::Backward, boundary, context);
    specialisation.aligned =
        are_aligned(&argument.boundary.packets()) && are_aligned(&argument.gradients.packets());
    let mut blocks = 0;
    if boundary.sizes.tokens() > 0 {
        let loaded = call.loaded(&specialisation)?;
        let apart = boundary.read.is_some() && loaded.plan.sums == Place::Apart;
        argument.boundary.compress = arranged(&specialisation, argument.boundary.compress, call)?;
        blocks = cut(&mut argument.boundary, boundary, &specialisation, &loaded, call)?;
        if apart {
            argument.gradients.shift =
                (call.allocate)(boundary.sizes.tokens() * specialisation.real().size())?;
        } else if boundary.read.is_some() {
            argument.gradients.partial = partial(&specialisation, blocks, call)?;
        }
        call.launch(&loaded, [blocks, loaded.plan.slices(&specialisation)], argument)?;
        if apart && gradients.of_parameters() {
            blocks = parameters(&specialisation.parameters(), &mut argument, boundary, call)?;
        }
    }
    match &boundary.read {
        Some(read) if gradients.of_parameters() => {
            reduce(&specialisation, read, argument.gradients.partial, blocks, gradients, call)
        }
        _ => Ok(()),
    }
}

/// Sums the parameters' gradients, for which the backward had no room; returns the rows of sums.
fn parameters(
    specialisation: &Specialisation,
    argument: &mut Backward,
    boundary: &Boundary,
    call: &Call<'_>,
) -> Result<usize> {
    let loaded = call.loaded(specialisation)?;
    let blocks = cut(&mut argument.boundary, boundary, specialisation, &loaded, call)?;
    argument.gradients.partial = partial(specialisation, blocks, call)?;
    call.launch(&loaded, [blocks, loaded.plan.slices(specialisation)], *argument)?;
    Ok(blocks)
}

/// Memory for a row of sums from each block.
fn partial(specialisation: &Specialisation, blocks: usize, call: &Call<'_>) -> Result<Address> {
    (call.allocate)(blocks * specialisation.partial_row() * specialisation.real().size())
}

/// Adds the blocks' sums up into the parameters' gradients; of no blocks these are zero.
fn reduce(
    backward: &Specialisation,
    read: &Read,
    partial: Address,
    blocks: usize,
    gradients: &Gradients,
    call: &Call<'_>,
) -> Result<()> {
    let argument = Reduce {
        partial,
        blocks: blocks as i64,
        norm_weight: address(&read.norm_weight),
        compress: address(&gradients.compress),
        norm: address(&gradients.norm_weight),
        gate: address(&gradients.gate_weight),
        gate_bias: address(&gradients.gate_bias),
        value: address(&gradients.value_weight),
        value_bias: address(&gradients.value_bias),
    };
    launch_reduce(backward, argument, call)
}

/// Launches `reduce` with 32 columns to a block.
pub(super) fn launch_reduce(backward: &Specialisation, argument: Reduce, call: &Call<'_>) -> Result<()> {
    let specialisation = backward.reduce();
    let loaded = call.loaded(&specialisation)?;
    call.launch(&loaded, [specialisation.partial_row().div_ceil(32), 1], argument)
}

/// Cuts the tokens into chunks and gives the kernel the memory it needs for them; returns the blocks.
fn cut(
    argument: &mut arguments::Boundary,
    boundary: &Boundary,
    specialisation: &Specialisation,
    loaded: &Loaded,
    call: &Call<'_>,
) -> Result<usize> {
    let (tokens, device) = (boundary.sizes.tokens(), call.device);
    let chunk = plan::chunk(specialisation, loaded, device.limits(), &device.forced(), tokens);
    let blocks = tokens.div_ceil(chunk);
    argument.tokens = tokens as i64;
    argument.time = boundary.sizes.time as i64;
    argument.chunk = chunk as i64;
    let scratch = loaded.plan.scratch(specialisation, blocks);
    if scratch > 0 {
        argument.scratch = (call.allocate)(scratch)?;
    }
    Ok(blocks)
}

/// The weight of a read as the kernels take it.
fn arranged(specialisation: &Specialisation, compress: Address, call: &Call<'_>) -> Result<Address> {
    match specialisation.compress {
        Compress::Token if specialisation.taps > 1 => arrange(specialisation, compress, call),
        _ => Ok(compress),
    }
}

/// The weight of a token read, or of an expansion, with its taps outermost.
pub(super) fn arrange(s: &Specialisation, from: Address, call: &Call<'_>) -> Result<Address> {
    let specialisation = s.arrange();
    let numbers = s.d * s.m * s.taps;
    let to = (call.allocate)(numbers * s.types.compress.size())?;
    let loaded = call.loaded(&specialisation)?;
    call.launch(&loaded, [numbers.div_ceil(256), 1], Arrange { from, to })?;
    Ok(to)
}

fn inputs(boundary: &Boundary) -> arguments::Boundary {
    let mut argument = arguments::Boundary { state: boundary.state.address(), ..Default::default() };
    if let Some(rewrite) = &boundary.rewrite {
        argument.direction = rewrite.direction.address();
        argument.value = rewrite.value.address();
        argument.gate = rewrite.gate.address();
        argument.eps_k = rewrite.eps_k;
    }
    if let Some(read) = &boundary.read {
        argument.compress = address(&read.compress);
        argument.norm_weight = address(&read.norm_weight);
        argument.gate_weight = address(&read.gate_weight);
        argument.gate_bias = address(&read.gate_bias);
        argument.value_weight = address(&read.value_weight);
        argument.value_bias = address(&read.value_bias);
        argument.norm_eps = read.norm_eps.unwrap_or_default();
        argument.value_scale = read.value_scale.unwrap_or_default();
    }
    argument
}

/// What the forward saves and the backward finds.
fn saved(argument: &mut arguments::Boundary, outputs: &Outputs) {
    argument.stats = address(&outputs.stats);
    argument.new_value = address(&outputs.value);
    argument.new_gate = address(&outputs.gate);
    argument.compressed = address(&outputs.compressed);
    argument.rstd = address(&outputs.rstd);
}

/// Kernels touch without asking whatever their specialisation says is there.
fn check_outputs(boundary: &Boundary, outputs: &Outputs) -> Result<()> {
    let read = boundary.read.as_ref();
    needed("new_state", &outputs.state, boundary.rewrite.is_some())?;
    same_dtype(&outputs.state, &boundary.state)?;
    needed("context", &outputs.context, read.is_some())?;
    check_saved(boundary, outputs)
}

fn check_saved(boundary: &Boundary, outputs: &Outputs) -> Result<()> {
    let read = boundary.read.as_ref();
    needed("stats", &outputs.stats, boundary.rewrite.is_some())?;
    needed("new_value", &outputs.value, read.is_some_and(|read| read.value_weight.is_some()))?;
    needed("new_gate", &outputs.gate, read.is_some_and(|read| read.gate_weight.is_some()))?;
    needed("rstd", &outputs.rstd, read.is_some_and(|read| read.norm_eps.is_some()))?;
    needed("compressed", &outputs.compressed, read.is_some_and(Read::over_time))?;
    same_dtype(&outputs.compressed, &boundary.state)
}

fn check_gradients(
    boundary: &Boundary,
    saved: &Outputs,
    incoming: &Incoming,
    gradients: &Gradients,
) -> Result<()> {
    check_saved(boundary, saved)?;
    same_dtype(&incoming.state, &boundary.state)?;
    needed("grad_state", &gradients.state, true)?;
    same_dtype(&gradients.state, &boundary.state)?;
    let Some(rewrite) = &boundary.rewrite else { return Ok(()) };
    needed("grad_direction", &gradients.direction, true)?;
    same_dtype(&gradients.direction, &rewrite.direction)?;
    needed("grad_value", &gradients.value, true)?;
    needed("grad_gate", &gradients.gate, true)
}

fn needed(name: &str, tensor: &Option<Tensor>, needed: bool) -> Result<()> {
    if needed && tensor.is_none() {
        return Err(Error::Argument(format!("`{name}` does not go with this boundary")));
    }
    Ok(())
}

fn same_dtype(tensor: &Option<Tensor>, like: &Tensor) -> Result<()> {
    tensor.as_ref().map_or(Ok(()), |tensor| tensor.expect_dtype(&[like.dtype]))
}

fn address(tensor: &Option<Tensor>) -> Address {
    tensor.as_ref().map_or(0, Tensor::address)
}
