//! torch tensors that a call owns: its arguments, its outputs and its scratch memory.

use std::ffi::c_void;

use super::shims::{Functions, Handle, Properties, shims};
use crate::error::{Error, Result};
use crate::tensor::{Device, Dtype, Tensor, dtypes_of};

/// A handle of a torch tensor, given back when it is dropped.
pub struct Owned(Handle);

impl Owned {
    /// # Safety
    /// The caller owns `handle`, a live tensor, and does not use it again.
    pub unsafe fn new(handle: Handle) -> Owned {
        Owned(handle)
    }

    /// Returns the tensor that a shim makes; None if it fails.
    fn made(make: impl FnOnce(&Functions, *mut Handle) -> i32) -> Option<Owned> {
        let mut handle = std::ptr::null_mut();
        (make(&shims().functions, &mut handle) == 0).then_some(Owned(handle))
    }

    /// Gives the handle away, with the duty to delete it.
    pub fn into_handle(self) -> Handle {
        let handle = self.0;
        std::mem::forget(self);
        handle
    }

    /// Allocates a contiguous tensor of torch's dtype number `dtype`.
    pub fn empty(shape: &[usize], dtype: i32, device: &Device) -> Result<Owned> {
        let sizes: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
        let mut strides = vec![1i64; sizes.len()];
        for axis in (1..sizes.len()).rev() {
            strides[axis - 1] = strides[axis].saturating_mul(sizes[axis].max(1));
        }
        let ([kind, index], rank) = (device_numbers(device), sizes.len() as i64);
        let (sizes, strides) = (sizes.as_ptr(), strides.as_ptr());
        // SAFETY: as many strides as sizes, and room for the handle.
        let empty = |f: &Functions, to| unsafe {
            (f.aoti_torch_empty_strided)(rank, sizes, strides, dtype, kind, index, to)
        };
        Owned::made(empty).ok_or_else(|| {
            let numbers = shape.iter().fold(1usize, |product, &size| product.saturating_mul(size));
            Error::Allocation {
                bytes: numbers.saturating_mul(dtype_of(dtype).map_or(1, Dtype::size)),
                device: device.to_string(),
            }
        })
    }

    /// Returns the stand-in for an absent output, None in Python.
    pub fn undefined() -> Result<Owned> {
        let refused = || Error::Internal(shims().with_reason("torch could not make an undefined tensor"));
        // SAFETY: room for the handle.
        Owned::made(|f, to| unsafe { (f.aoti_torch_new_uninitialized_tensor)(to) }).ok_or_else(refused)
    }

    /// Returns the address of the first element.
    pub fn address(&self) -> u64 {
        self.properties().expect("torch allocated it").data as u64
    }

    /// Returns a view named like the argument, and whether its elements are contiguous.
    pub fn view(&self, name: &'static str) -> Result<(Tensor, bool)> {
        let properties = self
            .properties()
            .filter(|properties| !properties.data.is_null() || properties.sizes.contains(&0));
        let Some(Properties { data, sizes, strides, dtype, device_type, device_index }) = properties else {
            let got = "one without".into();
            return Err(Error::Kind { name, expected: "a tensor with memory behind it", got });
        };
        let Some(dtype) = dtype_of(dtype) else {
            let expected = dtypes_of(name);
            return Err(Error::Dtype { name, expected, got: format!("torch's dtype number {dtype}") });
        };
        let device = match device_type {
            CPU => Device::Cpu,
            CUDA => Device::Cuda(device_index as usize),
            other => Device::Elsewhere(format!("torch's device number {other}")),
        };
        let shape: Vec<usize> = sizes.iter().map(|&size| size as usize).collect();
        // SAFETY: torch's memory for these elements, which lives as long as the handle, and that as the call.
        let tensor = unsafe { Tensor::new(name, shape, dtype, device, data) };
        Ok((tensor, are_contiguous(sizes, strides)))
    }

