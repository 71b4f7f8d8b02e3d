//! Borrows a `torch.Tensor`: through torch's table of DLPack functions, or else through its attributes.

use std::ffi::c_void;

use dlpark::python::consumer::exchange::ExchangeApi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

use crate::cuda::device::ahead_of_time;
use crate::error::Error;
use crate::tensor::{Device, Dtype, Tensor};

/// Borrows a `torch.Tensor`; the error says why it cannot be argument `name`.
pub fn borrow(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Tensor> {
    let py = object.py();
    if !object.is_instance(tensor_type(py)?)? {
        let got = object.get_type().name()?.to_string();
        return Err(Error::Kind { name, expected: "a torch.Tensor", got }.into());
    }
    let without_memory = ahead_of_time::is_active();
    if !without_memory && let Some(tensor) = through_dlpack(name, object)? {
        return Ok(tensor);
    }
    through_attributes(name, object, without_memory)
}

/// Borrows through torch's own function table (DLPack 1.3), if this torch has one. Takes 0.1 µs.
fn through_dlpack(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Option<Tensor>> {
    let Some(api) = ExchangeApi::from_object(object.as_borrowed())? else {
        return Ok(None);
    };
    let seen = api.with_tensor_view_no_sync(object.as_borrowed(), |view, _stream| {
        let dtype = match (view.dtype.code.0, view.dtype.bits, view.dtype.lanes) {
            (2, 32, 1) => Dtype::F32,
            (2, 64, 1) => Dtype::F64,
            (2, 16, 1) => Dtype::F16,
            (4, 16, 1) => Dtype::Bf16,
            _ => return None,
        };
        let device = match view.device.device_type.0 {
            1 | 3 => Device::Cpu, // plain and pinned
            2 => Device::Cuda(view.device.device_id as usize),
            _ => return None,
        };
        // SAFETY: the producer promises `ndim` readable sizes and strides during the call.
        let (shape, strides) = unsafe { (sizes(view.shape, view.ndim), sizes(view.strides, view.ndim)) };
        let compact = view.strides.is_null() || is_contiguous(&shape, &strides);
        let missing = view.data.is_null() && !shape.contains(&0);
        if missing || !compact {
            return None;
        }
        let ptr = view.data.cast::<u8>().wrapping_add(view.byte_offset as usize);
        // SAFETY: contiguous, of this shape and dtype, and held by the calling frame.
        Some(unsafe { Tensor::new(name, shape, dtype, device, ptr) })
    });
    // If the table refuses a tensor (sparse, fake, meta, …), its attributes explain why.
    Ok(seen.unwrap_or(None))
}

/// Borrows through attributes: for older torch, and for every tensor that is refused with a reason.
fn through_attributes(
    name: &'static str,
    object: &Bound<'_, PyAny>,
    without_memory: bool,
) -> PyResult<Tensor> {
    let text = |attribute: &str| -> PyResult<String> { Ok(object.getattr(attribute)?.str()?.to_string()) };
    let layout = text("layout")?;
    if layout != "torch.strided" {
        return Err(Error::Kind { name, expected: "a dense tensor", got: format!("layout {layout}") }.into());
    }
    let torch_device = object.getattr("device")?;
    let device = match torch_device.getattr("type")?.extract::<String>()?.as_str() {
        "cpu" => Device::Cpu,
        "cuda" => Device::Cuda(torch_device.getattr("index")?.extract()?),
        _ => Device::Elsewhere(torch_device.str()?.to_string()),
    };
    let dtype = match text("dtype")?.as_str() {
        "torch.float32" => Dtype::F32,
        "torch.float64" => Dtype::F64,
        "torch.bfloat16" => Dtype::Bf16,
        "torch.float16" => Dtype::F16,
        other => {
            let expected = "float32, float64, bfloat16 or float16".into();
            return Err(Error::Dtype { name, expected, got: other.into() }.into());
        }
    };
    let shape: Vec<usize> = object.getattr("shape")?.extract()?;
    let strides: Vec<i64> = object.call_method0("stride")?.extract()?;
    let signed: Vec<usize> = strides.iter().map(|&stride| stride as usize).collect();
    if !is_contiguous(&shape, &signed) {
        return Err(Error::Kind { name, expected: "contiguous", got: format!("strides {strides:?}") }.into());
    }
    if without_memory || matches!(device, Device::Elsewhere(_)) {
        // Either nothing launches, or the checks refuse the device.
        // SAFETY: a null pointer, which is never dereferenced.
        return Ok(unsafe { Tensor::new(name, shape, dtype, device, std::ptr::null_mut()) });
    }
    let ptr = object.call_method0("data_ptr")?.extract::<usize>()? as *mut c_void;
    if ptr.is_null() && !shape.contains(&0) {
        let got = object.get_type().name()?.to_string();
        return Err(Error::Kind { name, expected: "a tensor with memory behind it", got }.into());
    }
    // SAFETY: contiguous, of this shape and dtype, and held by the calling frame.
    Ok(unsafe { Tensor::new(name, shape, dtype, device, ptr.cast()) })
}

fn tensor_type(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static TENSOR: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    TENSOR.import(py, "torch", "Tensor")
}

/// # Safety
/// `first` is null or points to `count` readable sizes.
unsafe fn sizes(first: *mut i64, count: i32) -> Vec<usize> {
    let count = if first.is_null() { 0 } else { count };
    // SAFETY: as above.
    (0..count as usize).map(|axis| unsafe { *first.add(axis) } as usize).collect()
}

fn is_contiguous(shape: &[usize], strides: &[usize]) -> bool {
    if shape.contains(&0) {
        return true;
    }
    let mut expected = 1;
    for (&size, &stride) in shape.iter().zip(strides).rev() {
        if size != 1 && stride != expected {
            return false;
        }
        expected *= size;
    }
    true
}
