//! Checks that a GPU can be used, and compiles for it ahead of time.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::arguments::Arguments;
use super::registration::operator_named;
use crate::cuda::compile::{Built, nvrtc};
use crate::cuda::device::ahead_of_time::AheadOfTime;
use crate::cuda::device::gpu::gpu;
use crate::torch::run::Run;

/// Sets the directories that hold torch and the libraries installed beside it: a site-packages, a prefix.
#[pyfunction]
pub fn search_nvrtc_in(directories: Vec<PathBuf>) {
    nvrtc::look_in(directories);
}

/// Returns the reason for which `cuda:index` cannot be used, None if it can.
#[pyfunction]
pub fn why_unavailable(py: Python<'_>, index: usize) -> Option<String> {
    py.detach(|| gpu(index).err().map(|reason| reason.to_string()))
}

/// Lists the kernels of calls and compiles them, for an architecture like `sm_90`, or for `cuda:index`.
#[pyclass]
pub struct Warmup(Arc<AheadOfTime>);

#[pymethods]
impl Warmup {
    #[new]
    #[pyo3(signature = (architecture, index))]
    fn new(py: Python<'_>, architecture: Option<String>, index: usize) -> PyResult<Warmup> {
        let device = py.detach(|| match architecture {
            Some(architecture) => AheadOfTime::new(&architecture),
            None => Ok(AheadOfTime::for_gpu(gpu(index)?)),
        })?;
        Ok(Warmup(Arc::new(device)))
    }

    /// Lists the kernels that a call of `operator` launches. A tensor among the arguments is described by
    /// (shape, dtype as in "float32", bytes from an aligned address); all others are as in the call.
    fn add(&self, operator: &str, arguments: Py<PyDict>) -> PyResult<()> {
        Ok(operator_named(operator)?(&mut Arguments(arguments), &mut Run::listing(self.0.clone()))?)
    }

    /// Compiles the listed kernels; returns a dictionary for each, with the fields of `ddl.cuda.Kernel`.
    fn compile<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let built = py.detach(|| self.0.compile())?;
        built.iter().map(|kernel| described_kernel(py, kernel)).collect()
    }
}

fn described_kernel<'py>(py: Python<'py>, kernel: &Built) -> PyResult<Bound<'py, PyDict>> {
    let (binary, fields) = (&kernel.binary, PyDict::new(py));
    fields.set_item("name", kernel.specialisation.kernel().name())?;
    fields.set_item("architecture", kernel.target.to_string())?;
    fields.set_item("macros", kernel.macros())?;
    fields.set_item("registers", binary.registers)?;
    fields.set_item("spilled", binary.spilled)?;
    fields.set_item("shared", binary.shared as usize + kernel.plan.shared)?;
    fields.set_item("seconds", kernel.seconds)?;
    fields.set_item("cached", kernel.cached)?;
    Ok(fields)
}
