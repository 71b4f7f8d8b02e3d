//! `rewrite`, `read` and `rewrite_read` on a device: the kernels to launch, and their arguments.

use super::auxiliary::{launch_reduce, partial};
use super::device::{Call, Loaded};
use super::kernel::arguments::{self, Address, Backward, MOST_LINKS, Reduce, are_aligned};
use super::kernel::{self, Compress, Kernel, ParameterSums};
use super::plan::{Limits, Plan, Residency};
use crate::error::{Error, Result};
use crate::problem::{Gradients, Incoming, Link, Outputs, Read, RewriteRead};
use crate::tensor::Tensor;

/// Runs the operator forward into `outputs`, which `problem::allocate` has made: kernels do not check pointers.
pub fn forward(problem: &RewriteRead, outputs: &Outputs, call: &Call<'_>) -> Result<()> {
    let mut argument = inputs(problem);
    argument.new_state = address(&outputs.new_state);
    argument.context = address(&outputs.context);
    argument.new_pending = address(&outputs.new_pending);
    saved(&mut argument, outputs);
    let context = outputs.context.as_ref().map(|context| context.dtype);
    let mut specialisation = kernel::RewriteRead::new(Kernel::Forward, problem, context);
    specialisation.aligned = are_aligned(&argument.packets());
    if problem.sizes.tokens() == 0 {
        return Ok(());
    }
    let loaded = call.loaded(&specialisation)?;
    argument.compress = compress_address(problem, call)?;
    let blocks = split_tokens(&mut argument, problem, &specialisation, &loaded, call)?;
    call.launch(&loaded, [blocks, loaded.plan.slices(&specialisation)], argument)
}

/// Runs the operator backward; its forward filled `saved_outputs`. `execute` has checked both passes' tensors.
pub fn backward(
    problem: &RewriteRead,
    saved_outputs: &Outputs,
    incoming: &Incoming,
    gradients: &Gradients,
    call: &Call<'_>,
) -> Result<()> {
    let mut argument = Backward { forward: inputs(problem), chain: chain(problem)?, ..Default::default() };
    saved(&mut argument.forward, saved_outputs);
    argument.gradients = arguments::Gradients {
        // Overwritten in place only where CPU tensors run on the emulated GPU.
        grad_new_state: address(if gradients.in_place { &gradients.state } else { &incoming.grad_new_state }),
        grad_context: address(&incoming.grad_context),
        grad_new_value: address(&incoming.grad_new_value),
        grad_new_gate: address(&incoming.grad_new_gate),
        grad_state: address(&gradients.state),
        grad_direction: address(&gradients.direction),
        grad_value: address(&gradients.value),
        grad_gate: address(&gradients.gate),
        ..Default::default()
    };
    let context = incoming.grad_context.as_ref().map(|grad| grad.dtype);
    let mut specialisation = kernel::RewriteRead::new(Kernel::Backward, problem, context);
    specialisation.sums = ParameterSums::new(gradients);
    specialisation.aligned = are_aligned(&argument.forward.packets())
        && are_aligned(&argument.gradients.packets())
        && are_aligned(&argument.chain.packets());
    let mut blocks = 0;
    if problem.sizes.tokens() > 0 {
        let loaded = call.loaded(&specialisation)?;
        let separate = problem.read.is_some() && loaded.plan.sums == Residency::SeparateKernel;
        argument.forward.compress = compress_address(problem, call)?;
        blocks = split_tokens(&mut argument.forward, problem, &specialisation, &loaded, call)?;
        if separate {
            argument.gradients.shift =
                call.memory.allocate(problem.sizes.tokens() * specialisation.real().size())?;
        } else if problem.read.is_some() {
            argument.gradients.partial = partial(&specialisation, blocks, call)?;
        }
        call.launch(&loaded, [blocks, loaded.plan.slices(&specialisation)], argument)?;
        if separate && gradients.of_parameters() {
            blocks = parameters(&specialisation.parameters(), &mut argument, problem, call)?;
        }
    }
    match &problem.read {
        Some(read) if gradients.of_parameters() => {
            reduce(&specialisation, read, argument.gradients.partial, blocks, gradients, call)
        }
        _ => Ok(()),
    }
}

