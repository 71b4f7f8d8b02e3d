//! GPUs through NVIDIA's driver, which is opened on the first call that needs it, never at import.

use std::ffi::{CString, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};

use super::backend::Backend as Device;
use super::driver::{Clusters, Configuration, Driver};
use super::table::{Loaded, Table};
use crate::cuda::compile::build;
use crate::cuda::compile::nvrtc::{Target, nvrtc, target};
use crate::cuda::kernel::Specialisation;
use crate::cuda::library::Library;
use crate::cuda::plan::{Limits, Overrides as Forced, Plan, most_of_a_cluster};
use crate::environment;
use crate::error::{Error, Result};

// Numbers of cuda.h.
const NO_DEVICE: c_int = 100;
const MULTIPROCESSORS: c_int = 16;
const THREADS_PER_MULTIPROCESSOR: c_int = 39;
const CAPABILITY_MAJOR: c_int = 75;
const CAPABILITY_MINOR: c_int = 76;
const SHARED_PER_MULTIPROCESSOR: c_int = 81;
const REGISTERS_PER_MULTIPROCESSOR: c_int = 82;
const SHARED_PER_BLOCK_OPTIN: c_int = 97;
const CLUSTER_LAUNCH: c_int = 120;
const DYNAMIC_SHARED_BYTES: c_int = 8;
const SHARED_CARVEOUT: c_int = 9;
const RELAXED_CAPTURE: c_int = 2;
/// How what a captured stream forbids begins: 900 to 908.
const OF_A_CAPTURE: &str = "CUDA error 90";

struct Gpus {
    driver: Driver,
    clusters: Option<Clusters>,
    /// that started the driver
    process: u32,
    devices: Vec<OnceLock<std::result::Result<Arc<Gpu>, String>>>,
}

/// One GPU in its primary context, which is the one that torch works in.
pub struct Gpu {
    driver: &'static Driver,
    clusters: Option<&'static Clusters>,
    index: usize,
    context: *mut c_void,
    limits: Limits,
    forced: Forced,
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
    let opened = slot.get_or_init(|| Gpu::open(gpus, index).map(Arc::new));
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
    let clusters = Clusters::load(&library).ok();
    let devices = (0..count).map(|_| OnceLock::new()).collect();
    Ok(Gpus { driver, clusters, process: std::process::id(), devices })
}

/// Choices made by hand, for those who time them.
fn forced(limits: &Limits) -> std::result::Result<Forced, String> {
    let words = environment::plan();
    let forced = Forced::parse(&words).map_err(|fault| format!("`DDL_PLAN` {fault}"))?;
    let most = limits.cluster;
    match forced.cluster {
        Some(cluster) if cluster > most => {
            Err(format!("`DDL_PLAN` must have CLUSTER up to {most} on this GPU, got {cluster}"))
        }
        _ => Ok(forced),
    }
}

impl Gpu {
    fn open(gpus: &'static Gpus, index: usize) -> std::result::Result<Gpu, String> {
        let driver = &gpus.driver;
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
        let nvrtc = nvrtc().map_err(|error| error.to_string())?;
        let target =
            target(&nvrtc.architectures, capability as u32).map_err(|reason| match driver.name(device) {
                Some(name) => format!("it is a {name}, {reason}"),
                None => reason,
            })?;
        let most = most_of_a_cluster(target.architecture(), nvrtc.version);
        let has_clusters = most > 1 && attribute(CLUSTER_LAUNCH).is_ok_and(|yes| yes > 0);
        let clusters = gpus.clusters.as_ref().filter(|_| has_clusters);
        let limits = Limits {
            multiprocessors: attribute(MULTIPROCESSORS)?.max(1),
            shared_per_block: attribute(SHARED_PER_BLOCK_OPTIN)?,
            shared_per_multiprocessor: attribute(SHARED_PER_MULTIPROCESSOR)?,
            registers_per_multiprocessor: attribute(REGISTERS_PER_MULTIPROCESSOR)?,
            threads_per_multiprocessor: attribute(THREADS_PER_MULTIPROCESSOR)?,
            cluster: clusters.map_or(1, |_| most),
        };
        let forced = forced(&limits)?;
        // SAFETY: as above.
        unsafe { driver.check((driver.cuDevicePrimaryCtxRetain)(&mut context, device))? };
        Ok(Gpu { driver, clusters, index, context, limits, forced, target, table: Table::default() })
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

    fn load_planned(&self, s: &Specialisation, plan: Plan, limits: &Limits) -> Result<Loaded> {
        let built = build(s, plan, limits, &self.forced, self.target)?;
        let (name, plan) = (s.kernel.name(), built.plan);
        let fixed = built.binary.shared as usize + crate::cuda::plan::RESERVED;
        let loaded = self.load_image(&built.binary.image, name, &plan, fixed);
        let known = loaded.and_then(|function| Ok((function, self.wave(function, &plan)?)));
        let (function, wave) = known.map_err(|reason| {
            let advice = match reason.starts_with(OF_A_CAPTURE) {
                true => "; before a CUDA graph is captured, call `ddl.cuda.warmup` or run it once",
                false => "",
            };
            Error::Cuda(format!("`{name}` could not be loaded on cuda:{}: {reason}{advice}", self.index))
        })?;
        Ok(Loaded { kernel: s.kernel, plan, wave, function })
    }

    /// Blocks of a loaded kernel that run at once: as planned, but of clusters those that find room side by side.
    fn wave(&self, function: usize, plan: &Plan) -> std::result::Result<usize, String> {
        let planned = plan.wave(&self.limits);
        let Some(clusters) = self.clusters.filter(|_| plan.cluster > 1) else {
            return Ok(planned);
        };
        let _current = self.enter()?;
        let _loading = AllowLoading::new(self.driver); // this may be what first needs the code
        let configuration = Configuration {
            grid: [self.limits.multiprocessors as c_uint, plan.cluster as c_uint, 1],
            block: [plan.threads as c_uint, 1, 1],
            shared: plan.shared as c_uint,
            stream: null_mut(),
            attributes: null_mut(),
            attribute_count: 0,
        };
        let mut count = 0;
        // SAFETY: a number to be filled, a function of this context, and a structure that outlives the call.
        let result = unsafe {
            (clusters.cuOccupancyMaxActiveClusters)(&mut count, function as *mut c_void, &configuration)
        };
        self.driver.check(result)?;
        Ok(planned.min(count.max(0) as usize * plan.cluster))
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

    fn overrides(&self) -> Forced {
        self.forced
    }

    fn load(&self, specialisation: &Specialisation, plan: Plan) -> Result<Loaded> {
        let loaded = self.load_planned(specialisation, plan, &self.limits)?;
        if loaded.wave > 0 {
            return Ok(loaded);
        }
        // A part of a GPU may have no room for clusters.
        let limits = Limits { cluster: 1, ..self.limits };
        let plan = Plan::new(specialisation, &limits, &Forced { cluster: None, ..self.forced })?;
        self.load_planned(specialisation, plan, &limits)
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
