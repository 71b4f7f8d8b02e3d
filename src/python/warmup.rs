//! Checks that a GPU can be used, and compiles for it ahead of time.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::cuda::compile::{Built, nvrtc};
use crate::cuda::device::ahead_of_time::AheadOfTime;
use crate::cuda::device::gpu::gpu;
use crate::error::Result;
use crate::tensor::{Dtype, Tensor};
use crate::torch::dispatch::OPERATORS;
use crate::torch::run::Run;
use crate::torch::source::{Overwritten, Source, nothing};

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
    fn add(&self, operator: &str, arguments: &Bound<'_, PyList>) -> PyResult<()> {
        let Some(operator) = OPERATORS.iter().find(|known| known.name.to_bytes() == operator.as_bytes())
        else {
            return Err(PyValueError::new_err(format!("`operator` must be one of ddl's, got {operator:?}")));
        };
        let mut source = Described { arguments: arguments.iter().collect(), next: 0, failed: None };
        let mut run = Run::listing(self.0.clone());
        let done = (operator.run)(&mut source, &mut run);
        source.failed.map_or(Ok(()), Err)?;
        Ok(done?)
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

/// Arguments that Python describes; their tensors have no memory.
struct Described<'py> {
    arguments: Vec<Bound<'py, PyAny>>,
    next: usize,
    failed: Option<PyErr>,
}

impl<'py> Described<'py> {
    fn next(&mut self) -> Option<Bound<'py, PyAny>> {
        self.next += 1;
        self.arguments.get(self.next - 1).filter(|argument| !argument.is_none()).cloned()
    }

    /// Takes the next argument; None if it is None. A failure of `extract` is kept.
    fn extracted<T: Default>(&mut self, extract: impl FnOnce(Bound<'py, PyAny>) -> PyResult<T>) -> Option<T> {
        let extracted = extract(self.next()?);
        Some(extracted.unwrap_or_else(|failure| {
            self.failed.get_or_insert(failure);
            T::default()
        }))
    }
}

/// Makes a tensor of its description; None if it stands in for an absent one.
fn described(name: &'static str, description: &Bound<'_, PyAny>) -> PyResult<Option<Tensor>> {
    let (shape, dtype, address): (Vec<usize>, String, usize) = description.extract()?;
    if dtype == "uint8" {
        return Ok(None);
    }
    let dtype = dtype_named(&dtype)?;
    Ok(Some(Tensor::fake(name, shape, dtype, address)))
}

fn dtype_named(name: &str) -> PyResult<Dtype> {
    let mut same = Dtype::ALL.into_iter().filter(|dtype| dtype.name().strip_prefix("torch.") == Some(name));
    same.next().ok_or_else(|| PyValueError::new_err(format!("no operator takes dtype {name}")))
}

impl Source for Described<'_> {
    fn tensor(&mut self, name: &'static str) -> Tensor {
        self.saved_tensor(name).unwrap_or_else(|| {
            self.failed
                .get_or_insert_with(|| PyValueError::new_err(format!("`{name}` must be a tensor, got None")));
            nothing(name)
        })
    }

    fn optional_tensor(&mut self, name: &'static str) -> Option<Tensor> {
        self.saved_tensor(name)
    }

    fn saved_tensor(&mut self, name: &'static str) -> Option<Tensor> {
        self.extracted(|description| described(name, &description)).flatten()
    }

    fn overwritten_tensor(&mut self, name: &'static str) -> Overwritten {
        Overwritten { tensor: self.tensor(name), copy: None }
    }

    fn tensors(&mut self, name: &'static str) -> Vec<Tensor> {
        self.optional_tensors(name).unwrap_or_default()
    }

    fn optional_tensors(&mut self, name: &'static str) -> Option<Vec<Tensor>> {
        let descriptions: Vec<Bound<'_, PyAny>> = self.extracted(|list| list.extract())?;
        let tensor = |description| match described(name, &description) {
            Ok(tensor) => tensor,
            Err(failure) => {
                self.failed.get_or_insert(failure);
                None
            }
        };
        Some(descriptions.into_iter().filter_map(tensor).collect())
    }

    fn float(&mut self, name: &'static str) -> f64 {
        self.optional_float(name).unwrap_or_default()
    }

    fn optional_float(&mut self, _: &'static str) -> Option<f64> {
        self.extracted(|number| number.extract())
    }

    fn integer(&mut self, _: &'static str) -> i64 {
        self.extracted(|number| number.extract()).unwrap_or_default()
    }

    fn boolean(&mut self, _: &'static str) -> bool {
        self.extracted(|flag| flag.extract()).unwrap_or_default()
    }

    fn optional_dtype(&mut self, _: &'static str) -> Option<Dtype> {
        self.extracted(|dtype| dtype_named(&dtype.extract::<String>()?).map(Some)).flatten()
    }

    fn finish(&mut self) -> Result<()> {
        Ok(())
    }
}
