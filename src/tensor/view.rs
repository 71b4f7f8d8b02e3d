//! A tensor borrowed from Python for the length of one call, and the only place that trusts its pointer.
//!
//! # The SAFETY contract
//!
//! A [`Tensor`] is made in [`Tensor::borrow`] alone, from a live `torch.Tensor` that the calling Python
//! frame holds until the native function returns, so the memory outlives every use here. It is kept
//! only if it is strided, contiguous and of a dtype we know; `len()` elements from `ptr` are then
//! readable where the tensor lives. On the CPU they are read through [`Tensor::elements`] and what is built
//! on it, which refuse every other device. A GPU's are touched by kernels alone, which take the address
//! and run on the stream that torch allocated for and frees after. One that is only compiled for has no
//! memory at all, and nothing is launched. Outputs are allocated by `_outputs.py` for
//! this one call (`torch.empty`), so they are writable and overlap nothing. The one that a caller brings, a
//! state's gradient to overwrite, is borrowed once and refused where it overlaps what is loaded beside it
//! ([`Tensor::expect_apart`]). Two threads never store the
//! same row: the callers in `cpu/` hand every row to exactly one partition. With the GIL released nobody
//! else writes the inputs unless the user's own threads race on them, which is as undefined as it is for
//! every torch operator.

mod rows;

use std::ffi::c_void;
use std::ops::Range;

use dlpark::python::consumer::exchange::ExchangeApi;
use half::{bf16, f16};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

use crate::cuda::notes;
use crate::error::{Error, Result, shape_text};

pub use rows::{Ahead, Rows, RowsMut};

/// Element types of tensors we read and write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    F32,
    F64,
    Bf16,
    F16,
}

impl Dtype {
    pub fn size(self) -> usize {
        match self {
            Dtype::F64 => 8,
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "torch.float32",
            Dtype::F64 => "torch.float64",
            Dtype::Bf16 => "torch.bfloat16",
            Dtype::F16 => "torch.float16",
        }
    }
}

/// A Rust type that is the memory of one [`Dtype`].
pub trait Element: Copy + Send + Sync + 'static {
    const DTYPE: Dtype;
}
impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
}
impl Element for f64 {
    const DTYPE: Dtype = Dtype::F64;
}
impl Element for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
}
impl Element for f16 {
    const DTYPE: Dtype = Dtype::F16;
}

/// Where a tensor lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Device {
    Cpu,
    /// torch's `cuda:index`
    Cuda(usize),
    /// somewhere we cannot work, as torch calls it
    Elsewhere(String),
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(index) => write!(f, "cuda:{index}"),
            Device::Elsewhere(name) => f.write_str(name),
        }
    }
}

/// A contiguous tensor, borrowed for one call (see the contract above).
#[derive(Debug)]
pub struct Tensor {
    pub name: &'static str,
    pub shape: Vec<usize>,
    pub dtype: Dtype,
    pub device: Device,
    ptr: *mut u8,
}

// SAFETY: the memory outlives the call and rows are stored by one thread each (module contract).
unsafe impl Send for Tensor {}
unsafe impl Sync for Tensor {}

