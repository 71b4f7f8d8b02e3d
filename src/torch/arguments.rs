//! The operators' arguments as Python passes them, borrowed and checked.

use pyo3::prelude::*;

use super::borrow::borrow;
use crate::error::Error;
use crate::problem::{Gradients, Incoming, Outputs, Read, Rewrite, RewriteRead};
use crate::tensor::Tensor;

pub type Any<'py> = Bound<'py, PyAny>;

/// (direction, value, gate, eps_k)
#[derive(FromPyObject)]
pub struct RewriteArguments<'py>(Any<'py>, Any<'py>, Any<'py>, f64);

/// (compress, norm_weight, norm_eps, gate_weight, gate_bias, value_weight, value_bias, value_scale,
/// value_from_compressed)
#[derive(FromPyObject)]
pub struct ReadArguments<'py>(
    Option<Any<'py>>,
    Option<Any<'py>>,
    Option<f64>,
    Option<Any<'py>>,
    Option<Any<'py>>,
    Option<Any<'py>>,
    Option<Any<'py>>,
    Option<f64>,
    bool,
);

/// (state, stats, context, value, gate, compressed, rstd)
pub type Saved<'py> = [Option<Any<'py>>; 7];

/// Borrows a tensor that may be None.
pub fn borrow_optional(name: &'static str, object: &Option<Any<'_>>) -> PyResult<Option<Tensor>> {
    object.as_ref().map(|object| borrow(name, object)).transpose()
}

pub fn problem(
    state: &Any<'_>,
    rewrite: Option<RewriteArguments<'_>>,
    read: Option<ReadArguments<'_>>,
) -> PyResult<RewriteRead> {
    let rewrite = rewrite.map(|RewriteArguments(direction, value, gate, eps_k)| {
        PyResult::Ok(Rewrite {
            direction: borrow("direction", &direction)?,
            value: borrow("value", &value)?,
            gate: borrow("gate", &gate)?,
            eps_k,
        })
    });
    let read = read.map(|a| {
        PyResult::Ok(Read {
            compress: borrow_optional("compress", &a.0)?,
            norm_weight: borrow_optional("norm_weight", &a.1)?,
            norm_eps: a.2,
            gate_weight: borrow_optional("gate_weight", &a.3)?,
            gate_bias: borrow_optional("gate_bias", &a.4)?,
            value_weight: borrow_optional("value_weight", &a.5)?,
            value_bias: borrow_optional("value_bias", &a.6)?,
            value_scale: a.7,
            value_from_compressed: a.8,
        })
    });
    let state = borrow("state", state)?;
    Ok(RewriteRead::new(state, rewrite.transpose()?, read.transpose()?)?)
}

/// Borrows the forward's outputs: allocated for the forward, or saved by it for the backward.
pub fn saved(problem: &RewriteRead, outputs: &Saved<'_>) -> PyResult<Outputs> {
    let (d, m) = (problem.sizes.d, problem.sizes.m);
    let [state, stats, context, value, gate, compressed, rstd] = outputs;
    let saved = Outputs {
        state: stored(problem, "new_state", state, &[d, m])?,
        stats: small(problem, "stats", stats, &[1 + m])?,
        context: stored(problem, "context", context, &[d])?,
        value: small(problem, "new_value", value, &[m])?,
        gate: small(problem, "new_gate", gate, &[])?,
        compressed: stored(problem, "compressed", compressed, &[d])?,
        rstd: small(problem, "rstd", rstd, &[])?,
    };
    let read = problem.read.as_ref();
    for (name, missing) in [
        ("stats", problem.rewrite.is_some() && saved.stats.is_none()),
        ("rstd", read.is_some_and(|read| read.norm_eps.is_some()) && saved.rstd.is_none()),
        ("compressed", read.is_some_and(Read::over_time) != saved.compressed.is_some()),
    ] {
        if missing {
            return Err(Error::Argument(format!("`{name}` must be what this rewrite and read save")).into());
        }
    }
    Ok(saved)
}

