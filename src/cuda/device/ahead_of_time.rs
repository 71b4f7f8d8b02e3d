//! Compiling ahead of time: calls are made as usual, but their kernels are only listed and later compiled.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use rayon::ThreadPoolBuilder;
use rayon::prelude::*;

use super::backend::{Backend, loaded};
use super::gpu::Gpu;
use super::table::{Loaded, Table};
use crate::cuda::compile::nvrtc::{OLDEST, Target, nvrtc};
use crate::cuda::compile::{Built, build};
use crate::cuda::kernel::Specialisation;
use crate::cuda::plan::{Limits, Overrides, Plan, most_of_a_cluster};
use crate::error::{Error, Result};

/// A device that launches nothing and remembers the kernels that it was asked to load.
pub struct AheadOfTime {
    /// the GPU to load the kernels on; None if they are only for an architecture
    gpu: Option<Arc<Gpu>>,
    target: Target,
    limits: Limits,
    table: Table,
    asked: Mutex<HashMap<Specialisation, Plan>>,
}

impl AheadOfTime {
    /// Compiles for an architecture like `sm_90`, even without such a GPU.
    pub fn new(architecture: &str) -> Result<AheadOfTime> {
        let nvrtc = nvrtc()?;
        let known: Vec<u32> = nvrtc.architectures.iter().copied().filter(|&known| known >= OLDEST).collect();
        let number = architecture.strip_prefix("sm_").and_then(|number| number.parse().ok());
        let Some(number) = number.filter(|number| known.contains(number)) else {
            let known: Vec<String> = known.iter().map(|known| format!("sm_{known}")).collect();
            return Err(Error::Argument(format!(
                "`architecture` must be one of {}, got {architecture:?}",
                known.join(", ")
            )));
        };
        Ok(AheadOfTime::with(None, Target::Cubin(number), typical(number, nvrtc.version)))
    }

    pub fn for_gpu(gpu: Arc<Gpu>) -> AheadOfTime {
        let (target, limits) = (gpu.target, *gpu.limits());
        AheadOfTime::with(Some(gpu), target, limits)
    }

    fn with(gpu: Option<Arc<Gpu>>, target: Target, limits: Limits) -> AheadOfTime {
        AheadOfTime { gpu, target, limits, table: Table::default(), asked: Mutex::default() }
    }

    /// Compiles all listed kernels on every core and, if there is a GPU, loads them.
    pub fn compile(&self) -> Result<Vec<Built>> {
        let asked = std::mem::take(&mut *self.asked.lock().unwrap_or_else(PoisonError::into_inner));
        let mut asked: Vec<_> = asked.into_iter().collect();
        asked.sort_by_key(|(s, _)| format!("{:?} {s:?}", s.kernel())); // the same order every time
        // A pool of its own, because a forked process has none of the global pool's threads and would wait for ever.
        let pool = ThreadPoolBuilder::new().build().map_err(|reason| Error::Cuda(reason.to_string()))?;
        let compile = |(s, plan): &_| build(s, *plan, &self.limits, &self.overrides(), self.target);
        let built: Vec<_> = pool.install(|| asked.par_iter().map(compile).collect::<Result<_>>())?;
        if let Some(gpu) = &self.gpu {
            built.iter().try_for_each(|built| loaded(&**gpu, &built.specialisation).map(|_| ()))?;
        }
        Ok(built)
    }
}

/// Returns the limits of an architecture's GPUs. The code depends on the sizes of memory, not on the number of
/// multiprocessors.
fn typical(architecture: u32, compiler: (i32, i32)) -> Limits {
    let (shared, threads, blocks) = match architecture {
        80 => (164, 2048, 32),
        86 => (100, 1536, 16),
        87 => (164, 1536, 16),
        90 | 100 | 103 => (228, 2048, 32),
        110 => (228, 1536, 24),
        _ => (100, 1536, 24),
    };
    Limits {
        multiprocessors: 128,
        shared_per_block: (shared - 1) << 10,
        shared_per_multiprocessor: shared << 10,
        registers_per_multiprocessor: 65_536,
        threads_per_multiprocessor: threads,
        blocks_per_multiprocessor: blocks,
        cluster: most_of_a_cluster(architecture, compiler),
    }
}

impl Backend for AheadOfTime {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn table(&self) -> &Table {
        &self.table
    }

    fn overrides(&self) -> Overrides {
        self.gpu.as_ref().map_or_else(Overrides::default, |gpu| gpu.overrides())
    }

    fn load(&self, specialisation: &Specialisation, plan: Plan) -> Result<Loaded> {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.insert(*specialisation, plan);
        let wave = plan.wave(&self.limits);
        Ok(Loaded { kernel: specialisation.kernel(), plan, wave, function: 0 })
    }

    unsafe fn launch(&self, _: &Loaded, _: [u32; 2], _: u64, _: *mut c_void) -> Result<()> {
        Ok(())
    }
}