    /// Returns a view of a tensor and the tensor. If it is not contiguous: a view of a copy, the copy and the original.
    pub fn contiguous(self, name: &'static str) -> Result<(Tensor, Owned, Option<Owned>)> {
        let (tensor, is_contiguous) = self.view(name)?;
        if is_contiguous {
            return Ok((tensor, self, None));
        }
        let copy = Owned::empty(&tensor.shape, number_of(tensor.dtype), &tensor.device)?;
        copy.copy_from(&self)?;
        let (tensor, _) = copy.view(name)?;
        Ok((tensor, copy, Some(self)))
    }

    /// Returns true if this stands in for an absent output.
    #[cfg(feature = "tch")]
    pub fn is_absent(&self) -> bool {
        self.properties().is_none()
    }

    /// Copies the elements of a tensor of the same shape.
    pub fn copy_from(&self, other: &Owned) -> Result<()> {
        // SAFETY: two live tensors.
        match unsafe { (shims().functions.aoti_torch_copy_)(self.0, other.0, 0) } {
            0 => Ok(()),
            _ => Err(Error::Internal(shims().with_reason("torch could not copy a tensor"))),
        }
    }

    fn properties(&self) -> Option<Properties<'_>> {
        // SAFETY: a live tensor, owned.
        unsafe { shims().properties(self.0) }
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: owned, and not used again.
        unsafe { (shims().functions.aoti_torch_delete_tensor_object)(self.0) };
    }
}

/// Allocates a copy of a contiguous tensor (a, b, c) as (c, a, b).
pub fn last_axis_first(from: &Tensor) -> Result<Owned> {
    let &[a, b, c] = from.shape.as_slice() else { unreachable!("a weight over time has three axes") };
    let copy = Owned::empty(&[c, a, b], number_of(from.dtype), &from.device)?;
    let [device_type, device_index] = device_numbers(&from.device);
    let (data, dtype) = (from.address() as *mut c_void, number_of(from.dtype));
    let [sizes, strides] = [[c, a, b], [1, b * c, c]].map(|numbers| numbers.map(|number| number as i64));
    let (sizes, strides) = (sizes.as_ptr(), strides.as_ptr());
    // SAFETY: these are the elements of `from`, which outlives the view, and there is room for the handle.
    let view = |f: &Functions, to| unsafe {
        let view_of = f.aoti_torch_create_tensor_from_blob;
        view_of(data, 3, sizes, strides, 0, dtype, device_type, device_index, to)
    };
    let view = Owned::made(view)
        .ok_or_else(|| Error::Internal(shims().with_reason("torch could not view a weight")))?;
    copy.copy_from(&view)?;
    Ok(copy)
}

// c10::DeviceType and c10::ScalarType, which the ABI fixes.
const CPU: i32 = 0;
const CUDA: i32 = 1;
pub const BYTE: i32 = 0;
const NUMBERS: [(Dtype, i32); 5] =
    [(Dtype::F16, 5), (Dtype::F32, 6), (Dtype::F64, 7), (Dtype::Bool, 11), (Dtype::Bf16, 15)];

/// Returns torch's number of a dtype.
pub fn number_of(dtype: Dtype) -> i32 {
    NUMBERS.iter().find(|(known, _)| *known == dtype).expect("every dtype has a number").1
}

/// Returns the dtype of torch's number; None for one without operators.
pub fn dtype_of(number: i32) -> Option<Dtype> {
    NUMBERS.iter().find(|(_, known)| *known == number).map(|(dtype, _)| *dtype)
}

/// Returns torch's numbers of a device: its type and its index.
fn device_numbers(device: &Device) -> [i32; 2] {
    match device {
        Device::Cuda(index) => [CUDA, *index as i32],
        Device::Cpu | Device::Elsewhere(_) => [CPU, -1],
    }
}

fn are_contiguous(sizes: &[i64], strides: &[i64]) -> bool {
    let mut expected = 1i64;
    for (&size, &stride) in sizes.iter().zip(strides).rev() {
        if size != 1 && stride != expected {
            return sizes.contains(&0);
        }
        expected = expected.saturating_mul(size);
    }
    true
}
