//! Registers the operators with torch's dispatcher, and tells Python why they refuse a call.

use std::ffi::CString;

use pyo3::exceptions::{PyImportError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::arguments::Arguments;
use crate::cpu::simd::dispatch::level_name;
use crate::error::Error;
use crate::torch::dispatch::{self, OPERATORS, Operator};
use crate::torch::run::Run;

/// Registers the kernels of an operator for dispatch keys such as `CPU`. `libtorch_cpu` is the path of torch's library,
/// and each of the `arguments` is as in the schema, `Tensor? compress`.
#[pyfunction]
pub fn register(libtorch_cpu: &str, name: &str, arguments: Vec<String>, keys: Vec<CString>) -> PyResult<()> {
    dispatch::register(libtorch_cpu, name, arguments, &keys).map_err(|reason| {
        PyImportError::new_err(format!("ddl-rs needs a torch of version 2.10 or newer: {reason}"))
    })
}

/// Returns the operator of this name.
pub fn operator_named(name: &str) -> PyResult<Operator> {
    let refusal = || PyValueError::new_err(format!("`operator` must be one of ddl's, got {name:?}"));
    OPERATORS.iter().find(|(known, _)| *known == name).map(|(_, operator)| *operator).ok_or_else(refusal)
}

/// Raises what the operator would refuse these arguments with. A tensor among them is described by (shape, dtype as in
/// "float32", device as in "cuda:0"); all others are as in the call.
#[pyfunction]
pub fn check(operator: &str, arguments: Py<PyDict>) -> PyResult<()> {
    match operator_named(operator)?(&mut Arguments(arguments), &mut Run::checking()) {
        Ok(()) | Err(Error::Checked) => Ok(()),
        Err(refusal) => Err(refusal.into()),
    }
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
