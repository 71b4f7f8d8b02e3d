//! GPUs through NVIDIA's driver, which is opened on the first call that needs it, never at import.

use std::ffi::{CString, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUfunction_attribute as Setting};

use super::backend::Backend;
use super::driver::{AllowLoading, Clusters, Current, Driver, call};
use super::table::{Loaded, Table};
use crate::cuda::compile::build;
use crate::cuda::compile::nvrtc::{Target, nvrtc, target};
use crate::cuda::kernel::Specialisation;
use crate::cuda::plan::{Limits, Overrides, Plan, most_of_a_cluster};
use crate::environment;
use crate::error::{Error, Result};
use crate::library::Library;

/// Errors of operations that a stream capture forbids, 900 to 908, begin with this.
const CAPTURE_ERROR: &str = "CUDA error 90";

struct Gpus {
    driver: Driver,
    clusters: Option<Clusters>,
    /// the process that started the driver
    process: u32,
    devices: Vec<OnceLock<std::result::Result<Arc<Gpu>, String>>>,
}

/// One GPU in its primary context, which torch uses, too.
pub struct Gpu {
    driver: &'static Driver,
    clusters: Option<&'static Clusters>,
    index: usize,
    device: sys::CUdevice,
    context: sys::CUcontext,
    limits: Limits,
    overrides: Overrides,
    pub target: Target,
    table: Table,
}

// SAFETY: a context's handle may be used from any thread that makes it current, as `Current` does.
unsafe impl Send for Gpu {}
unsafe impl Sync for Gpu {}

