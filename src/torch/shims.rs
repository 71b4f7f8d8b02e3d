//! torch's C shims, through which this library talks to torch, found in the libraries that Python has open.
//!
//! Declared in torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h;
//! docs/decisions/native-registration.md says which torch brought which. Nothing of torch is linked, so one build serves
//! every version from 2.10 on. A shim that fails returns nonzero. Before 2.13 it prints why to stderr; since then it
//! keeps the message.

use std::ffi::{CStr, c_char, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::OnceLock;

#[cfg(feature = "tch")]
use crate::cuda::compile::nvrtc;
use crate::error::{Error, Result};
use crate::library::{Library, functions};

/// torch's `AtenTensorHandle`.
pub type Handle = *mut c_void;

functions! {
    Functions {
        fn aoti_torch_is_defined(Handle, *mut bool) -> i32;
        fn aoti_torch_get_data_ptr(Handle, *mut *mut c_void) -> i32;
        fn aoti_torch_get_dim(Handle, *mut i64) -> i32;
        fn aoti_torch_get_sizes(Handle, *mut *const i64) -> i32;
        fn aoti_torch_get_strides(Handle, *mut *const i64) -> i32;
        fn aoti_torch_get_dtype(Handle, *mut i32) -> i32;
        fn aoti_torch_get_device_type(Handle, *mut i32) -> i32;
        fn aoti_torch_get_device_index(Handle, *mut i32) -> i32;
        fn aoti_torch_empty_strided(i64, *const i64, *const i64, i32, i32, i32, *mut Handle) -> i32;
        fn aoti_torch_create_tensor_from_blob(
            *mut c_void, i64, *const i64, *const i64, i64, i32, i32, i32, *mut Handle
        ) -> i32;
        fn aoti_torch_copy_(Handle, Handle, i32) -> i32;
        fn aoti_torch_new_uninitialized_tensor(*mut Handle) -> i32;
        fn aoti_torch_delete_tensor_object(Handle) -> i32;
        fn torch_get_num_threads(*mut u32) -> i32;
    }
}

functions! {
    /// Since torch 2.13.
    Messages { fn torch_exception_get_what_without_backtrace() -> *const c_char; }
}

functions! {
    /// From libtorch_cuda.so.
    CudaFunctions { fn aoti_torch_get_current_cuda_stream(i32, *mut *mut c_void) -> i32; }
}

/// The shims of this process.
pub struct Shims {
    pub functions: Functions,
    messages: Option<Messages>,
    /// the folder of torch's libraries
    folder: PathBuf,
}

static SHIMS: OnceLock<Shims> = OnceLock::new();

/// Finds the shims in `libtorch_cpu`, the library at this path that Python has open.
#[cfg(feature = "python")]
pub fn find(library: &Library, libtorch_cpu: &str) -> std::result::Result<(), String> {
    let shims = Shims::load(library, |_| Some(libtorch_cpu.into()))?;
    SHIMS.get_or_init(|| shims);
    Ok(())
}

/// Finds the shims in the torch that this program is linked with.
#[cfg(feature = "tch")]
pub fn find_linked() -> Result<&'static Shims> {
    if let Some(shims) = SHIMS.get() {
        return Ok(shims);
    }
    let file = |f: &Functions| crate::library::file_of(f.aoti_torch_get_dim as *const c_void);
    let found = Shims::load(&Library::global(), file).map_err(|reason| {
        Error::Internal(format!("ddl-rs needs a libtorch of version 2.10 or newer: {reason}"))
    })?;
    // site-packages/torch/lib, or the lib of a downloaded libtorch
    nvrtc::look_in(found.folder.ancestors().skip(1).take(2).map(Path::to_path_buf).collect());
    Ok(SHIMS.get_or_init(|| found))
}

/// Returns the shims. Only code that torch calls, or that holds one of its tensors, may call this.
pub fn shims() -> &'static Shims {
    SHIMS.get().expect("torch calls only what was registered")
}

/// The raw properties of a torch tensor; the slices live as long as its handle.
pub struct Properties<'a> {
    pub data: *mut u8,
    pub sizes: &'a [i64],
    pub strides: &'a [i64],
    pub dtype: i32,
    pub device_type: i32,
    pub device_index: i32,
}

