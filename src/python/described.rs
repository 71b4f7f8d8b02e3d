//! Calls that Python describes: an operator gets its arguments without memory, to list its kernels or to be checked.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::error::{Error, Result};
use crate::tensor::{Device, Dtype, Tensor, dtypes_of};
use crate::torch::dispatch::{Entry, OPERATORS};
use crate::torch::run::Run;
use crate::torch::source::{Overwritten, Source, placeholder};

/// Raises what the operator would refuse these arguments with. A tensor among them is described by (shape, dtype as in
/// "float32", device as in "cuda:0"); all others are as in the call.
#[pyfunction]
pub fn check(operator: &str, arguments: &Bound<'_, PyList>) -> PyResult<()> {
    match run_described(operator, arguments, Run::checking())? {
        Ok(()) | Err(Error::Checked) => Ok(()),
        Err(refusal) => Err(refusal.into()),
    }
}

/// Returns the operator of this name.
pub fn operator_named(name: &str) -> PyResult<&'static Entry> {
    let refusal = || PyValueError::new_err(format!("`operator` must be one of ddl's, got {name:?}"));
    OPERATORS.iter().find(|known| known.name == name).ok_or_else(refusal)
}

/// Runs an operator with described arguments, on tensors without memory.
pub fn run_described(operator: &str, arguments: &Bound<'_, PyList>, mut run: Run) -> PyResult<Result<()>> {
    let operator = operator_named(operator)?;
    let arguments = arguments.iter().collect();
    let mut source = Described { arguments, next: 0, failed: None, refused: None };
    let done = (operator.run)(&mut source, &mut run);
    source.failed.map_or(Ok(done), Err)
}

/// Arguments that Python describes; their tensors have no memory.
struct Described<'py> {
    arguments: Vec<Bound<'py, PyAny>>,
    next: usize,
    /// why Python's description cannot be understood
    failed: Option<PyErr>,
    /// why the operator cannot take an argument
    refused: Option<Error>,
}

impl<'py> Described<'py> {
    fn next(&mut self) -> Option<Bound<'py, PyAny>> {
        self.next += 1;
        self.arguments.get(self.next - 1).filter(|argument| !argument.is_none()).cloned()
    }

    /// Makes a tensor of its description.
    fn described(&mut self, name: &'static str, description: &Bound<'_, PyAny>) -> Tensor {
        let (shape, dtype, location): (Vec<usize>, String, Location) = match description.extract() {
            Ok(description) => description,
            Err(failure) => {
                self.failed.get_or_insert(failure);
                return placeholder(name);
            }
        };
        let Some(dtype) = dtype_named(&dtype) else {
            let (expected, got) = (dtypes_of(name), format!("torch.{dtype}"));
            self.refused.get_or_insert(Error::Dtype { name, expected, got });
            return placeholder(name);
        };
        match location {
            Location::Address(address) => Tensor::fake(name, shape, dtype, address),
            Location::Device(device) => Tensor::described(name, shape, dtype, device_named(device)),
        }
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

/// Where a described tensor would lie.
#[derive(FromPyObject)]
enum Location {
    /// on a GPU, so many bytes from an aligned address
    Address(usize),
    /// on this device
    Device(String),
}

fn device_named(name: String) -> Device {
    match name.split_once(':').map_or((name.as_str(), Ok(0)), |(kind, index)| (kind, index.parse())) {
        ("cpu", _) => Device::Cpu,
        ("cuda", Ok(index)) => Device::Cuda(index),
        _ => Device::Elsewhere(name),
    }
}

/// Returns the dtype of a name such as "float32".
pub fn dtype_named(name: &str) -> Option<Dtype> {
    Dtype::ALL.into_iter().find(|dtype| dtype.name().strip_prefix("torch.") == Some(name))
}

impl Source for Described<'_> {
    fn tensor(&mut self, name: &'static str) -> Tensor {
        self.optional_tensor(name).unwrap_or_else(|| {
            self.failed
                .get_or_insert_with(|| PyValueError::new_err(format!("`{name}` must be a tensor, got None")));
            placeholder(name)
        })
    }

    fn optional_tensor(&mut self, name: &'static str) -> Option<Tensor> {
        let description = self.next()?;
        Some(self.described(name, &description))
    }

    fn overwritten_tensor(&mut self, name: &'static str) -> Overwritten {
        Overwritten { tensor: self.tensor(name), copy: None }
    }

    fn optional_tensors(&mut self, name: &'static str) -> Option<Vec<Tensor>> {
        let descriptions: Vec<Bound<'_, PyAny>> = self.extracted(|list| list.extract())?;
        Some(descriptions.iter().map(|description| self.described(name, description)).collect())
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

    fn optional_dtype(&mut self, name: &'static str) -> Option<Dtype> {
        let dtype: String = self.extracted(|dtype| dtype.extract())?;
        let known = dtype_named(&dtype);
        if known.is_none() {
            let (expected, got) = (dtypes_of(name), format!("torch.{dtype}"));
            self.refused.get_or_insert(Error::Dtype { name, expected, got });
        }
        known
    }

    fn finish(&mut self) -> Result<()> {
        self.refused.take().map_or(Ok(()), Err)
    }
}