/// Returns torch's device `cuda:index`. If it cannot be used, the error is kept and returned again.
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
        match call!(driver.cuInit(0)) {
            0 => call!(driver.cuDeviceGetCount(&mut count)),
            fault => fault,
        }
    };
    if result == sys::CUresult::CUDA_ERROR_NO_DEVICE as c_int || (result == 0 && count <= 0) {
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

impl Gpu {
    fn open(gpus: &'static Gpus, index: usize) -> std::result::Result<Gpu, String> {
        let driver = &gpus.driver;
        let mut device = 0;
        let mut context = null_mut();
        // SAFETY: numbers and a handle to be filled. The primary context is never released.
        unsafe { driver.check(call!(driver.cuDeviceGet(&mut device, index as c_int)))? };
        let attribute = |which: Attribute| -> std::result::Result<usize, String> {
            let mut value = 0;
            // SAFETY: as above.
            unsafe { driver.check(call!(driver.cuDeviceGetAttribute(&mut value, which, device)))? };
            Ok(value.max(0) as usize)
        };
        let capability = 10 * attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?
            + attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let nvrtc = nvrtc().map_err(|error| error.to_string())?;
        let target =
            target(&nvrtc.architectures, capability as u32).map_err(|reason| match driver.name(device) {
                Some(name) => format!("it is a {name}, {reason}"),
                None => reason,
            })?;
        let most = most_of_a_cluster(target.architecture(), nvrtc.version);
        let has_clusters =
            most > 1 && attribute(Attribute::CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH).is_ok_and(|yes| yes > 0);
        let clusters = gpus.clusters.as_ref().filter(|_| has_clusters);
        let limits = Limits {
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.max(1),
            shared_per_block: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            shared_per_multiprocessor: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
            )?,
            registers_per_multiprocessor: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR,
            )?,
            threads_per_multiprocessor: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR,
            )?,
            blocks_per_multiprocessor: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR,
            )?,
            cluster: clusters.map_or(1, |_| most),
        };
        let overrides = Overrides::parse(&environment::kernels::plan());
        let overrides = overrides.map_err(|fault| format!("`DDL_PLAN` {fault}"))?;
        // SAFETY: as above.
        unsafe { driver.check(call!(driver.cuDevicePrimaryCtxRetain(&mut context, device)))? };
        Ok(Gpu {
            driver,
            clusters,
            index,
            device,
            context,
            limits,
            overrides,
            target,
            table: Table::default(),
        })
    }

    fn make_current(&self) -> std::result::Result<Current<'_>, String> {
        // SAFETY: the primary context is never released.
        unsafe { self.driver.make_current(self.context) }
    }

    /// Fails if torch works in another context than the primary one, to which the kernels and torch's memory belong.
    fn check_context(&self, stream: sys::CUstream) -> std::result::Result<(), String> {
        match self.driver.runs_elsewhere(stream, self.context, self.device)? {
            true => {
                Err("the current stream belongs to a green context, or to another one that is not the GPU's \
                         primary context: call it outside of that context"
                    .into())
            }
            false => Ok(()),
        }
    }

    fn load_image(
        &self,
        image: &[u8],
        name: &str,
        plan: &Plan,
        fixed: usize,
    ) -> std::result::Result<usize, String> {
        let _current = self.make_current()?;
        let _loading = AllowLoading::new(self.driver);
        let driver = self.driver;
        let (mut module, mut function) = (null_mut(), null_mut());
        let name = CString::new(name).expect("kernels' names hold no zero byte");
        let mut image = image.to_vec();
        image.push(0); // PTX is a terminated string
        // SAFETY: a whole image, a terminated name and handles to be filled. Modules stay loaded.
        unsafe {
            driver.check(call!(driver.cuModuleLoadData(&mut module, image.as_ptr().cast())))?;
            driver.check(call!(driver.cuModuleGetFunction(&mut function, module, name.as_ptr())))?;
            let set = |setting: Setting, value: c_int| {
                driver.check(call!(driver.cuFuncSetAttribute(function, setting, value)))
            };
            if plan.shared > 0 {
                // Without this attribute a launch may have 48 KiB in all.
                let bytes = plan.shared as c_int;
                set(Setting::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes)?;
            }
            // L1 and shared memory divide one memory: request a carveout for all planned blocks at once.
            let percent = (plan.blocks * (plan.shared + fixed) * 100)
                .div_ceil(self.limits.shared_per_multiprocessor)
                .min(100) as c_int;
            set(Setting::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, percent)?;
            // The driver may put off loading the code until somebody asks about it. The first launch must not be that
            // moment, because it may be captured in a graph.
            let mut registers = 0;
            let asked = Setting::CU_FUNC_ATTRIBUTE_NUM_REGS;
            driver.check(call!(driver.cuFuncGetAttribute(&mut registers, asked, function)))?;
        }
        Ok(function as usize)
    }

    fn load_planned(&self, s: &Specialisation, plan: Plan, limits: &Limits) -> Result<Loaded> {
        let built = build(s, plan, limits, &self.overrides, self.target)?;
        let (name, plan) = (s.kernel().name(), built.plan);
        let fixed = built.binary.shared as usize + crate::cuda::plan::RESERVED;
        let loaded = self.load_image(&built.binary.image, name, &plan, fixed);
        let known = loaded.and_then(|function| Ok((function, self.wave(function, &plan)?)));
        let (function, wave) = known.map_err(|reason| {
            let advice = match reason.starts_with(CAPTURE_ERROR) {
                true => "; before a CUDA graph is captured, call `ddl.cuda.warmup` or run it once",
                false => "",
            };
            Error::Cuda(format!("`{name}` could not be loaded on cuda:{}: {reason}{advice}", self.index))
        })?;
        Ok(Loaded { kernel: s.kernel(), plan, wave, function })
    }

    /// Returns the blocks of a loaded kernel that run at once: as planned, but only as many as the driver says fit.
    fn wave(&self, function: usize, plan: &Plan) -> std::result::Result<usize, String> {
        let _current = self.make_current()?;
        let _loading = AllowLoading::new(self.driver); // a driver may load code for these questions, too
        let fitting = match self.clusters.filter(|_| plan.cluster > 1) {
            Some(clusters) => self.clusters_at_once(clusters, function, plan)? * plan.cluster,
            None => self.limits.multiprocessors * self.blocks_at_once(function, plan)?.max(1),
        };
        Ok(plan.wave(&self.limits).min(fitting))
    }

    /// Asks how many blocks of a loaded kernel a multiprocessor runs at once.
    fn blocks_at_once(&self, function: usize, plan: &Plan) -> std::result::Result<usize, String> {
        let (driver, mut count) = (self.driver, 0);
        // SAFETY: a number to be filled, and a function of this context.
        driver.check(unsafe {
            call!(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut count,
                function as sys::CUfunction,
                plan.threads as c_int,
                plan.shared,
            ))
        })?;
        Ok(count.max(0) as usize)
    }

    /// Asks how many clusters of a loaded kernel the GPU runs at once.
    fn clusters_at_once(
        &self,
        clusters: &Clusters,
        function: usize,
        plan: &Plan,
    ) -> std::result::Result<usize, String> {
        let launch = sys::CUlaunchConfig {
            gridDimX: self.limits.multiprocessors as c_uint,
            gridDimY: plan.cluster as c_uint,
            gridDimZ: 1,
            blockDimX: plan.threads as c_uint,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: plan.shared as c_uint,
            hStream: null_mut(),
            attrs: null_mut(),
            numAttrs: 0,
        };
        let mut count = 0;
        // SAFETY: a number to be filled, a function of this context, and a structure that outlives the call.
        let result = unsafe {
            call!(clusters.cuOccupancyMaxActiveClusters(&mut count, function as sys::CUfunction, &launch))
        };
        self.driver.check(result)?;
        Ok(count.max(0) as usize)
    }
}

impl Backend for Gpu {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn table(&self) -> &Table {
        &self.table
    }

    fn overrides(&self) -> Overrides {
        self.overrides
    }

    fn load(&self, specialisation: &Specialisation, plan: Plan) -> Result<Loaded> {
        let loaded = self.load_planned(specialisation, plan, &self.limits)?;
        if loaded.wave > 0 {
            return Ok(loaded);
        }
        // A partition of a GPU may have no room for clusters.
        let limits = Limits { cluster: 1, ..self.limits };
        let plan = Plan::new(*specialisation, &limits, &self.overrides)?;
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
        let stream = stream as sys::CUstream;
        let launched = self.check_context(stream).and_then(|()| self.make_current()).and_then(|_current| {
            // SAFETY: as the caller promises; the function was loaded in this context. A cluster's dimensions are compiled
            // into the kernel (CLUSTER_DIMS), so that the plain call launches clusters, too.
            driver.check(unsafe {
                call!(driver.cuLaunchKernel(
                    loaded.function as sys::CUfunction,
                    grid[0],
                    grid[1],
                    1,
                    loaded.plan.threads as c_uint,
                    1,
                    1,
                    loaded.plan.shared as c_uint,
                    stream,
                    parameters.as_mut_ptr(),
                    null_mut(),
                ))
            })
        });
        launched.map_err(|reason| {
            let name = loaded.kernel.name();
            Error::Cuda(format!("`{name}` could not be launched on cuda:{}: {reason}", self.index))
        })
    }
}
