//! The arguments of a call in a dictionary of Python's, by the names of the schema.

use numpy::npyffi::_PyArray_GET_ITEM_DATA;
use numpy::{PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::error::{Error, Result};
use crate::tensor::{Device, Dtype, Tensor, dtypes_of};
use crate::torch::source::{Kind, Source, Value};

/// An argument that is left out is None, 0 or false. A tensor is a NumPy array, which the dictionary keeps alive, or only
/// described: (shape, dtype as in "float32", [`Location`]).
pub struct Arguments(pub Py<PyDict>);

impl Source for Arguments {
    fn take(&mut self, name: &'static str, kind: Kind) -> Result<Option<Value>> {
        Python::attach(|py| match self.0.bind(py).get_item(name).map_err(Error::Python)? {
            Some(argument) if !argument.is_none() => value(name, kind, &argument).map(Some),
            _ => Ok(None),
        })
    }
}

fn value(name: &'static str, kind: Kind, argument: &Bound<'_, PyAny>) -> Result<Value> {
    let extracted = match kind {
        Kind::Tensor => return tensor(name, argument).map(Value::Tensor),
        Kind::Tensors => {
            let list: Vec<Bound<'_, PyAny>> = argument.extract().map_err(Error::Python)?;
            return list.iter().map(|one| tensor(name, one)).collect::<Result<_>>().map(Value::Tensors);
        }
        Kind::Dtype => {
            let named: String = argument.extract().map_err(Error::Python)?;
            return dtype_named(name, named).map(Value::Dtype);
        }
        Kind::Float => argument.extract().map(Value::Float),
        Kind::Integer => argument.extract().map(Value::Integer),
        Kind::Boolean => argument.extract().map(Value::Boolean),
    };
    extracted.map_err(Error::Python)
}

fn tensor(name: &'static str, argument: &Bound<'_, PyAny>) -> Result<Tensor> {
    if !argument.is_instance_of::<PyTuple>() {
        return view(name, argument.cast().map_err(|other| Error::Python(other.into()))?);
    }
    let (shape, dtype, location) = argument.extract().map_err(Error::Python)?;
    let dtype = dtype_named(name, dtype)?;
    let (device, address) = match location {
        Location::Address(address) => (Device::Cuda(0), address),
        Location::Device(device) => (device_named(device), 0),
    };
    Ok(Tensor::fake(name, shape, dtype, device, address))
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

/// Returns the dtype of a name such as "float32", for the argument `name`.
fn dtype_named(name: &'static str, dtype: String) -> Result<Dtype> {
    let got = format!("torch.{dtype}");
    let known = Dtype::ALL.into_iter().find(|known| known.name() == got);
    known.ok_or_else(|| Error::Dtype { name, expected: dtypes_of(name), got })
}

/// Views an array, which `ddl.arrays` has made contiguous. It has to live as long as the call.
pub fn view(name: &'static str, array: &Bound<'_, PyUntypedArray>) -> Result<Tensor> {
    let dtype = dtype_named(name, array.dtype().to_string())?;
    if (dtype == Dtype::Bool) != (name == "document_starts") {
        return Err(Error::Dtype { name, expected: dtypes_of(name), got: dtype.name().into() });
    }
    if !array.is_c_contiguous() || !array.is_aligned() {
        return Err(Error::Kind { name, expected: "contiguous", got: "an array with strides".into() });
    }
    // SAFETY: a live array, whose fields are read while Python's lock is held.
    let data = unsafe { (*_PyArray_GET_ITEM_DATA(array.as_array_ptr())).data };
    // SAFETY: contiguous elements of this dtype, which the dictionary of the call keeps alive.
    Ok(unsafe { Tensor::new(name, array.shape().to_vec(), dtype, Device::Cpu, data.cast()) })
}