/// Sums the parameters' gradients if the backward had no room for them; returns the number of blocks.
fn parameters(
    specialisation: &kernel::RewriteRead,
    argument: &mut Backward,
    problem: &RewriteRead,
    call: &Call<'_>,
) -> Result<usize> {
    let loaded = call.loaded(specialisation)?;
    let blocks = split_tokens(&mut argument.forward, problem, specialisation, &loaded, call)?;
    argument.gradients.partial = partial(specialisation, blocks, call)?;
    call.launch(&loaded, [blocks, loaded.plan.slices(specialisation)], *argument)?;
    Ok(blocks)
}

/// Adds up the blocks' sums into the parameters' gradients, which are zero without blocks.
fn reduce(
    backward: &kernel::RewriteRead,
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
        grad_compress: address(&gradients.compress),
        grad_norm_weight: address(&gradients.norm_weight),
        grad_gate_weight: address(&gradients.gate_weight),
        grad_gate_bias: address(&gradients.gate_bias),
        grad_value_weight: address(&gradients.value_weight),
        grad_value_bias: address(&gradients.value_bias),
    };
    launch_reduce(&backward.reduce(), argument, call)
}

/// Splits the tokens into chunks and allocates memory for the windows of each block; returns the number of blocks.
fn split_tokens(
    argument: &mut arguments::RewriteRead,
    problem: &RewriteRead,
    specialisation: &kernel::RewriteRead,
    loaded: &Loaded,
    call: &Call<'_>,
) -> Result<usize> {
    let (tokens, device) = (problem.sizes.tokens(), call.device);
    let overrides = device.overrides();
    let (plan, wave) = (&loaded.plan, loaded.wave);
    let planned = || planned_chunk(specialisation, plan, wave, device.limits(), tokens);
    let chunk = overrides.get("CHUNK").unwrap_or_else(planned);
    let blocks = tokens.div_ceil(chunk);
    argument.tokens = tokens as i64;
    argument.time = problem.sizes.time as i64;
    argument.chunk = chunk as i64;
    let neighbours = specialisation.compress == Compress::Token || overrides.get("ORDER") == Some(0);
    argument.step = if neighbours { 1 } else { blocks as i64 };
    if plan.window == Residency::Global {
        let window = specialisation.taps * plan.width(specialisation) * specialisation.real().size();
        argument.scratch = call.memory.allocate(blocks * plan.slices(specialisation) * window)?;
    }
    Ok(blocks)
}

/// Returns the tokens that a block walks, so that each of the `wave` blocks that run at once has one chunk.
fn planned_chunk(s: &kernel::RewriteRead, plan: &Plan, wave: usize, limits: &Limits, tokens: usize) -> usize {
    let chunk = |blocks: usize| tokens.div_ceil((blocks / plan.slices(s)).max(1));
    // A chunk repeats the K − 1 tokens before it: keep that to a tenth while every multiprocessor has work.
    let long = (10 * (s.taps - 1)).min(chunk(limits.multiprocessors));
    chunk(wave).max(long).max(1)
}

/// Returns the read's weight in the layout that the kernels expect.
fn compress_address(problem: &RewriteRead, call: &Call<'_>) -> Result<Address> {
    match problem.read.as_ref().and_then(|read| read.compress.as_ref()) {
        None => Ok(0),
        Some(weight) if weight.shape.len() == 3 && weight.shape[2] > 1 => call.memory.last_axis_first(weight),
        Some(weight) => Ok(weight.address()),
    }
}

