//! Checked problems: allocates their outputs, and computes them on the device of their tensors.
//!
//! The operators on a state share one forward and one backward, in which either half may be absent.

use crate::cpu;
#[cfg(feature = "torch")]
use crate::cuda::{self, device::Call};
#[cfg(feature = "python")]
use crate::delta_rule;
use crate::error::Result;
use crate::problem::{
    Allocate, Expand, ExpandGradients, Expanded, Gradients, Incoming, Outputs, RewriteRead, Saved,
};
use crate::tensor::{Dtype, Tensor, of_dtype};
#[cfg(feature = "python")]
use crate::{
    error::Error,
    problem::{DeltaRule, SavedOverTime},
    tensor::Device,
};

/// The caller of an operator, which allocates its outputs and says where it runs.
pub trait Caller: Allocate {
    /// Returns where the operator runs: where `tensor` is.
    fn target(&self, tensor: &Tensor) -> Result<Target>;
}

/// Where an operator runs.
pub enum Target {
    Cpu {
        threads: usize,
    },
    #[cfg(feature = "torch")]
    Gpu(Box<dyn Gpu>),
}

/// A GPU, its stream, and memory that is held until the kernels are launched.
#[cfg(feature = "torch")]
pub trait Gpu {
    fn call(&self) -> Call<'_>;
}

/// Computes the outputs and what the backward needs, or a step of a sequence in pieces.
pub fn forward(problem: &RewriteRead, context_dtype: Option<Dtype>, run: &mut dyn Caller) -> Result<Outputs> {
    let mut outputs = Outputs::new(problem, context_dtype, run)?;
    match run.target(&problem.state)? {
        #[cfg(feature = "torch")]
        Target::Gpu(gpu) => cuda::rewrite_read::forward(problem, &outputs, &gpu.call()),
        Target::Cpu { threads } => of_dtype!(problem.state.dtype, T => {
            cpu::rewrite_read::forward::<T>(problem, &mut outputs, threads)
        }),
    }?;
    Ok(outputs)
}

/// Computes the gradients; see [`Gradients::new`] for `wanted` and `overwritten`.
pub fn backward(
    problem: &RewriteRead,
    incoming: &Incoming,
    saved: &Saved,
    wanted: i64,
    overwritten: Option<Tensor>,
    run: &mut dyn Caller,
) -> Result<Gradients> {
    problem.check_saved(saved)?;
    problem.check_incoming(incoming)?;
    let mut gradients = Gradients::new(problem, wanted, overwritten, run)?;
    if gradients.in_place {
        check_overwritten(problem, saved, incoming, &gradients)?;
    }
    match run.target(&problem.state)? {
        #[cfg(feature = "torch")]
        Target::Gpu(gpu) => cuda::rewrite_read::backward(problem, saved, incoming, &gradients, &gpu.call()),
        Target::Cpu { threads } => of_dtype!(problem.state.dtype, T => {
            cpu::rewrite_read::backward::<T>(problem, saved, incoming, &mut gradients, threads)
        }),
    }?;
    Ok(gradients)
}

/// Fails if the gradient that is overwritten does not fit, or overlaps a tensor whose rows are read. Parameters need no
/// check: they are copied before the first row is overwritten.
fn check_overwritten(
    problem: &RewriteRead,
    saved: &Saved,
    incoming: &Incoming,
    gradients: &Gradients,
) -> Result<()> {
    let Some(to) = gradients.state.as_ref() else { return Ok(()) };
    problem.check(to, &problem.state.shape, &[problem.state.dtype])?;
    let saved = [&saved.stats, &saved.new_value, &saved.new_gate, &saved.compressed, &saved.rstd];
    let grads = [&incoming.grad_context, &incoming.grad_new_value, &incoming.grad_new_gate];
    let rewrites = problem.rewrite.iter().chain(problem.chain.iter().map(|link| &link.write));
    let rows = saved.into_iter().chain(grads).flatten().chain(problem.chain.iter().map(|link| &link.stats));
    let rows = rows.chain(rewrites.flat_map(|write| write.tensors())).chain([&problem.state]);
    rows.chain(&problem.document_starts).try_for_each(|row| to.expect_disjoint(row))
}

