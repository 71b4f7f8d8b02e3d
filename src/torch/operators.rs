//! `ddl._native`: borrow the tensors, check them, release the GIL, dispatch. Only `ops.py` calls it.

mod device;

use pyo3::prelude::*;

use self::device::on_device;
use crate::cpu::backward::{self, Gradients, Incoming};
use crate::cpu::expand;
use crate::cpu::forward::{self, Outputs};
use crate::cuda;
use crate::error::Error;
use crate::problem::{Boundary, Expand, Read, Rewrite};
use crate::tensor::{Dtype, Tensor};

type Any<'py> = Bound<'py, PyAny>;

/// (direction, value, gate, eps_k)
#[derive(FromPyObject)]
struct RewriteArguments<'py>(Any<'py>, Any<'py>, Any<'py>, f64);

/// (compress, norm_weight, norm_eps, gate_weight, gate_bias, value_weight, value_bias, value_scale,
/// value_from_compressed)
#[derive(FromPyObject)]
struct ReadArguments<'py>(
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
type Saved<'py> = [Option<Any<'py>>; 7];

/// What a call on a GPU works with: torch's stream, and `allocate(like, bytes)` for memory beside a tensor.
struct Resources<'py> {
    stream: u64,
    allocate: Option<Any<'py>>,
}

/// Forward of `rewrite` (read None), `read` (rewrite None) or `rewrite_read`, into allocated outputs.
#[pyfunction]
#[pyo3(signature = (state, rewrite, read, outputs, threads, stream=0, allocate=None))]
#[allow(clippy::too_many_arguments)]
fn rewrite_read(
    py: Python<'_>,
    state: Any<'_>,
    rewrite: Option<RewriteArguments<'_>>,
    read: Option<ReadArguments<'_>>,
    outputs: Saved<'_>,
    threads: usize,
    stream: u64,
    allocate: Option<Any<'_>>,
) -> PyResult<()> {
    let boundary = boundary(&state, rewrite, read)?;
    let mut outputs = saved(&boundary, &outputs)?;
    let resources = Resources { stream, allocate };
    if on_device(py, &boundary.state, &state, resources, |call| {
        cuda::boundary::forward(&boundary, &outputs, call)
    })? {
        return Ok(());
    }
    let done = py.detach(|| match boundary.double() {
        true => forward::forward::<f64>(&boundary, &mut outputs, threads),
        false => forward::forward::<f32>(&boundary, &mut outputs, threads),
    });
    Ok(done.map_err(|short| short.of(boundary.operator()))?)
}

/// Backward of the same; `incoming` are gradients of (state, context, value, gate), `gradients` those of
/// (state, direction, value, gate, compress, norm_weight, gate_weight, gate_bias, value_weight, value_bias).
/// On a CPU one tensor may be both gradients of the state.
#[pyfunction]
#[pyo3(signature = (state, rewrite, read, outputs, incoming, gradients, threads, stream=0, allocate=None))]
#[allow(clippy::too_many_arguments)]
fn rewrite_read_backward(
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
    let boundary = boundary(&state, rewrite, read)?;
    let saved = saved(&boundary, &outputs)?;
    let mut incoming = incoming_gradients(&boundary, &incoming)?;
    let mut gradients = outgoing_gradients(&boundary, &gradients)?;
    let resources = Resources { stream, allocate };
    if on_device(py, &boundary.state, &state, resources, |call| {
        cuda::boundary::backward(&boundary, &saved, &incoming, &gradients, call)
    })? {
        return Ok(());
    }
    take_in_place(&boundary, &saved, &mut incoming, &gradients)?;
    let done = py.detach(|| match boundary.double() {
        true => backward::backward::<f64>(&boundary, &saved, &incoming, &mut gradients, threads),
        false => backward::backward::<f32>(&boundary, &saved, &incoming, &mut gradients, threads),
    });
    Ok(done.map_err(|short| short.of(boundary.operator()))?)
}

/// Forward of `expand` into the allocated `state`.
#[pyfunction]
#[pyo3(signature = (x, weight, state, threads, stream=0, allocate=None))]
fn expand_forward(
    py: Python<'_>,
    x: Any<'_>,
    weight: Option<Any<'_>>,
    state: Any<'_>,
    threads: usize,
    stream: u64,
    allocate: Option<Any<'_>>,
) -> PyResult<()> {
    let like = x;
    let (x, weight) = (Tensor::borrow("x", &like)?, borrow("weight", &weight)?);
    let mut state = Tensor::borrow("state", &state)?;
    let problem = Expand::new(&x, weight, &state)?;
    let resources = Resources { stream, allocate };
    if on_device(py, &x, &like, resources, |call| cuda::expand::forward(&problem, &x, &state, call))? {
        return Ok(());
    }
    let done = py.detach(|| match x.dtype {
        Dtype::F64 => expand::forward::<f64>(&problem, &x, &mut state, threads),
        _ => expand::forward::<f32>(&problem, &x, &mut state, threads),
    });
    Ok(done.map_err(|short| short.of("expand"))?)
}