fn inputs(problem: &RewriteRead) -> arguments::RewriteRead {
    let mut argument = arguments::RewriteRead { state: problem.state.address(), ..Default::default() };
    if let Some(write) = &problem.rewrite {
        [argument.direction, argument.value, argument.gate] = write.tensors().map(Tensor::address);
        argument.eps_k = write.eps_k;
    }
    argument.pending = address(&problem.pending);
    argument.document_starts = address(&problem.document_starts);
    if let Some(read) = &problem.read {
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

fn chain(problem: &RewriteRead) -> Result<arguments::Chain> {
    let mut chain = arguments::Chain::default();
    if problem.chain.len() > MOST_LINKS {
        return Err(Error::Argument(format!(
            "`chain` must hold at most {MOST_LINKS} rewrites on a GPU, got {}",
            problem.chain.len()
        )));
    }
    chain.length = problem.chain.len() as i64;
    for (to, Link { write, stats }) in chain.links.iter_mut().zip(&problem.chain) {
        let [direction, value, gate] = write.tensors().map(Tensor::address);
        *to = arguments::Link { direction, value, gate, stats: stats.address() };
    }
    Ok(chain)
}

/// Fills in the tensors that the forward saves for the backward.
fn saved(argument: &mut arguments::RewriteRead, outputs: &Outputs) {
    argument.stats = address(&outputs.stats);
    argument.new_value = address(&outputs.new_value);
    argument.new_gate = address(&outputs.new_gate);
    argument.compressed = address(&outputs.compressed);
    argument.rstd = address(&outputs.rstd);
}

fn address(tensor: &Option<Tensor>) -> Address {
    tensor.as_ref().map_or(0, Tensor::address)
}

impl Gradients {
    /// Returns true if any parameter's gradient is wanted.
    fn of_parameters(&self) -> bool {
        let Gradients { compress, norm_weight, gate_weight, gate_bias, value_weight, value_bias, .. } = self;
        let wanted = [compress, norm_weight, gate_weight, gate_bias, value_weight, value_bias];
        wanted.iter().any(|gradient| gradient.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::plan::samples::{CLUSTERED, LARGE, specialisation};
    use crate::tensor::Dtype;

    #[test]
    fn chunks_cover_the_tokens_in_one_wave() {
        for tokens in [1, 7, 131, 132, 133, 4096, 100_000] {
            for (kernel, d) in [(Kernel::Forward, 768), (Kernel::Backward, 4096), (Kernel::Parameters, 4096)]
            {
                let s = specialisation(kernel, d, 4, 1, Dtype::Bf16);
                let plan = Plan::new(&s, &CLUSTERED, &Default::default()).unwrap();
                let chunk = planned_chunk(&s, &plan, plan.wave(&CLUSTERED), &CLUSTERED, tokens);
                let blocks = tokens.div_ceil(chunk) * plan.slices(&s);
                assert!(chunk >= 1 && blocks <= CLUSTERED.multiprocessors * plan.blocks, "{d}: {blocks}");
            }
        }
    }

    #[test]
    fn chunks_leave_out_what_clusters_have_no_room_for() {
        let s = specialisation(Kernel::Backward, 4096, 4, 1, Dtype::Bf16);
        let plan = Plan::new(&s, &CLUSTERED, &Default::default()).unwrap();
        assert_eq!((plan.cluster, plan.wave(&CLUSTERED)), (4, 396));
        let chunk = |wave| planned_chunk(&s, &plan, wave, &CLUSTERED, 9900);
        assert_eq!(chunk(396), 100);
        assert_eq!(chunk(360), 110);
        assert_eq!(chunk(4), 9900);
    }

    #[test]
    fn a_token_reads_halo_stays_small_while_there_is_work_for_all() {
        let s = specialisation(Kernel::Forward, 768, 4, 4, Dtype::Bf16);
        let plan = Plan::new(&s, &LARGE, &Default::default()).unwrap();
        let chunk = |tokens| planned_chunk(&s, &plan, plan.wave(&LARGE), &LARGE, tokens);
        assert_eq!(chunk(132 * 40), 30);
        assert_eq!(chunk(132 * 8), 8);
    }
}
