//! Registers the operators with torch's dispatcher, and tells Python what they expect and why they refuse.

use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;

use crate::cpu::simd::dispatch::level_name;
use crate::error::Error;
use crate::torch::dispatch::{self, OPERATORS};

/// Registers the CPU and CUDA kernels of all operators. `libtorch_cpu` is the path of torch's library.
#[pyfunction]
pub fn register(libtorch_cpu: &str) -> PyResult<()> {
    dispatch::register(libtorch_cpu).map_err(|reason| {
        PyImportError::new_err(format!("ddl-rs needs a torch of version 2.10 or newer: {reason}"))
    })
}

/// Returns (name, schemas of the arguments, names of the outputs) of every operator.
#[pyfunction]
pub fn operators() -> Vec<(String, Vec<String>, Vec<&'static str>)> {
    let row = |operator: &dispatch::Entry| {
        let outputs = operator.outputs.split(' ').collect();
        (operator.name.into(), operator.arguments(), outputs)
    };
    OPERATORS.iter().map(row).collect()
}

/// Returns the name of the vector instructions that the CPU kernels use.
#[pyfunction]
pub fn simd_level() -> &'static str {
    level_name()
}

/// Takes this thread's last refusal if `text` begins with its sentence; None otherwise. Returns the exception to raise
/// and, if torch could not allocate memory, (bytes, device).
#[pyfunction]
#[allow(clippy::type_complexity)]
pub fn take_refusal(py: Python<'_>, text: &str) -> Option<(Py<PyAny>, Option<(usize, String)>)> {
    let refusal = dispatch::take_refusal(text)?;
    let memory = match &refusal {
        Error::Allocation { bytes, device } => Some((*bytes, device.clone())),
        _ => None,
    };
    Some((PyErr::from(refusal).into_value(py).into_any(), memory))
}
