//! The operators on NumPy arrays, for `ddl.arrays`: arguments and results are dictionaries, by the names of the schema.

use numpy::npyffi::_PyArray_GET_ITEM_DATA;
use numpy::{PyUntypedArray, PyUntypedArrayMethods, get_array_module};
use pyo3::conversion::FromPyObjectOwned;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::described::{dtype_named, operator_named};
use crate::error::{Error, Result};
use crate::problem::Allocate;
use crate::tensor::{Device, Dtype, Tensor, dtypes_of};
use crate::torch::run::{Caller, Target};
use crate::torch::source::{Overwritten, Source, placeholder};

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
    let mut source = Arrays { arguments, refused: None };
    // Without Python's lock, which is taken for each argument and output. The dictionaries keep the arrays alive.
    py.detach(|| (operator.run)(&mut source, &mut call))?;
    Ok(results)
}

/// Arguments by name.
struct Arrays {
    arguments: Py<PyDict>,
    refused: Option<Error>,
}

impl Arrays {
    /// Takes an argument; a failure is kept for [`Source::finish`].
    fn take<T: for<'py> FromPyObjectOwned<'py> + Default>(&mut self, name: &str) -> T {
        let taken = Python::attach(|py| {
            let value = self.arguments.bind(py).call_method1("get", (name,))?;
            if value.is_none() { Ok(T::default()) } else { value.extract().map_err(Into::into) }
        });
        taken.unwrap_or_else(|failure| {
            self.refused.get_or_insert(Error::Python(failure));
            T::default()
        })
    }
}

impl Source for Arrays {
    fn tensor(&mut self, name: &'static str) -> Tensor {
        self.optional_tensor(name).unwrap_or_else(|| {
            let refusal = Error::Kind { name, expected: "a numpy.ndarray", got: "NoneType".into() };
            self.refused.get_or_insert(refusal);
            placeholder(name)
        })
    }

    fn optional_tensor(&mut self, name: &'static str) -> Option<Tensor> {
        let array: Option<Py<PyUntypedArray>> = self.take(name);
        let viewed = Python::attach(|py| array.map(|array| view(name, array.bind(py))))?;
        Some(viewed.unwrap_or_else(|refusal| {
            self.refused.get_or_insert(refusal);
            placeholder(name)
        }))
    }

    fn overwritten_tensor(&mut self, name: &'static str) -> Overwritten {
        Overwritten { tensor: self.tensor(name), copy: None }
    }

    fn optional_tensors(&mut self, _: &'static str) -> Option<Vec<Tensor>> {
        None
    }

    fn float(&mut self, name: &'static str) -> f64 {
        self.take(name)
    }

    fn optional_float(&mut self, name: &'static str) -> Option<f64> {
        self.take(name)
    }

    fn integer(&mut self, name: &'static str) -> i64 {
        self.take(name)
    }

    fn boolean(&mut self, name: &'static str) -> bool {
        self.take(name)
    }

    fn optional_dtype(&mut self, name: &'static str) -> Option<Dtype> {
        self.take::<Option<String>>(name).as_deref().and_then(dtype_named)
    }

    fn finish(&mut self) -> Result<()> {
        self.refused.take().map_or(Ok(()), Err)
    }
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
    fn target<'a>(&self, _: &'a Tensor) -> Result<Target<'a>> {
        Ok(Target::Cpu { threads: self.threads })
    }
}

/// Views an array, which `ddl.arrays` has made contiguous. It has to live as long as the call.
fn view(name: &'static str, array: &Bound<'_, PyUntypedArray>) -> Result<Tensor> {
    let (expected, got) = (dtypes_of(name), array.dtype().to_string());
    let is_mask = name == "document_starts";
    let dtype = dtype_named(&got).filter(|&dtype| (dtype == Dtype::Bool) == is_mask);
    let dtype = dtype.ok_or(Error::Dtype { name, expected, got })?;
    if !array.is_c_contiguous() || !array.is_aligned() {
        return Err(Error::Kind { name, expected: "contiguous", got: "an array with strides".into() });
    }
    // SAFETY: a live array, whose fields are read while Python's lock is held.
    let data = unsafe { (*_PyArray_GET_ITEM_DATA(array.as_array_ptr())).data };
    // SAFETY: contiguous elements of this dtype, which the dictionary of the call keeps alive.
    Ok(unsafe { Tensor::new(name, array.shape().to_vec(), dtype, Device::Cpu, data.cast()) })
}
