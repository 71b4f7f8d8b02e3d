//! The operators' calls: each allocates its outputs and chooses a backend. The operators on a state share one forward
//! and one backward, in which either half may be absent.

use super::run::Run;
use crate::cuda::device::Call;
use crate::error::Result;
use crate::problem::{Allocate, Expand, Gradients, Incoming, Outputs, RewriteRead};
use crate::tensor::{Dtype, Tensor};
use crate::{cpu, cuda};

/// Computes a step of a sequence in pieces.
pub fn cached(problem: RewriteRead, context_dtype: Option<Dtype>, run: &mut Run) -> Result<()> {
    let mut outputs = Outputs::for_cached_step(&problem, context_dtype, run)?;
    fill(&problem, &mut outputs, run)
}

/// Computes the outputs, and what the backward needs.
pub fn forward(problem: RewriteRead, context_dtype: Option<Dtype>, run: &mut Run) -> Result<()> {
    let mut outputs = Outputs::new(&problem, context_dtype, run)?;
    fill(&problem, &mut outputs, run)
}

fn fill(problem: &RewriteRead, outputs: &mut Outputs, run: &Run) -> Result<()> {
    let launch = |call: &Call<'_>| cuda::rewrite_read::forward(problem, outputs, call);
    let Some(threads) = run.on_device(&problem.state, launch)? else { return Ok(()) };
    let done = match problem.double() {
        true => cpu::rewrite_read::forward::<f64>(problem, outputs, threads),
        false => cpu::rewrite_read::forward::<f32>(problem, outputs, threads),
    };
    done.map_err(|short| short.in_operator(problem.operator()))
}

/// Allocates the gradients and fills them. `wanted` has a bit for each, the state's first; only parameters heed it.
/// `overwritten` is a gradient of X' that becomes the state's.
pub fn backward(
    problem: RewriteRead,
    incoming: Incoming,
    saved: Outputs,
    wanted: i64,
    overwritten: Option<Tensor>,
    run: &mut Run,
) -> Result<()> {
    saved.check_saved(&problem)?;
    incoming.check(&problem)?;
    let mut gradients = Gradients::new(&problem, wanted, overwritten, run)?;
    if gradients.in_place {
        check_overwritten(&problem, &saved, &incoming, &gradients)?;
    }
    let launch =
        |call: &Call<'_>| cuda::rewrite_read::backward(&problem, &saved, &incoming, &gradients, call);
    let Some(threads) = run.on_device(&problem.state, launch)? else { return Ok(()) };
    let done = match problem.double() {
        true => cpu::rewrite_read::backward::<f64>(&problem, &saved, &incoming, &mut gradients, threads),
        false => cpu::rewrite_read::backward::<f32>(&problem, &saved, &incoming, &mut gradients, threads),
    };
    done.map_err(|short| short.in_operator(problem.operator()))
}

/// Fails if the gradient that is overwritten does not fit, or overlaps a tensor whose rows are read. Parameters need no
/// check: they are copied before the first row is overwritten.
fn check_overwritten(
    problem: &RewriteRead,
    saved: &Outputs,
    incoming: &Incoming,
    gradients: &Gradients,
) -> Result<()> {
    let Some(to) = gradients.state.as_ref() else { return Ok(()) };
    to.expect_shape(&problem.state.shape)?;
    to.expect_beside(&problem.state)?;
    to.expect_dtype(&[problem.state.dtype])?;
    let rewrite = problem.rewrite.as_ref().map(|r| [&r.direction, &r.value, &r.gate]);
    let saved = [&saved.stats, &saved.new_value, &saved.new_gate, &saved.compressed, &saved.rstd];
    let grads = [&incoming.grad_context, &incoming.grad_new_value, &incoming.grad_new_gate];
    let links = problem.chain.iter().flat_map(|link| [&link.direction, &link.value, &link.gate, &link.stats]);
    let rows = saved.into_iter().chain(grads).flatten().chain(links);
    let rows = rows.chain(rewrite.into_iter().flatten()).chain([&problem.state]);
    rows.chain(&problem.document_starts).try_for_each(|row| to.expect_apart(row))
}

/// Computes the state.
pub fn expand(problem: &Expand, run: &mut Run) -> Result<()> {
    let state = run.output("state", &problem.state_shape(), problem.x.dtype, &problem.x)?;
    fill_state(problem, state, None, run)
}

/// Computes the state, and what its tokens leave for the next.
pub fn cached_expand(problem: &Expand, run: &mut Run) -> Result<()> {
    let (shape, x) = (problem.before_shape(), &problem.x);
    let state = run.output("state", &problem.state_shape(), x.dtype, x)?;
    let wanted = shape.is_some();
    let new_before = run.optional_output(wanted, "new_before", &shape.unwrap_or_default(), x.dtype, x)?;
    fill_state(problem, state, new_before, run)
}

fn fill_state(problem: &Expand, mut state: Tensor, mut new_before: Option<Tensor>, run: &Run) -> Result<()> {
    let launch = |call: &Call<'_>| cuda::expand::forward(problem, &state, &new_before, call);
    let Some(threads) = run.on_device(&problem.x, launch)? else { return Ok(()) };
    let done = match problem.x.dtype {
        Dtype::F64 => cpu::expand::forward::<f64>(problem, &mut state, threads)
            .and_then(|()| cpu::expand::leave::<f64>(problem, &mut new_before)),
        _ => cpu::expand::forward::<f32>(problem, &mut state, threads)
            .and_then(|()| cpu::expand::leave::<f32>(problem, &mut new_before)),
    };
    done.map_err(|short| short.in_operator("expand"))
}

/// Allocates the gradients of x and, if bit 1 of `wanted` is set, of the weight, and fills them.
pub fn expand_backward(problem: &Expand, grad_state: &Tensor, wanted: i64, run: &mut Run) -> Result<()> {
    problem.check_gradient(grad_state)?;
    let mut grad_x = run.output_like("grad_x", &problem.x)?;
    let mut grad_weight = match &problem.weight {
        Some(weight) if wanted >> 1 & 1 == 1 => Some(run.output_like("grad_weight", weight)?),
        _ => run.absent_output(&problem.x)?,
    };
    let launch = |call: &Call<'_>| cuda::expand::backward(problem, grad_state, &grad_x, &grad_weight, call);
    let Some(threads) = run.on_device(&problem.x, launch)? else { return Ok(()) };
    let done = match problem.x.dtype {
        Dtype::F64 => {
            cpu::expand::backward::<f64>(problem, grad_state, &mut grad_x, &mut grad_weight, threads)
        }
        _ => cpu::expand::backward::<f32>(problem, grad_state, &mut grad_x, &mut grad_weight, threads),
    };
    done.map_err(|short| short.in_operator("expand"))
}
