//! GPUs through NVIDIA's driver, which is opened on the first call that needs it, never at import.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Arc, OnceLock};

use super::compiler::build;
use super::launch::{Device, Loaded, Table};
use super::library::{Library, functions};
use super::nvrtc::{Target, nvrtc, target};
use super::plan::{Limits, Plan};
use super::specialisation::Specialisation;
use crate::error::{Error, Result};

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

// Numbers of cuda.h.
const NO_DEVICE: c_int = 100;
const MULTIPROCESSORS: c_int = 16;
const THREADS_PER_MULTIPROCESSOR: c_int = 39;
const CAPABILITY_MAJOR: c_int = 75;
const CAPABILITY_MINOR: c_int = 76;
const SHARED_PER_MULTIPROCESSOR: c_int = 81;
const REGISTERS_PER_MULTIPROCESSOR: c_int = 82;
const SHARED_PER_BLOCK_OPTIN: c_int = 97;
const DYNAMIC_SHARED_BYTES: c_int = 8;
const SHARED_CARVEOUT: c_int = 9;
const RELAXED_CAPTURE: c_int = 2;
/// How what a captured stream forbids begins: 900 to 908.
const OF_A_CAPTURE: &str = "CUDA error 90";

struct Gpus {
    driver: Driver,
    /// that started the driver
    process: u32,
    devices: Vec<OnceLock<std::result::Result<Arc<Gpu>, String>>>,
}

/// One GPU in its primary context, which is the one that torch works in.
pub struct Gpu {
    driver: &'static Driver,
    index: usize,
    context: *mut c_void,
    limits: Limits,
    pub target: Target,
    table: Table,
}

// SAFETY: a context's handle may be used from any thread that makes it current, as `Current` does.
unsafe impl Send for Gpu {}
unsafe impl Sync for Gpu {}

/// Torch's device `cuda:index`; the reason where it cannot be used is kept and given again.
pub fn gpu(index: usize) -> Result<Arc<Gpu>> {
    let gpus = gpus()?;
    if gpus.process != std::process::id() {
        return Err(Error::Cuda(
            "this process was forked from one that had started NVIDIA's driver, which does not work in both: \
             start it by the method `spawn`"
                .into(),
        ));
    }
    let Some(slot) = gpus.devices.get(index) else {
        let count = gpus.devices.len();
        return Err(Error::Cuda(format!("there is no cuda:{index}, the driver knows {count} GPUs")));
    };
    let opened = slot.get_or_init(|| Gpu::open(&gpus.driver, index).map(Arc::new));
    opened.clone().map_err(|reason| Error::Cuda(format!("cuda:{index} cannot be used: {reason}")))
}

fn gpus() -> Result<&'static Gpus> {
    static FOUND: OnceLock<std::result::Result<Gpus, String>> = OnceLock::new();
    FOUND.get_or_init(find).as_ref().map_err(|reason| Error::Cuda(reason.clone()))
}

fn find() -> std::result::Result<Gpus, String> {
    let install = "install NVIDIA's driver, or keep the tensors on the CPU";
    let library = Library::open("libcuda.so.1")
        .map_err(|reason| format!("NVIDIA's driver was not found ({reason}): {install}"))?;
    let driver = Driver::load(&library)
        .map_err(|missing| format!("NVIDIA's driver is too old ({missing}): install a newer one"))?;
    let mut count = 0;
    // SAFETY: a number to be filled.
    let result = unsafe {
        match (driver.cuInit)(0) {
            0 => (driver.cuDeviceGetCount)(&mut count),
            fault => fault,
        }
    };
    if result == NO_DEVICE || (result == 0 && count <= 0) {
        return Err("NVIDIA's driver knows no GPU: check CUDA_VISIBLE_DEVICES".into());
    }
    driver.check(result).map_err(|reason| {
        format!(
            "NVIDIA's driver did not start ({reason}): check `nvidia-smi`, or keep the tensors on the CPU"
        )
    })?;
    Ok(Gpus { driver, process: std::process::id(), devices: (0..count).map(|_| OnceLock::new()).collect() })
}

impl Driver {
    fn check(&self, result: c_int) -> std::result::Result<(), String> {
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
}

impl Gpu {
    fn open(driver: &'static Driver, index: usize) -> std::result::Result<Gpu, String> {
        let mut device = 0;
        let mut context = null_mut();
        // SAFETY: numbers and a handle to be filled. The primary context is retained for good.
        unsafe { driver.check((driver.cuDeviceGet)(&mut device, index as c_int))? };
        let attribute = |number: c_int| -> std::result::Result<usize, String> {
            let mut value = 0;
            // SAFETY: as above.
            unsafe { driver.check((driver.cuDeviceGetAttribute)(&mut value, number, device))? };
            Ok(value.max(0) as usize)
        };
        let capability = 10 * attribute(CAPABILITY_MAJOR)? + attribute(CAPABILITY_MINOR)?;
        let limits = Limits {
            multiprocessors: attribute(MULTIPROCESSORS)?.max(1),
            shared_per_block: attribute(SHARED_PER_BLOCK_OPTIN)?,
            shared_per_multiprocessor: attribute(SHARED_PER_MULTIPROCESSOR)?,
            registers_per_multiprocessor: attribute(REGISTERS_PER_MULTIPROCESSOR)?,
            threads_per_multiprocessor: attribute(THREADS_PER_MULTIPROCESSOR)?,
        };
        let nvrtc = nvrtc().map_err(|error| error.to_string())?;
        let target =
            target(&nvrtc.architectures, capability as u32).map_err(|reason| match driver.name(device) {
                Some(name) => format!("it is a {name}, {reason}"),
                None => reason,
            })?;
        // SAFETY: as above.
        unsafe { driver.check((driver.cuDevicePrimaryCtxRetain)(&mut context, device))? };
        Ok(Gpu { driver, index, context, limits, target, table: Table::default() })
    }

