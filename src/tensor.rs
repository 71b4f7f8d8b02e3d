//! A tensor borrowed from Python for the length of one call, and the only place that trusts its pointer.
//!
//! # The SAFETY contract
//!
//! A [`Tensor`] is made in [`Tensor::borrow`] alone, from a live `torch.Tensor` that the calling Python
//! frame holds until the native function returns, so the memory outlives every use here. It is kept
//! only if it is strided, contiguous, on the CPU and of a dtype we know; `len()` elements from `ptr`
//! are then readable. Outputs are allocated by `ops.py` for this one call (`torch.empty`), so they are
//! writable and overlap nothing. Two threads never store the same row: the callers in `cpu/` hand
//! every row to exactly one partition. With the GIL released nobody else writes the inputs unless the
//! user's own threads race on them, which is as undefined as it is for every torch operator.

use std::ffi::c_void;

use dlpark::python::consumer::exchange::ExchangeApi;
use half::{bf16, f16};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

use crate::error::{Error, Result, shape_text};

/// Element types of tensors we read and write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// A contiguous CPU tensor, borrowed for one call (see the contract above).
#[derive(Debug)]
pub struct Tensor {
    pub name: &'static str,
    pub shape: Vec<usize>,
    pub dtype: Dtype,
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
        if let Some(tensor) = Tensor::through_dlpack(name, object)? {
            return Ok(tensor);
        }
        Tensor::through_attributes(name, object)
    }

    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements, if `T` is what the tensor holds.
    pub fn elements<T: Element>(&self) -> &[T] {
        assert!(T::DTYPE == self.dtype, "dtype is checked before use");
        if self.is_empty() {
            return &[];
        }
        // SAFETY: contiguous and alive for `len()` elements of this dtype (module contract).
        unsafe { std::slice::from_raw_parts(self.ptr.cast::<T>(), self.len()) }
    }

    /// Rows of `width` elements, to be loaded by any thread.
    pub fn rows(&self, width: usize) -> Rows<'_> {
        Rows { tensor: self, width }
    }

    /// Cuts an output into consecutive groups of rows, one owner each; `bounds` ascend from 0 to all.
    pub fn split_rows(&mut self, width: usize, bounds: &[usize]) -> Vec<RowsMut<'_>> {
        let rows = *bounds.last().expect("bounds name at least one group");
        assert!(bounds[0] == 0 && rows * width == self.len(), "bounds cover the tensor");
        let tensor: &Tensor = self;
        bounds
            .windows(2)
            .map(|pair| {
                assert!(pair[0] <= pair[1], "bounds ascend");
                RowsMut { tensor, width, start: pair[0], end: pair[1] }
            })
            .collect()
    }

    fn span(&self, width: usize, row: usize) -> Span {
        let bytes = width * self.dtype.size();
        let inside = (row + 1) * width <= self.len();
        Span { at: self.ptr as usize + row * bytes, bytes: if inside { bytes } else { 0 } }
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
            let on_cpu = matches!(view.device.device_type.0, 1 | 3);
            // SAFETY: the producer promises `ndim` readable sizes and strides during the call.
            let (shape, strides) = unsafe { (sizes(view.shape, view.ndim), sizes(view.strides, view.ndim)) };
            let compact = view.strides.is_null() || is_contiguous(&shape, &strides);
            let missing = view.data.is_null() && !shape.contains(&0);
            if !on_cpu || missing || !compact {
                return None;
            }
            let ptr = view.data.cast::<u8>().wrapping_add(view.byte_offset as usize);
            Some(Tensor { name, shape, dtype, ptr })
        });
        // Whatever the table refuses (sparse, fake, meta, …) the attributes below explain.
        Ok(seen.unwrap_or(None))
    }

    /// Older torch, and everything that has to be refused with a reason.
    fn through_attributes(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Tensor> {
        let text =
            |attribute: &str| -> PyResult<String> { Ok(object.getattr(attribute)?.str()?.to_string()) };
        let layout = text("layout")?;
        if layout != "torch.strided" {
            return Err(
                Error::Kind { name, expected: "a dense tensor", got: format!("layout {layout}") }.into()
            );
        }
        let device = object.getattr("device")?;
        if device.getattr("type")?.extract::<String>()? != "cpu" {
            let got = device.str()?.to_string();
            return Err(Error::Device { name, expected: "cpu".into(), got }.into());
        }
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
        let ptr = object.call_method0("data_ptr")?.extract::<usize>()? as *mut c_void;
        if ptr.is_null() && !shape.contains(&0) {
            let got = object.get_type().name()?.to_string();
            return Err(Error::Kind { name, expected: "a tensor with memory behind it", got }.into());
        }
        Ok(Tensor { name, shape, dtype, ptr: ptr.cast() })
    }

    /// Fails unless the shape is `expected`.
    pub fn expect_shape(&self, expected: &[usize]) -> Result<()> {
        if self.shape == expected {
            return Ok(());
        }
        let (expected, got) = (shape_text(expected), shape_text(&self.shape));
        Err(Error::Shape { name: self.name, expected, got })
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

/// Rows of a borrowed tensor.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    tensor: &'a Tensor,
    pub width: usize,
}

impl<'a> Rows<'a> {
    pub fn dtype(&self) -> Dtype {
        self.tensor.dtype
    }

    #[inline(always)]
    pub fn row<T: Element>(&self, row: usize) -> &'a [T] {
        &self.tensor.elements::<T>()[row * self.width..(row + 1) * self.width]
    }

    /// Where a row lies, for [`Ahead`]; nothing past the end.
    #[inline(always)]
    pub fn span(&self, row: usize) -> Span {
        self.tensor.span(self.width, row)
    }
}