pub fn incoming_gradients(
    problem: &RewriteRead,
    [state, context, value, gate]: &[Option<Any<'_>>; 4],
) -> PyResult<Incoming> {
    let (d, m) = (problem.sizes.d, problem.sizes.m);
    Ok(Incoming {
        state: stored(problem, "grad_state", state, &[d, m])?,
        context: stored(problem, "grad_context", context, &[d])?,
        value: small(problem, "grad_value", value, &[m])?,
        gate: small(problem, "grad_gate", gate, &[])?,
        in_place: false,
    })
}

/// If one tensor is both gradients of the state, borrows it once, as the output. Fails if it overlaps an input.
pub fn take_in_place(
    problem: &RewriteRead,
    saved: &Outputs,
    incoming: &mut Incoming,
    gradients: &Gradients,
) -> PyResult<()> {
    let (Some(from), Some(to)) = (&incoming.state, &gradients.state) else { return Ok(()) };
    if from.address() != to.address() || from.is_empty() {
        return Ok(());
    }
    let rewrite = problem.rewrite.as_ref().map(|r| [&r.direction, &r.value, &r.gate]);
    let saved = [&saved.stats, &saved.value, &saved.gate, &saved.compressed, &saved.rstd];
    let grads = [&incoming.context, &incoming.value, &incoming.gate];
    let rows = saved.into_iter().chain(grads).flatten();
    for row in rows.chain(rewrite.into_iter().flatten()).chain([&problem.state]) {
        to.expect_apart(row)?;
    }
    incoming.in_place = true;
    incoming.state = None;
    Ok(())
}

pub fn outgoing_gradients(problem: &RewriteRead, gradients: &[Option<Any<'_>>; 10]) -> PyResult<Gradients> {
    let (d, m) = (problem.sizes.d, problem.sizes.m);
    let [state, direction, value, gate, ..] = gradients;
    let read = problem.read.as_ref();
    let parameter = |name, at: usize, like| parameter(name, &gradients[at], like);
    Ok(Gradients {
        state: stored(problem, "grad_state", state, &[d, m])?,
        direction: stored(problem, "grad_direction", direction, &[d])?,
        value: small(problem, "grad_value", value, &[m])?,
        gate: small(problem, "grad_gate", gate, &[])?,
        compress: parameter("grad_compress", 4, read.and_then(|read| read.compress.as_ref()))?,
        norm_weight: parameter("grad_norm_weight", 5, read.and_then(|read| read.norm_weight.as_ref()))?,
        gate_weight: parameter("grad_gate_weight", 6, read.and_then(|read| read.gate_weight.as_ref()))?,
        gate_bias: parameter("grad_gate_bias", 7, read.and_then(|read| read.gate_bias.as_ref()))?,
        value_weight: parameter("grad_value_weight", 8, read.and_then(|read| read.value_weight.as_ref()))?,
        value_bias: parameter("grad_value_bias", 9, read.and_then(|read| read.value_bias.as_ref()))?,
    })
}

/// Borrows the gradient of a parameter. Fails unless it has the parameter's shape, device and dtype.
pub fn parameter(
    name: &'static str,
    object: &Option<Any<'_>>,
    like: Option<&Tensor>,
) -> PyResult<Option<Tensor>> {
    let Some(gradient) = borrow_optional(name, object)? else { return Ok(None) };
    let Some(like) = like else {
        return Err(Error::Argument(format!("`{name}` must be None without its parameter")).into());
    };
    gradient.expect_shape(&like.shape)?;
    gradient.expect_beside(like)?;
    gradient.expect_dtype(&[like.dtype])?;
    Ok(Some(gradient))
}

/// Borrows an optional tensor of the state's leading shape, in any storage dtype.
fn stored(
    problem: &RewriteRead,
    name: &'static str,
    object: &Option<Any<'_>>,
    last: &[usize],
) -> PyResult<Option<Tensor>> {
    let tensor = borrow_optional(name, object)?;
    tensor.as_ref().map_or(Ok(()), |tensor| problem.check_stored(tensor, last))?;
    Ok(tensor)
}

/// Borrows the same in the accumulation dtype.
fn small(
    problem: &RewriteRead,
    name: &'static str,
    object: &Option<Any<'_>>,
    last: &[usize],
) -> PyResult<Option<Tensor>> {
    let tensor = borrow_optional(name, object)?;
    tensor.as_ref().map_or(Ok(()), |tensor| problem.check_gate(tensor, last))?;
    Ok(tensor)
}
