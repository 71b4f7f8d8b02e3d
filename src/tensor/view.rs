//! A view of one call's tensor: address, shape, dtype and device.
//!
//! # The SAFETY contract
//!
//! A [`Tensor`] is made by [`Tensor::new`] alone. Its caller promises that `len()` contiguous elements of
//! `dtype` lie at `ptr` on `device`, and that they live for as long as the [`Tensor`]. `torch::memory` keeps
//! that promise with a handle of a torch tensor, which the call owns until it returns, `slices::array` by a borrow,
//! `slices::memory` by owning the vectors and `python::arguments` by dictionaries of the arrays.
//!
//! - CPU tensors are read and written only as rows (`tensor::rows`), which refuse every other device.
//! - Only kernels access a GPU's tensors, by address. They run on the stream for which torch allocated the
//!   memory, and torch frees it in the stream's order.
//! - For ahead-of-time compilation tensors are fake ([`Tensor::fake`]): their address only tells their alignment, and
//!   Rust refuses to read them.
//! - Outputs are allocated for this one call, so they are writable and overlap nothing. A caller may pass one of its
//!   own: a state's gradient, to be overwritten. It has one view, and is refused if it overlaps another tensor that is
//!   loaded ([`Tensor::expect_disjoint`]).
//! - Two threads never store the same row: the callers in `cpu/` give every row to exactly one partition.
//! - Only the user's own threads could write the inputs meanwhile. Such a data race is undefined behaviour, as it is
//!   for every torch operator.

use half::{bf16, f16};

use crate::error::{Error, Result, shape_text};

/// Element types of the tensors that we read and write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    F32,
    F64,
    Bf16,
    F16,
    /// for masks only
    Bool,
}

/// The dtypes that operators take, in a sentence.
const ANY_NUMBER: &str = "float32, float64, bfloat16 or float16";

/// Returns the dtypes that some operator takes for an argument, in a sentence.
#[cfg(feature = "torch")]
pub fn dtypes_of(name: &str) -> String {
    if name == "document_starts" { Dtype::Bool.name().into() } else { ANY_NUMBER.into() }
}

impl Dtype {
    pub const ALL: [Dtype; 5] = [Dtype::F32, Dtype::F64, Dtype::Bf16, Dtype::F16, Dtype::Bool];
    pub const NUMBERS: [Dtype; 4] = [Dtype::F32, Dtype::F64, Dtype::Bf16, Dtype::F16];

    pub fn size(self) -> usize {
        match self {
            Dtype::F64 => 8,
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
            Dtype::Bool => 1,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "torch.float32",
            Dtype::F64 => "torch.float64",
            Dtype::Bf16 => "torch.bfloat16",
            Dtype::F16 => "torch.float16",
            Dtype::Bool => "torch.bool",
        }
    }
}

/// A Rust type whose memory is that of one [`Dtype`].
///
/// # Safety
/// The type has the size, the alignment and the bit patterns of `DTYPE`.
pub unsafe trait Element: Copy + Default + Send + Sync + 'static {
    const DTYPE: Dtype;
}
// SAFETY: for this and the others, the type's own memory.
unsafe impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
}
unsafe impl Element for f64 {
    const DTYPE: Dtype = Dtype::F64;
}
unsafe impl Element for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
}
unsafe impl Element for f16 {
    const DTYPE: Dtype = Dtype::F16;
}
/// 0 is false: Rust's own bool may not be any other byte than 0 and 1.
unsafe impl Element for u8 {
    const DTYPE: Dtype = Dtype::Bool;
}

/// The device of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Device {
    Cpu,
    /// torch's `cuda:index`
    #[cfg(feature = "torch")]
    Cuda(usize),
    /// a device without operators, by torch's name
    #[cfg(feature = "torch")]
    Elsewhere(String),
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            #[cfg(feature = "torch")]
            Device::Cuda(index) => write!(f, "cuda:{index}"),
            #[cfg(feature = "torch")]
            Device::Elsewhere(name) => f.write_str(name),
        }
    }
}

