//! The part of NVIDIA's driver that is used.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::null;

use crate::cuda::library::functions;

functions! {
    /// The part of cuda.h that is used: entry points that every driver since CUDA 11 has. Results are
    /// kept as numbers, because a newer driver returns some that no list of today holds.
    Driver {
        fn cuInit(c_uint) -> c_int;
        fn cuGetErrorString(c_int, *mut *const c_char) -> c_int;
        fn cuDeviceGetCount(*mut c_int) -> c_int;
        fn cuDeviceGet(*mut c_int, c_int) -> c_int;
        fn cuDeviceGetName(*mut c_char, c_int, c_int) -> c_int;
        fn cuDeviceGetAttribute(*mut c_int, c_int, c_int) -> c_int;
        fn cuDevicePrimaryCtxRetain(*mut *mut c_void, c_int) -> c_int;
        fn cuCtxGetCurrent(*mut *mut c_void) -> c_int;
        fn cuCtxPushCurrent_v2(*mut c_void) -> c_int;
        fn cuCtxPopCurrent_v2(*mut *mut c_void) -> c_int;
        fn cuThreadExchangeStreamCaptureMode(*mut c_int) -> c_int;
        fn cuModuleLoadData(*mut *mut c_void, *const c_void) -> c_int;
        fn cuModuleGetFunction(*mut *mut c_void, *mut c_void, *const c_char) -> c_int;
        fn cuFuncSetAttribute(*mut c_void, c_int, c_int) -> c_int;
        fn cuLaunchKernel(
            *mut c_void,
            c_uint, c_uint, c_uint,
            c_uint, c_uint, c_uint,
            c_uint, *mut c_void, *mut *mut c_void, *mut *mut c_void,
        ) -> c_int;
    }
}

functions! {
    /// What drivers for GPUs with clusters have besides.
    Clusters {
        fn cuOccupancyMaxActiveClusters(*mut c_int, *mut c_void, *const Configuration) -> c_int;
    }
}

/// A launch, as cuda.h's CUlaunchConfig.
#[repr(C)]
pub struct Configuration {
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared: c_uint,
    pub stream: *mut c_void,
    pub attributes: *mut c_void,
    pub attribute_count: c_uint,
}

impl Driver {
    pub fn check(&self, result: c_int) -> std::result::Result<(), String> {
        if result == 0 {
            return Ok(());
        }
        let mut text = null();
        // SAFETY: fills in a static string, or null for a number it does not know.
        let text = unsafe {
            (self.cuGetErrorString)(result, &mut text);
            text.as_ref().map(|first| CStr::from_ptr(first).to_string_lossy())
        };
        Err(text.map_or(format!("CUDA error {result}"), |text| format!("CUDA error {result}, {text}")))
    }

    /// What the device is called, if the driver tells.
    pub fn name(&self, device: c_int) -> Option<String> {
        let mut name: [c_char; 256] = [0; 256];
        // SAFETY: the driver ends the name within the 255 bytes it is told of.
        unsafe {
            self.check((self.cuDeviceGetName)(name.as_mut_ptr(), 255, device)).ok()?;
            Some(CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned())
        }
    }
}
