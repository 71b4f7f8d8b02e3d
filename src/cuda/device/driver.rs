//! NVIDIA's driver: cudarc declares its functions, and they are called in the `libcuda.so.1` that torch uses.
//!
//! The argument lists, structures and constants of cuda.h come from `cudarc::driver::sys`, so none is copied
//! by hand. cudarc's own functions (in `sys`, and in `result` and `safe`, which call those) are not called:
//!
//! - They return `CUresult`, an enum of the errors that its version of CUDA knows. A newer driver returns
//!   others, and such a number in that enum is undefined behaviour: with cudarc 0.19, `result` takes error
//!   1000 for success. Here an error stays a number.
//! - They panic if a library or a function is missing, and Python would see a `PanicException`. Here every
//!   function is looked up before the first one is called, and a missing one is an error.
//! - They open `libcuda.so` before `libcuda.so.1`. That may be the stub of a CUDA toolkit, which has every
//!   function and no GPU, while torch uses `libcuda.so.1`.
//! - `CudaContext::bind_to_thread` makes a context current and never restores the one before it, which on
//!   several GPUs belongs to another GPU. Here contexts are pushed and popped ([`Current`]).

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::mem::{transmute, transmute_copy};
use std::ptr::{null, null_mut};

use cudarc::driver::sys;

use crate::library::{Library, Symbol};

