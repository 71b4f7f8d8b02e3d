//! The operators' entry points. They borrow and check the tensors, release the GIL and dispatch. Only `ddl.ops`
//! calls them.

use pyo3::prelude::*;

use super::arguments::{
    Any, ReadArguments, RewriteArguments, Saved, borrow_optional, incoming_gradients, outgoing_gradients,
    parameter, problem, saved, take_in_place,
};
use super::borrow::borrow;
use super::device::{Resources, on_device};
use crate::problem::Expand;
use crate::tensor::Dtype;
use crate::{cpu, cuda};

/// Forward of `rewrite` (read None), `read` (rewrite None) or `rewrite_read`, into allocated outputs.
#[pyfunction]
#[pyo3(signature = (state, rewrite, read, outputs, threads, stream=0, allocate=None))]
#[allow(clippy::too_many_arguments)]
pub fn rewrite_read(
    py: Python<'_>,
    state: Any<'_>,
    rewrite: Option<RewriteArguments<'_>>,
    read: Option<ReadArguments<'_>>,
    outputs: Saved<'_>,
    threads: usize,
    stream: u64,
    allocate: Option<Any<'_>>,
) -> PyResult<()> {
    let problem = problem(&state, rewrite, read)?;
    let mut outputs = saved(&problem, &outputs)?;
    let resources = Resources { stream, allocate };
    if on_device(py, &problem.state, &state, resources, |call| {
        cuda::rewrite_read::forward(&problem, &outputs, call)
    })? {
        return Ok(());
    }
    let done = py.detach(|| match problem.double() {
        true => cpu::rewrite_read::forward::<f64>(&problem, &mut outputs, threads),
        false => cpu::rewrite_read::forward::<f32>(&problem, &mut outputs, threads),
    });
    Ok(done.map_err(|short| short.in_operator(problem.operator()))?)
}

/// Backward of `rewrite_read`; `incoming` are gradients of (state, context, value, gate), `gradients` those of
/// (state, direction, value, gate, compress, norm_weight, gate_weight, gate_bias, value_weight, value_bias).
/// On a CPU one tensor may be both gradients of the state.
#[pyfunction]
#[pyo3(signature = (state, rewrite, read, outputs, incoming, gradients, threads, stream=0, allocate=None))]
#[allow(clippy::too_many_arguments)]
pub fn rewrite_read_backward(
    py: Python<'_>,
    state: Any<'_>,
    rewrite: Option<RewriteArguments<'_>>,
    read: Option<ReadArguments<'_>>,
    outputs: Saved<'_>,
    incoming: [Option<Any<'_>>; 4],
    gradients: [Option<Any<'_>>; 10],
    threads: usize,
    stream: u64,
    allocate: Option<Any<'_>>,
) -> PyResult<()> {
    let problem = problem(&state, rewrite, read)?;
    let saved = saved(&problem, &outputs)?;
    let mut incoming = incoming_gradients(&problem, &incoming)?;
    let mut gradients = outgoing_gradients(&problem, &gradients)?;
    let resources = Resources { stream, allocate };
    if on_device(py, &problem.state, &state, resources, |call| {
        cuda::rewrite_read::backward(&problem, &saved, &incoming, &gradients, call)
    })? {
        return Ok(());
    }
    take_in_place(&problem, &saved, &mut incoming, &gradients)?;
    let done = py.detach(|| match problem.double() {
        true => cpu::rewrite_read::backward::<f64>(&problem, &saved, &incoming, &mut gradients, threads),
        false => cpu::rewrite_read::backward::<f32>(&problem, &saved, &incoming, &mut gradients, threads),
    });
    Ok(done.map_err(|short| short.in_operator(problem.operator()))?)
}

/// Forward of `expand` into the allocated `state`.
#[pyfunction]
#[pyo3(signature = (x, weight, state, threads, stream=0, allocate=None))]
pub fn expand_forward(
    py: Python<'_>,
    x: Any<'_>,
    weight: Option<Any<'_>>,
    state: Any<'_>,
    threads: usize,
    stream: u64,
    allocate: Option<Any<'_>>,
) -> PyResult<()> {
    let like = x;
    let (x, weight) = (borrow("x", &like)?, borrow_optional("weight", &weight)?);
    let mut state = borrow("state", &state)?;
    let problem = Expand::new(&x, weight, &state)?;
    let resources = Resources { stream, allocate };
    if on_device(py, &x, &like, resources, |call| cuda::expand::forward(&problem, &x, &state, call))? {
        return Ok(());
    }
    let done = py.detach(|| match x.dtype {
        Dtype::F64 => cpu::expand::forward::<f64>(&problem, &x, &mut state, threads),
        _ => cpu::expand::forward::<f32>(&problem, &x, &mut state, threads),
    });
    Ok(done.map_err(|short| short.in_operator("expand"))?)
}

/// Backward of `expand`: `grad` of the state into `grad_x` and, with a weight, `grad_weight`.
#[pyfunction]
#[pyo3(signature = (x, weight, grad, grad_x, grad_weight, threads, stream=0, allocate=None))]
#[allow(clippy::too_many_arguments)]
pub fn expand_backward(
    py: Python<'_>,
    x: Any<'_>,
    weight: Option<Any<'_>>,
    grad: Any<'_>,
    grad_x: Any<'_>,
    grad_weight: Option<Any<'_>>,
    threads: usize,
    stream: u64,
    allocate: Option<Any<'_>>,
) -> PyResult<()> {
    let like = x;
    let (x, weight) = (borrow("x", &like)?, borrow_optional("weight", &weight)?);
    let grad = borrow("grad_state", &grad)?;
    let mut grad_x = borrow("grad_x", &grad_x)?;
    let problem = Expand::new(&x, weight, &grad)?;
    grad_x.expect_shape(&x.shape)?;
    grad_x.expect_beside(&x)?;
    grad_x.expect_dtype(&[x.dtype])?;
    let mut grad_weight = parameter("grad_weight", &grad_weight, problem.weight.as_ref())?;
    let resources = Resources { stream, allocate };
    if on_device(py, &x, &like, resources, |call| {
        cuda::expand::backward(&problem, &x, &grad, &grad_x, &grad_weight, call)
    })? {
        return Ok(());
    }
    let done = py.detach(|| match x.dtype {
        Dtype::F64 => {
            cpu::expand::backward::<f64>(&problem, &x, &grad, &mut grad_x, &mut grad_weight, threads)
        }
        _ => cpu::expand::backward::<f32>(&problem, &x, &grad, &mut grad_x, &mut grad_weight, threads),
    });
    Ok(done.map_err(|short| short.in_operator("expand"))?)
}
