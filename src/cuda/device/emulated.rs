//! The tests' device: kernels compiled for the CPU, and launched as on a GPU.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::backend::Backend;
use super::table::{Loaded, Table};
use crate::cuda::kernel::Specialisation;
use crate::cuda::plan::{Limits, Overrides, Plan};
use crate::error::{Error, Result};
use crate::library::Library;

/// Compiles a file of kernels/ with macros like `D=768`; returns the path of a shared object.
pub type Build = dyn Fn(&str, &[String]) -> Result<String> + Send + Sync;

pub struct Emulated {
    pub limits: Limits,
    pub overrides: Overrides,
    pub build: Box<Build>,
    pub table: Table,
}

type Launch =
    unsafe extern "C" fn(*const c_uint, *const c_uint, usize, *mut *mut c_void, *mut c_char, usize) -> c_int;

impl Backend for Emulated {
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
        let kernel = specialisation.kernel();
        let defines: Vec<String> = specialisation
            .defines()
            .into_iter()
            .chain(plan.defines())
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        let source = kernel.file().trim_end_matches(".cu");
        let path = (self.build)(source, &defines)?;
        let library = Library::open(&path).map_err(Error::Cuda)?;
        let symbol = library.symbol(&format!("ddl_emulated_{}", kernel.name())).map_err(Error::Cuda)?;
        let wave = plan.wave(&self.limits);
        Ok(Loaded { kernel, plan, wave, function: symbol as usize })
    }

    unsafe fn launch(&self, loaded: &Loaded, grid: [u32; 2], _: u64, argument: *mut c_void) -> Result<()> {
        // SAFETY: `load` found this function under the emulator's name for a launcher.
        let launch = unsafe { std::mem::transmute::<usize, Launch>(loaded.function) };
        let grid = [grid[0], grid[1], 1];
        let block = [loaded.plan.threads as c_uint, 1, 1];
        let mut parameters = [argument];
        let mut error: [c_char; 4096] = [0; 4096];
        // SAFETY: as the caller promises; the emulator ends `error` within its size.
        let failed = unsafe {
            launch(
                grid.as_ptr(),
                block.as_ptr(),
                loaded.plan.shared,
                parameters.as_mut_ptr(),
                error.as_mut_ptr(),
                error.len(),
            )
        };
        if failed == 0 {
            return Ok(());
        }
        error[error.len() - 1] = 0;
        // SAFETY: terminated just above.
        let reason = unsafe { CStr::from_ptr(error.as_ptr()) }.to_string_lossy().into_owned();
        Err(Error::Cuda(format!("`{}` failed on the emulated device: {reason}", loaded.kernel.name())))
    }
}