/// The rows a kernel loads next, asked for a few cache lines at a time.
///
/// Rows are short next to the latency of memory: the hardware's own prefetch has hardly begun when a row
/// ends, and idles through the maths that follows. A burst of requests for a whole row would wait for
/// itself (a core has some 16 under way), so the maths calls [`Ahead::step`] between its loops.
#[derive(Default)]
pub struct Ahead {
    spans: [Span; 6],
    /// lines asked for by one step
    lines: usize,
}

/// Memory to ask for: address and bytes left.
#[derive(Clone, Copy, Default)]
pub struct Span {
    at: usize,
    bytes: usize,
}

impl Ahead {
    /// Asks for all of `spans` within `steps` steps.
    pub fn new(spans: [Span; 6], steps: usize) -> Ahead {
        let bytes: usize = spans.iter().map(|span| span.bytes).sum();
        Ahead { spans, lines: bytes.div_ceil(64 * steps.max(1)) }
    }

    #[inline(always)]
    pub fn step(&mut self) {
        let mut lines = self.lines;
        for span in &mut self.spans {
            while span.bytes > 0 && lines > 0 {
                prefetch(span.at);
                span.at += 64;
                span.bytes = span.bytes.saturating_sub(64);
                lines -= 1;
            }
        }
    }
}

#[inline(always)]
fn prefetch(line: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a hint; it never faults, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line as *const i8) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

/// Rows `start..end` of an output, owned by one partition.
pub struct RowsMut<'a> {
    tensor: &'a Tensor,
    pub width: usize,
    start: usize,
    end: usize,
}

impl RowsMut<'_> {
    pub fn dtype(&self) -> Dtype {
        self.tensor.dtype
    }

    /// Where a row lies: a store, too, waits for its line.
    #[inline(always)]
    pub fn span(&self, row: usize) -> Span {
        self.tensor.span(self.width, row)
    }

    #[inline(always)]
    pub fn row<T: Element>(&mut self, row: usize) -> &mut [T] {
        assert!(T::DTYPE == self.tensor.dtype, "dtype is checked before use");
        assert!((self.start..self.end).contains(&row), "a partition stores its own rows");
        // SAFETY: inside the tensor, and `split_rows` gave this row to nobody else.
        unsafe {
            let first = self.tensor.ptr.cast::<T>().add(row * self.width);
            std::slice::from_raw_parts_mut(first, self.width)
        }
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