/// A contiguous tensor of one call (see the contract above).
#[derive(Debug)]
pub struct Tensor {
    pub name: &'static str,
    pub shape: Vec<usize>,
    pub dtype: Dtype,
    pub device: Device,
    /// the product of `shape`
    pub(super) len: usize,
    /// in the CPU's own memory
    pub(super) readable: bool,
    pub(super) ptr: *mut u8,
}

// SAFETY: the memory outlives the call and rows are stored by one thread each (module contract).
unsafe impl Send for Tensor {}
unsafe impl Sync for Tensor {}

impl Tensor {
    /// # Safety
    /// This is the module's contract: `ptr` is null or points to all elements of `shape`, contiguous, of type
    /// `dtype` and on `device`. They live as long as the tensor, and nobody else writes them.
    pub unsafe fn new(
        name: &'static str,
        shape: Vec<usize>,
        dtype: Dtype,
        device: Device,
        ptr: *mut u8,
    ) -> Tensor {
        // In this order 0 times more than there can be is 0.
        let len = shape.iter().fold(1usize, |len, &size| len.saturating_mul(size));
        let readable = matches!(device, Device::Cpu) && !ptr.is_null();
        Tensor { name, shape, dtype, device, len, readable, ptr }
    }

    /// Returns a tensor without memory, so that nothing here reads it. Its address tells its alignment.
    #[cfg(feature = "torch")]
    pub fn fake(
        name: &'static str,
        shape: Vec<usize>,
        dtype: Dtype,
        device: Device,
        address: usize,
    ) -> Tensor {
        // SAFETY: it is not read here, whatever its device and its address are.
        Tensor { readable: false, ..unsafe { Tensor::new(name, shape, dtype, device, address as *mut u8) } }
    }

    /// Returns the part of these elements that begins with element `first`, under another name.
    pub fn part(&self, name: &'static str, first: usize, shape: Vec<usize>) -> Tensor {
        let (dtype, device) = (self.dtype, self.device.clone());
        let ptr = if self.ptr.is_null() { self.ptr } else { self.ptr.wrapping_add(first * dtype.size()) };
        // SAFETY: elements of this tensor, as asserted below.
        let part = unsafe { Tensor::new(name, shape, dtype, device, ptr) };
        assert!(first <= self.len && part.len <= self.len - first, "a part lies inside its tensor");
        part
    }

    #[inline(always)]
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the address of the first element, for a kernel.
    pub fn address(&self) -> u64 {
        self.ptr as u64
    }

    /// Fails unless the shape is `expected`.
    pub fn expect_shape(&self, expected: &[usize]) -> Result<()> {
        if self.shape == expected {
            return Ok(());
        }
        Err(self.wrong_shape(shape_text(expected)))
    }

    /// Returns the refusal of the shape.
    pub fn wrong_shape(&self, expected: impl Into<String>) -> Error {
        Error::Shape { name: self.name, expected: expected.into(), got: shape_text(&self.shape) }
    }

    /// Fails unless the tensor is on the device of `other`.
    pub fn expect_beside(&self, other: &Tensor) -> Result<()> {
        if self.device == other.device {
            return Ok(());
        }
        let (expected, got) = (other.device.to_string(), self.device.to_string());
        Err(Error::Device { name: self.name, expected, got })
    }

    /// Fails if the tensor shares memory with `other`.
    pub fn expect_disjoint(&self, other: &Tensor) -> Result<()> {
        let end = |tensor: &Tensor| tensor.address() + (tensor.len() * tensor.dtype.size()) as u64;
        if self.address() >= end(other) || other.address() >= end(self) {
            return Ok(());
        }
        Err(Error::Argument(format!("`{}` must not overlap `{}`, which is read", self.name, other.name)))
    }

    /// Fails unless the dtype is one of `expected`.
    pub fn expect_dtype(&self, expected: &[Dtype]) -> Result<()> {
        if expected.contains(&self.dtype) {
            return Ok(());
        }
        let names: Vec<&str> = expected.iter().map(|dtype| dtype.name()).collect();
        let expected = if expected == Dtype::NUMBERS { ANY_NUMBER.into() } else { names.join(" or ") };
        Err(Error::Dtype { name: self.name, expected, got: self.dtype.name().into() })
    }
}
