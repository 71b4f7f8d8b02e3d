//! The operators on NumPy arrays, for `ddl.arrays`: arguments and results are dictionaries, by the names of the schema.

use numpy::get_array_module;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::arguments::{Arguments, view};
use super::registration::operator_named;
use crate::error::{Error, Result};
use crate::execute::{Caller, Target};
use crate::problem::Allocate;
use crate::tensor::{Dtype, Tensor};

/// Returns the outputs of an operator that are there. An argument that is left out is None, 0 or false. `threads`: to use
/// at most; None for one per processor.
#[pyfunction]
pub fn on_arrays(
    py: Python<'_>,
    operator: &str,
    arguments: Py<PyDict>,
    threads: Option<usize>,
) -> PyResult<Py<PyDict>> {
    let operator = operator_named(operator)?;
    let processors = || std::thread::available_parallelism().map_or(1, |count| count.get());
    let results = PyDict::new(py).unbind();
    let mut call = NumPy { results: results.clone_ref(py), threads: threads.unwrap_or_else(processors) };
    let mut source = Arguments(arguments);
    // Without Python's lock, which is taken for each argument and output. The dictionaries keep the arrays alive.
    py.detach(|| operator(&mut source, &mut call))?;
    Ok(results)
}

/// NumPy allocates every output, and raises its own error if memory is short.
struct NumPy {
    results: Py<PyDict>,
    threads: usize,
}

impl Allocate for NumPy {
    fn output(&mut self, name: &'static str, shape: &[usize], dtype: Dtype, _: &Tensor) -> Result<Tensor> {
        Python::attach(|py| {
            let dtype = dtype.name().trim_start_matches("torch.");
            let empty = || get_array_module(py)?.call_method1("empty", (shape, dtype));
            let array = empty().map_err(Error::Python)?;
            self.results.bind(py).set_item(name, &array).map_err(Error::Python)?;
            view(name, array.cast().expect("an array"))
        })
    }

    fn absent_output(&mut self) -> Result<Option<Tensor>> {
        Ok(None)
    }

    fn joins(&self) -> bool {
        true
    }
}

impl Caller for NumPy {
    fn target(&self, _: &Tensor) -> Result<Target> {
        Ok(Target::Cpu { threads: self.threads })
    }
}