impl Tensor {
    /// Borrows a `torch.Tensor`, or says in a sentence why it cannot serve as argument `name`.
    pub fn borrow(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Tensor> {
        let py = object.py();
        if !object.is_instance(tensor_type(py)?)? {
            let got = object.get_type().name()?.to_string();
            return Err(Error::Kind { name, expected: "a torch.Tensor", got }.into());
        }
        let without_memory = notes::is_noting();
        if !without_memory && let Some(tensor) = Tensor::through_dlpack(name, object)? {
            return Ok(tensor);
        }
        Tensor::through_attributes(name, object, without_memory)
    }

    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Some of the elements, if `T` is what the tensor holds.
    fn elements<T: Element>(&self, range: Range<usize>) -> &[T] {
        assert!(T::DTYPE == self.dtype, "dtype is checked before use");
        assert!(range.start <= range.end && range.end <= self.len(), "rows lie inside their tensor");
        if range.is_empty() {
            return &[];
        }
        assert!(self.is_readable(), "only the CPU's own memory is touched here");
        // SAFETY: contiguous and alive for `len()` elements of this dtype (module contract).
        unsafe { std::slice::from_raw_parts(self.ptr.cast::<T>().add(range.start), range.len()) }
    }

    /// Where the first element lies, for a kernel.
    pub fn address(&self) -> u64 {
        self.ptr as u64
    }

    /// Where an element lies, for a kernel.
    pub fn address_of(&self, element: usize) -> u64 {
        self.address() + (element * self.dtype.size()) as u64
    }

    fn is_readable(&self) -> bool {
        matches!(self.device, Device::Cpu) && !self.ptr.is_null()
    }

    /// 0.1 µs: torch's own function table (DLPack 1.3), where this torch has one.
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
            Some(Tensor { name, shape, dtype, device, ptr })
        });
        // Whatever the table refuses (sparse, fake, meta, …) the attributes below explain.
        Ok(seen.unwrap_or(None))
    }

    /// Older torch, and everything that has to be refused with a reason.
    fn through_attributes(
        name: &'static str,
        object: &Bound<'_, PyAny>,
        without_memory: bool,
    ) -> PyResult<Tensor> {
        let text =
            |attribute: &str| -> PyResult<String> { Ok(object.getattr(attribute)?.str()?.to_string()) };
        let layout = text("layout")?;
        if layout != "torch.strided" {
            return Err(
                Error::Kind { name, expected: "a dense tensor", got: format!("layout {layout}") }.into()
            );
        }
        let place = object.getattr("device")?;
        let device = match place.getattr("type")?.extract::<String>()?.as_str() {
            "cpu" => Device::Cpu,
            "cuda" => Device::Cuda(place.getattr("index")?.extract()?),
            _ => Device::Elsewhere(place.str()?.to_string()),
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
            return Err(
                Error::Kind { name, expected: "contiguous", got: format!("strides {strides:?}") }.into()
            );
        }
        if without_memory || matches!(device, Device::Elsewhere(_)) {
            // Only compiled for, which takes no memory; or refused by whoever knows where it should be.
            return Ok(Tensor { name, shape, dtype, device, ptr: std::ptr::null_mut() });
        }
        let ptr = object.call_method0("data_ptr")?.extract::<usize>()? as *mut c_void;
        if ptr.is_null() && !shape.contains(&0) {
            let got = object.get_type().name()?.to_string();
            return Err(Error::Kind { name, expected: "a tensor with memory behind it", got }.into());
        }
        Ok(Tensor { name, shape, dtype, device, ptr: ptr.cast() })
    }

    /// Fails unless the shape is `expected`.
    pub fn expect_shape(&self, expected: &[usize]) -> Result<()> {
        if self.shape == expected {
            return Ok(());
        }
        let (expected, got) = (shape_text(expected), shape_text(&self.shape));
        Err(Error::Shape { name: self.name, expected, got })
    }

    /// Fails unless there is memory for so many bytes.
    pub fn expect_bytes(&self, bytes: usize) -> Result<()> {
        let got = self.len() * self.dtype.size();
        if got >= bytes {
            return Ok(());
        }
        let name = self.name;
        Err(Error::Argument(format!("`{name}` must have at least {bytes} bytes, got {got}")))
    }

    /// Fails unless the tensor is where `other` is.
    pub fn expect_beside(&self, other: &Tensor) -> Result<()> {
        if self.device == other.device {
            return Ok(());
        }
        let (expected, got) = (other.device.to_string(), self.device.to_string());
        Err(Error::Device { name: self.name, expected, got })
    }

    /// Fails if the tensor shares memory with `other`.
    pub fn expect_apart(&self, other: &Tensor) -> Result<()> {
        let end = |tensor: &Tensor| tensor.address_of(tensor.len());
        if self.address() >= end(other) || other.address() >= end(self) {
            return Ok(());
        }
        Err(Error::Argument(format!("`{}` must not overlap `{}`, which is read", self.name, other.name)))
    }

    /// Fails unless the tensor is where operators can work.
    pub fn expect_reachable(&self) -> Result<()> {
        match &self.device {
            Device::Elsewhere(got) => {
                Err(Error::Device { name: self.name, expected: "cpu or cuda".into(), got: got.clone() })
            }
            Device::Cpu | Device::Cuda(_) => Ok(()),
        }
    }

    /// Fails unless the dtype is one of `expected`.
    pub fn expect_dtype(&self, expected: &[Dtype]) -> Result<()> {
        if expected.contains(&self.dtype) {
            return Ok(());
        }
        let names: Vec<&str> = expected.iter().map(|dtype| dtype.name()).collect();
        Err(Error::Dtype { name: self.name, expected: names.join(" or "), got: self.dtype.name().into() })
    }
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