impl Shims {
    /// `file` finds the file of torch's library.
    fn load(
        library: &Library,
        file: impl FnOnce(&Functions) -> Option<PathBuf>,
    ) -> std::result::Result<Shims, String> {
        let functions = Functions::load(library)?;
        let folder = file(&functions).as_deref().and_then(Path::parent).map(Path::to_path_buf);
        Ok(Shims { functions, messages: Messages::load(library).ok(), folder: folder.unwrap_or_default() })
    }

    /// Returns the sentence with the reason for which a shim has just failed on this thread, if torch keeps it.
    pub fn with_reason(&self, sentence: &str) -> String {
        let Some(messages) = &self.messages else {
            return format!("{sentence}; the lines above say why");
        };
        // SAFETY: a terminated string, which torch keeps until this thread's next failure.
        let reason = unsafe { CStr::from_ptr((messages.torch_exception_get_what_without_backtrace)()) };
        format!("{sentence}: {}", reason.to_string_lossy().trim_end())
    }

    /// Reads a tensor's properties; None if a shim fails, as it does for one without storage.
    ///
    /// # Safety
    /// `handle` is a live tensor.
    pub unsafe fn properties<'a>(&self, handle: Handle) -> Option<Properties<'a>> {
        let f = &self.functions;
        let mut is_defined = false;
        // SAFETY: a live handle, by the contract above, and room for the result.
        if unsafe { (f.aoti_torch_is_defined)(handle, &mut is_defined) } != 0 || !is_defined {
            return None; // None in Python, where a tensor is due
        }
        let (mut data, mut dim, mut dtype, mut device_type, mut device_index) = (null_mut(), 0, 0, 0, 0);
        let (mut sizes, mut strides) = (std::ptr::null(), std::ptr::null());
        // SAFETY: a live tensor, by the contract above, and room for every result.
        let status = unsafe {
            (f.aoti_torch_get_dim)(handle, &mut dim)
                | (f.aoti_torch_get_sizes)(handle, &mut sizes)
                | (f.aoti_torch_get_strides)(handle, &mut strides)
                | (f.aoti_torch_get_dtype)(handle, &mut dtype)
                | (f.aoti_torch_get_device_type)(handle, &mut device_type)
                | (f.aoti_torch_get_device_index)(handle, &mut device_index)
                | (f.aoti_torch_get_data_ptr)(handle, &mut data)
        };
        if status != 0 {
            return None;
        }
        // SAFETY: torch keeps `dim` sizes and strides in the tensor.
        let slice = |first: *const i64| match dim {
            0 => &[][..],
            _ => unsafe { std::slice::from_raw_parts(first, dim as usize) },
        };
        let (sizes, strides) = (slice(sizes), slice(strides));
        Some(Properties { data: data.cast(), sizes, strides, dtype, device_type, device_index })
    }

    /// Returns the number of threads that torch's operators use.
    pub fn threads(&self) -> usize {
        let mut threads = 1;
        // SAFETY: room for the result.
        unsafe { (self.functions.torch_get_num_threads)(&mut threads) };
        threads.max(1) as usize
    }

    /// Returns the handle of torch's current stream on `cuda:index`.
    pub fn cuda_stream(&self, index: usize) -> Result<u64> {
        static FOUND: OnceLock<std::result::Result<CudaFunctions, String>> = OnceLock::new();
        let found = FOUND.get_or_init(|| {
            let path = self.folder.join("libtorch_cuda.so");
            let library = Library::already_open(&path.to_string_lossy())
                .ok_or_else(|| format!("torch has CUDA tensors without {}", path.display()))?;
            CudaFunctions::load(&library)
        });
        let functions = found.as_ref().map_err(|reason| Error::Cuda(reason.clone()))?;
        let mut stream = null_mut();
        // SAFETY: room for the result.
        let status = unsafe { (functions.aoti_torch_get_current_cuda_stream)(index as i32, &mut stream) };
        if status == 0 {
            Ok(stream as u64)
        } else {
            Err(Error::Cuda(self.with_reason(&format!("torch has no stream on cuda:{index}"))))
        }
    }
}