/// Backward of `expand`: `grad` of the state into `grad_x` and, with a weight, `grad_weight`.
#[pyfunction]
#[pyo3(signature = (x, weight, grad, grad_x, grad_weight, threads, stream=0, allocate=None))]
#[allow(clippy::too_many_arguments)]
fn expand_backward(
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
    let (x, weight) = (Tensor::borrow("x", &like)?, borrow("weight", &weight)?);
    let grad = Tensor::borrow("grad_state", &grad)?;
    let mut grad_x = Tensor::borrow("grad_x", &grad_x)?;
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
        Dtype::F64 => expand::backward::<f64>(&problem, &x, &grad, &mut grad_x, &mut grad_weight, threads),
        _ => expand::backward::<f32>(&problem, &x, &grad, &mut grad_x, &mut grad_weight, threads),
    });
    Ok(done.map_err(|short| short.of("expand"))?)
}

fn borrow(name: &'static str, object: &Option<Any<'_>>) -> PyResult<Option<Tensor>> {
    object.as_ref().map(|object| Tensor::borrow(name, object)).transpose()
}

fn boundary(
    state: &Any<'_>,
    rewrite: Option<RewriteArguments<'_>>,
    read: Option<ReadArguments<'_>>,
) -> PyResult<Boundary> {
    let rewrite = rewrite.map(|RewriteArguments(direction, value, gate, eps_k)| {
        PyResult::Ok(Rewrite {
            direction: Tensor::borrow("direction", &direction)?,
            value: Tensor::borrow("value", &value)?,
            gate: Tensor::borrow("gate", &gate)?,
            eps_k,
        })
    });
    let read = read.map(|a| {
        PyResult::Ok(Read {
            compress: borrow("compress", &a.0)?,
            norm_weight: borrow("norm_weight", &a.1)?,
            norm_eps: a.2,
            gate_weight: borrow("gate_weight", &a.3)?,
            gate_bias: borrow("gate_bias", &a.4)?,
            value_weight: borrow("value_weight", &a.5)?,
            value_bias: borrow("value_bias", &a.6)?,
            value_scale: a.7,
            value_from_compressed: a.8,
        })
    });
    let state = Tensor::borrow("state", state)?;
    Ok(Boundary::new(state, rewrite.transpose()?, read.transpose()?)?)
}

/// Outputs of the forward: allocated for it, or saved by it for the backward.
fn saved(boundary: &Boundary, outputs: &Saved<'_>) -> PyResult<Outputs> {
    let (d, m) = (boundary.sizes.d, boundary.sizes.m);
    let [state, stats, context, value, gate, compressed, rstd] = outputs;
    let saved = Outputs {
        state: stored(boundary, "new_state", state, &[d, m])?,
        stats: small(boundary, "stats", stats, &[1 + m])?,
        context: stored(boundary, "context", context, &[d])?,
        value: small(boundary, "new_value", value, &[m])?,
        gate: small(boundary, "new_gate", gate, &[])?,
        compressed: stored(boundary, "compressed", compressed, &[d])?,
        rstd: small(boundary, "rstd", rstd, &[])?,
    };
    let read = boundary.read.as_ref();
    for (name, missing) in [
        ("stats", boundary.rewrite.is_some() && saved.stats.is_none()),
        ("rstd", read.is_some_and(|read| read.norm_eps.is_some()) && saved.rstd.is_none()),
        ("compressed", read.is_some_and(Read::over_time) != saved.compressed.is_some()),
    ] {
        if missing {
            return Err(Error::Argument(format!("`{name}` does not go with this boundary")).into());
        }
    }
    Ok(saved)
}