/// A table of functions of the driver, all of which are looked up when it is made.
macro_rules! functions {
    ($(#[$about:meta])* $table:ident { $($name:ident),* $(,)? }) => {
        $(#[$about])*
        #[allow(non_snake_case)]
        pub struct $table { $(pub $name: Symbol),* }

        impl $table {
            pub fn load(library: &Library) -> Result<$table, String> {
                Ok($table { $($name: library.symbol(stringify!($name))?),* })
            }
        }
    };
}

functions! {
    /// The functions that are needed. Every driver since CUDA 11 has them.
    Driver {
        cuInit,
        cuGetErrorString,
        cuDeviceGetCount,
        cuDeviceGet,
        cuDeviceGetName,
        cuDeviceGetAttribute,
        cuDevicePrimaryCtxRetain,
        cuCtxGetCurrent,
        cuCtxGetDevice,
        cuCtxPushCurrent_v2,
        cuCtxPopCurrent_v2,
        cuThreadExchangeStreamCaptureMode,
        cuModuleLoadData,
        cuModuleGetFunction,
        cuFuncGetAttribute,
        cuFuncSetAttribute,
        cuOccupancyMaxActiveBlocksPerMultiprocessor,
        cuStreamGetCtx,
        cuLaunchKernel,
    }
}

functions! {
    /// The functions that only drivers for GPUs with clusters have. Without them there are no clusters.
    Clusters { cuOccupancyMaxActiveClusters }
}

/// Streams up to this handle, the default ones, belong to whichever context is current.
const LAST_SPECIAL_STREAM: usize = 2;

/// A function as cudarc declares it.
pub trait Declared {
    /// The function as it is called: its result is a number.
    type Raw;
}

macro_rules! declared {
    ($($argument:ident)*) => {
        impl<$($argument),*> Declared for unsafe fn($($argument),*) -> sys::CUresult {
            type Raw = unsafe extern "C" fn($($argument),*) -> c_int;
        }
    };
}

declared!(A);
declared!(A B);
declared!(A B C);
declared!(A B C D);
declared!(A B C D E F G H I J K);

/// # Safety
/// `symbol` is the address of the function that is `declared`.
pub unsafe fn raw<F: Declared>(_declared: F, symbol: Symbol) -> F::Raw {
    // SAFETY: both are pointers to functions, which differ in the type of the result. `CUresult` has the
    // size of a `c_int`.
    unsafe { transmute_copy::<Symbol, F::Raw>(&symbol) }
}

/// Calls a function of a table with arguments of the types that cudarc declares; returns its number.
macro_rules! call {
    ($table:ident.$name:ident($($argument:expr),* $(,)?)) => {{
        let declared: unsafe fn($(call!(@type of $argument)),*) -> _ = cudarc::driver::sys::$name;
        $crate::cuda::device::driver::raw(declared, $table.$name)($($argument),*)
    }};
    (@type of $argument:expr) => {
        _ // inferred from the declaration
    };
}
pub(super) use call;

impl Driver {
    /// Fails if `result` is an error, with the driver's own text.
    pub fn check(&self, result: c_int) -> Result<(), String> {
        if result == sys::CUresult::CUDA_SUCCESS as c_int {
            return Ok(());
        }
        let mut text = null();
        // cudarc declares a `CUresult` as the argument, and not every number is one.
        type ErrorString = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;
        // SAFETY: the function fills in a static string, or null for a number that it does not know.
        let text = unsafe {
            transmute::<Symbol, ErrorString>(self.cuGetErrorString)(result, &mut text);
            text.as_ref().map(|first| CStr::from_ptr(first).to_string_lossy())
        };
        Err(text.map_or(format!("CUDA error {result}"), |text| format!("CUDA error {result}, {text}")))
    }

    /// Returns the device's name, if the driver gives it.
    pub fn name(&self, device: sys::CUdevice) -> Option<String> {
        let mut name: [c_char; 256] = [0; 256];
        // SAFETY: the driver ends the name within the 255 bytes it is told of.
        unsafe {
            self.check(call!(self.cuDeviceGetName(name.as_mut_ptr(), 255, device))).ok()?;
            Some(CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned())
        }
    }

    /// Makes a context current on this thread until the guard is dropped.
    ///
    /// # Safety
    /// The context is never released.
    pub unsafe fn make_current(&self, context: sys::CUcontext) -> Result<Current<'_>, String> {
        let mut current = null_mut();
        // SAFETY: a handle to be filled, and a context as promised.
        unsafe {
            self.check(call!(self.cuCtxGetCurrent(&mut current)))?;
            if current == context {
                return Ok(Current { driver: None });
            }
            self.check(call!(self.cuCtxPushCurrent_v2(context)))?;
        }
        Ok(Current { driver: Some(self) })
    }

    /// Returns true if a call of torch's on `stream` would run in another context of the device than `context`, as it
    /// does while a green context is current: its streams are its own, and so is its stream 0.
    pub fn runs_elsewhere(
        &self,
        stream: sys::CUstream,
        context: sys::CUcontext,
        device: sys::CUdevice,
    ) -> Result<bool, String> {
        let (mut current, mut owner, mut of_current) = (null_mut(), null_mut(), 0);
        // SAFETY: handles and a number to be filled, and a stream that the caller uses.
        unsafe {
            self.check(call!(self.cuCtxGetCurrent(&mut current)))?;
            if current.is_null() || current == context {
                return Ok(false);
            }
            if stream as usize > LAST_SPECIAL_STREAM {
                // The driver gives an error for a stream of a green context.
                let result = call!(self.cuStreamGetCtx(stream, &mut owner));
                return Ok(self.check(result).is_err() || owner != context);
            }
            self.check(call!(self.cuCtxGetDevice(&mut of_current)))?;
        }
        Ok(of_current == device)
    }
}

/// A guard that keeps a context current. Dropping it makes the previous context current again.
pub struct Current<'a> {
    /// None if that context was current already
    driver: Option<&'a Driver>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if let Some(driver) = self.driver {
            let mut popped = null_mut();
            // SAFETY: pops the context that `make_current` pushed.
            unsafe { call!(driver.cuCtxPopCurrent_v2(&mut popped)) };
        }
    }
}

/// A guard that lets this thread load kernels while a stream is captured in a CUDA graph. Loading is not work of
/// the stream, but without the guard it would break the capture. (A driver older than that of CUDA 12.3 refuses
/// even so.)
pub struct AllowLoading<'a> {
    driver: &'a Driver,
    /// the thread's previous mode, as a number: a newer driver may have one that cudarc's enum lacks
    mode: c_uint,
}

impl AllowLoading<'_> {
    pub fn new(driver: &Driver) -> AllowLoading<'_> {
        let relaxed = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_uint;
        let mut allowed = AllowLoading { driver, mode: relaxed };
        allowed.exchange();
        allowed
    }

    fn exchange(&mut self) {
        let driver = self.driver;
        // SAFETY: the call swaps the thread's mode with the one given. The enum is a `c_uint` in C.
        unsafe { call!(driver.cuThreadExchangeStreamCaptureMode((&raw mut self.mode).cast())) };
    }
}

impl Drop for AllowLoading<'_> {
    fn drop(&mut self) {
        self.exchange();
    }
}