    /// Makes the context current on this thread until the guard is dropped.
    fn enter(&self) -> std::result::Result<Current<'_>, String> {
        let driver = self.driver;
        let mut current = null_mut();
        // SAFETY: a handle to be filled, and a context that is never released.
        unsafe {
            driver.check((driver.cuCtxGetCurrent)(&mut current))?;
            if current == self.context {
                return Ok(Current { driver: None });
            }
            driver.check((driver.cuCtxPushCurrent_v2)(self.context))?;
        }
        Ok(Current { driver: Some(driver) })
    }

    fn load_image(
        &self,
        image: &[u8],
        name: &str,
        plan: &Plan,
        fixed: usize,
    ) -> std::result::Result<usize, String> {
        let _current = self.enter()?;
        let _loading = AllowLoading::new(self.driver);
        let driver = self.driver;
        let (mut module, mut function) = (null_mut(), null_mut());
        let name = CString::new(name).expect("kernels' names hold no zero byte");
        let mut image = image.to_vec();
        image.push(0); // PTX is a string
        // SAFETY: a whole image, a terminated name and handles to be filled. Modules stay loaded.
        unsafe {
            driver.check((driver.cuModuleLoadData)(&mut module, image.as_ptr().cast()))?;
            driver.check((driver.cuModuleGetFunction)(&mut function, module, name.as_ptr()))?;
            if plan.shared > 0 {
                // A launch may have 48 KiB in all without asking: ask.
                let bytes = plan.shared as c_int;
                driver.check((driver.cuFuncSetAttribute)(function, DYNAMIC_SHARED_BYTES, bytes))?;
                // Of the memory that L1 shares, take what lets all planned blocks be there at once.
                let percent = (plan.blocks * (plan.shared + fixed) * 100)
                    .div_ceil(self.limits.shared_per_multiprocessor)
                    .min(100) as c_int;
                driver.check((driver.cuFuncSetAttribute)(function, SHARED_CARVEOUT, percent))?;
            }
        }
        Ok(function as usize)
    }
}

impl Driver {
    fn name(&self, device: c_int) -> Option<String> {
        let mut name: [c_char; 256] = [0; 256];
        // SAFETY: the driver ends the name within the 255 bytes it is told of.
        unsafe {
            self.check((self.cuDeviceGetName)(name.as_mut_ptr(), 255, device)).ok()?;
            Some(CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned())
        }
    }
}

/// While it lives the GPU's context is current; then the one that was current before is again.
struct Current<'a> {
    driver: Option<&'a Driver>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if let Some(driver) = self.driver {
            let mut popped = null_mut();
            // SAFETY: takes off what `enter` put on.
            unsafe { (driver.cuCtxPopCurrent_v2)(&mut popped) };
        }
    }
}

/// While it lives, this thread may load kernels although a stream is being captured in a CUDA graph:
/// loading is no work of the stream, and without this it would break the capture. (A driver older than
/// that of CUDA 12.3 refuses all the same.)
struct AllowLoading<'a> {
    driver: &'a Driver,
    mode: c_int,
}

impl AllowLoading<'_> {
    fn new(driver: &Driver) -> AllowLoading<'_> {
        let mut mode = RELAXED_CAPTURE;
        // SAFETY: swaps the thread's mode with the one given.
        unsafe { (driver.cuThreadExchangeStreamCaptureMode)(&mut mode) };
        AllowLoading { driver, mode }
    }
}

impl Drop for AllowLoading<'_> {
    fn drop(&mut self) {
        // SAFETY: as above; puts back what was there.
        unsafe { (self.driver.cuThreadExchangeStreamCaptureMode)(&mut self.mode) };
    }
}

impl Device for Gpu {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn table(&self) -> &Table {
        &self.table
    }

    fn load(&self, specialisation: &Specialisation, plan: Plan) -> Result<Loaded> {
        let built = build(specialisation, plan, &self.limits, self.target)?;
        let name = specialisation.kernel.name();
        let fixed = built.binary.shared as usize + super::plan::RESERVED;
        let function = self.load_image(&built.binary.image, name, &built.plan, fixed).map_err(|reason| {
            let advice = match reason.starts_with(OF_A_CAPTURE) {
                true => "; before a CUDA graph is captured, call `ddl.cuda.warmup` or run it once",
                false => "",
            };
            Error::Cuda(format!("`{name}` could not be loaded on cuda:{}: {reason}{advice}", self.index))
        })?;
        Ok(Loaded { kernel: specialisation.kernel, plan: built.plan, function })
    }

    unsafe fn launch(
        &self,
        loaded: &Loaded,
        grid: [u32; 2],
        stream: u64,
        argument: *mut c_void,
    ) -> Result<()> {
        let driver = self.driver;
        let mut parameters = [argument];
        let launched = self.enter().and_then(|_current| {
            // SAFETY: as the caller promises; the function was loaded in this context.
            driver.check(unsafe {
                (driver.cuLaunchKernel)(
                    loaded.function as *mut c_void,
                    grid[0],
                    grid[1],
                    1,
                    loaded.plan.threads as c_uint,
                    1,
                    1,
                    loaded.plan.shared as c_uint,
                    stream as *mut c_void,
                    parameters.as_mut_ptr(),
                    null_mut(),
                )
            })
        });
        launched.map_err(|reason| {
            let name = loaded.kernel.name();
            Error::Cuda(format!("`{name}` could not be launched on cuda:{}: {reason}", self.index))
        })
    }
}