fn incoming_gradients(
    boundary: &Boundary,
    [state, context, value, gate]: &[Option<Any<'_>>; 4],
) -> PyResult<Incoming> {
    let (d, m) = (boundary.sizes.d, boundary.sizes.m);
    Ok(Incoming {
        state: stored(boundary, "grad_state", state, &[d, m])?,
        context: stored(boundary, "grad_context", context, &[d])?,
        value: small(boundary, "grad_value", value, &[m])?,
        gate: small(boundary, "grad_gate", gate, &[])?,
        in_place: false,
    })
}

/// One tensor as both gradients of the state is borrowed once, as the output, apart from all other rows.
fn take_in_place(
    boundary: &Boundary,
    saved: &Outputs,
    incoming: &mut Incoming,
    gradients: &Gradients,
) -> PyResult<()> {
    let (Some(from), Some(to)) = (&incoming.state, &gradients.state) else { return Ok(()) };
    if from.address() != to.address() || from.is_empty() {
        return Ok(());
    }
    let rewrite = boundary.rewrite.as_ref().map(|r| [&r.direction, &r.value, &r.gate]);
    let saved = [&saved.stats, &saved.value, &saved.gate, &saved.compressed, &saved.rstd];
    let grads = [&incoming.context, &incoming.value, &incoming.gate];
    let rows = saved.into_iter().chain(grads).flatten();
    for row in rows.chain(rewrite.into_iter().flatten()).chain([&boundary.state]) {
        to.expect_apart(row)?;
    }
    incoming.in_place = true;
    incoming.state = None;
    Ok(())
}

fn outgoing_gradients(boundary: &Boundary, gradients: &[Option<Any<'_>>; 10]) -> PyResult<Gradients> {
    let (d, m) = (boundary.sizes.d, boundary.sizes.m);
    let [state, direction, value, gate, ..] = gradients;
    let read = boundary.read.as_ref();
    let parameter = |name, at: usize, like| parameter(name, &gradients[at], like);
    Ok(Gradients {
        state: stored(boundary, "grad_state", state, &[d, m])?,
        direction: stored(boundary, "grad_direction", direction, &[d])?,
        value: small(boundary, "grad_value", value, &[m])?,
        gate: small(boundary, "grad_gate", gate, &[])?,
        compress: parameter("grad_compress", 4, read.and_then(|read| read.compress.as_ref()))?,
        norm_weight: parameter("grad_norm_weight", 5, read.and_then(|read| read.norm_weight.as_ref()))?,
        gate_weight: parameter("grad_gate_weight", 6, read.and_then(|read| read.gate_weight.as_ref()))?,
        gate_bias: parameter("grad_gate_bias", 7, read.and_then(|read| read.gate_bias.as_ref()))?,
        value_weight: parameter("grad_value_weight", 8, read.and_then(|read| read.value_weight.as_ref()))?,
        value_bias: parameter("grad_value_bias", 9, read.and_then(|read| read.value_bias.as_ref()))?,
    })
}

/// The gradient of a parameter, which it has to be like.
fn parameter(
    name: &'static str,
    object: &Option<Any<'_>>,
    like: Option<&Tensor>,
) -> PyResult<Option<Tensor>> {
    let Some(gradient) = borrow(name, object)? else { return Ok(None) };
    let Some(like) = like else {
        return Err(Error::Argument(format!("`{name}` must be None without its parameter")).into());
    };
    gradient.expect_shape(&like.shape)?;
    gradient.expect_beside(like)?;
    gradient.expect_dtype(&[like.dtype])?;
    Ok(Some(gradient))
}

/// An optional tensor of the state's leading shape, in any stored dtype.
fn stored(
    boundary: &Boundary,
    name: &'static str,
    object: &Option<Any<'_>>,
    last: &[usize],
) -> PyResult<Option<Tensor>> {
    let tensor = borrow(name, object)?;
    tensor.as_ref().map_or(Ok(()), |tensor| boundary.check_stored(tensor, last))?;
    Ok(tensor)
}

/// The same in the accumulation dtype.
fn small(
    boundary: &Boundary,
    name: &'static str,
    object: &Option<Any<'_>>,
    last: &[usize],
) -> PyResult<Option<Tensor>> {
    let tensor = borrow(name, object)?;
    tensor.as_ref().map_or(Ok(()), |tensor| boundary.check_gate(tensor, last))?;
    Ok(tensor)
}

/// Native part of ddl-rs; use `ddl.functional`.
#[pymodule]
pub fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(rewrite_read, module)?)?;
    module.add_function(wrap_pyfunction!(rewrite_read_backward, module)?)?;
    module.add_function(wrap_pyfunction!(expand_forward, module)?)?;
    module.add_function(wrap_pyfunction!(expand_backward, module)?)?;
    device::add_functions(module)?;
    Ok(())
}