/// Computes the state and, if `in_pieces`, what its tokens leave for the next.
pub fn expand(problem: &Expand, in_pieces: bool, run: &mut dyn Caller) -> Result<Expanded> {
    let x = &problem.x;
    let mut state = run.output("state", &problem.state_shape(), x.dtype, x)?;
    let before = problem.before_shape().filter(|_| in_pieces);
    let mut new_before = run.optional_output("new_before", before.as_deref(), x.dtype, x)?;
    match run.target(x)? {
        #[cfg(feature = "torch")]
        Target::Gpu(gpu) => cuda::expand::forward(problem, &state, &new_before, &gpu.call()),
        Target::Cpu { threads } => of_dtype!(x.dtype, T => {
            cpu::expand::forward::<T>(problem, &mut state, threads)
                .and_then(|()| cpu::expand::leave::<<T as cpu::state::Stored>::Accum>(problem, &mut new_before))
        })
        .map_err(|short| short.in_operator("expand")),
    }?;
    Ok(Expanded { state, new_before })
}

/// Computes the gradients of x and, if bit 1 of `wanted` is set, of the weight.
pub fn expand_backward(
    problem: &Expand,
    grad_state: &Tensor,
    wanted: i64,
    run: &mut dyn Caller,
) -> Result<ExpandGradients> {
    problem.check_gradient(grad_state)?;
    let mut x = run.output_like("grad_x", &problem.x)?;
    let mut weight = run.gradient("grad_weight", &problem.weight, wanted, 1)?;
    match run.target(&problem.x)? {
        #[cfg(feature = "torch")]
        Target::Gpu(gpu) => cuda::expand::backward(problem, grad_state, &x, &weight, &gpu.call()),
        Target::Cpu { threads } => of_dtype!(problem.x.dtype, T => {
            cpu::expand::backward::<T>(problem, grad_state, &mut x, &mut weight, threads)
        })
        .map_err(|short| short.in_operator("expand")),
    }?;
    Ok(ExpandGradients { x, weight })
}

/// Computes y and the final state and, if it `saves`, what the backward needs. On CPUs alone.
#[cfg(feature = "python")]
pub fn delta_rule(problem: &DeltaRule, saves: bool, run: &mut dyn Caller) -> Result<()> {
    let (small, beside) = (problem.small(), &problem.q);
    let y = run.output("y", &problem.y_shape(), problem.v.dtype, beside)?;
    let final_state = run.output("final_state", &problem.state_shape(), small, beside)?;
    let saved = if saves {
        let states = problem.states_shape(delta_rule::chunks(problem.sizes));
        let errors = run.output("errors", &problem.errors_shape(), small, beside)?;
        Some([errors, run.output("states", &states, small, beside)?])
    } else {
        run.absent_output()?;
        run.absent_output()?;
        None
    };
    let mut outputs = delta_rule::forward::Outputs { y, final_state, saved };
    let threads = threads(run, beside)?;
    match small {
        Dtype::F64 => delta_rule::forward::forward::<f64>(problem, &mut outputs, threads),
        _ => delta_rule::forward::forward::<f32>(problem, &mut outputs, threads),
    }
    .map_err(|short| short.in_operator("delta_rule"))
}

/// Computes the gradients of q, k, v and β and, if bits 4 and 5 of `wanted` are set, of g and the initial state.
#[cfg(feature = "python")]
pub fn delta_rule_backward(
    problem: &DeltaRule,
    saved: &SavedOverTime,
    wanted: i64,
    run: &mut dyn Caller,
) -> Result<()> {
    problem.check_saved(saved, delta_rule::chunks(problem.sizes))?;
    let mut gradients = delta_rule::backward::Gradients {
        q: run.output_like("grad_q", &problem.q)?,
        k: run.output_like("grad_k", &problem.k)?,
        v: run.output_like("grad_v", &problem.v)?,
        beta: run.output_like("grad_beta", &problem.beta)?,
        g: run.gradient("grad_g", &problem.g, wanted, 4)?,
        initial_state: run.gradient("grad_initial_state", &problem.initial_state, wanted, 5)?,
    };
    let threads = threads(run, &problem.q)?;
    match problem.small() {
        Dtype::F64 => delta_rule::backward::backward::<f64>(problem, saved, &mut gradients, threads),
        _ => delta_rule::backward::backward::<f32>(problem, saved, &mut gradients, threads),
    }
    .map_err(|short| short.in_operator("delta_rule_backward"))
}

/// Returns the threads of an operator that runs on CPUs alone; fails if `tensor` is elsewhere.
#[cfg(feature = "python")]
fn threads(run: &dyn Caller, tensor: &Tensor) -> Result<usize> {
    match run.target(tensor)? {
        Target::Cpu { threads } => Ok(threads),
        Target::Gpu(_) => {
            let (expected, got) = (Device::Cpu.to_string(), tensor.device.to_string());
            Err(Error::Device { name: tensor.name, expected, got })
        }
    }
}
