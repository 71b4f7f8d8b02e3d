//! The interface to a device: a GPU, the tests' emulated one, or one that only compiles ahead of time.

use std::ffi::c_void;

use super::table::{Loaded, Table};
use crate::cuda::kernel::Specialisation;
use crate::cuda::plan::{Limits, Overrides, Plan};
use crate::error::Result;

/// A device that kernels are planned for, loaded on and launched on.
pub trait Backend: Send + Sync {
    fn limits(&self) -> &Limits;

    /// The kernels loaded so far.
    fn table(&self) -> &Table;

    /// The overrides of the planner's choices.
    fn overrides(&self) -> Overrides {
        Overrides::default()
    }

    /// Compiles a kernel, or finds it compiled, and loads it. Returns the plan used, because a plan that spills
    /// registers is replaced.
    fn load(&self, specialisation: &Specialisation, plan: Plan) -> Result<Loaded>;

    /// # Safety
    /// `argument` points to the structure that the kernel takes. Every address in it is null, or valid on this
    /// device for all that the kernel reads and writes there.
    unsafe fn launch(
        &self,
        loaded: &Loaded,
        grid: [u32; 2],
        stream: u64,
        argument: *mut c_void,
    ) -> Result<()>;
}

/// Returns the kernel of a specialisation, built on its first use.
pub fn loaded(device: &dyn Backend, specialisation: &Specialisation) -> Result<Loaded> {
    if let Some(loaded) = device.table().get(specialisation) {
        return Ok(loaded);
    }
    let _alone = device.table().building();
    if let Some(loaded) = device.table().get(specialisation) {
        return Ok(loaded); // built while this thread waited
    }
    let plan = Plan::new(*specialisation, device.limits(), &device.overrides())?;
    let loaded = device.load(specialisation, plan)?;
    device.table().insert(*specialisation, loaded);
    Ok(loaded)
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::cuda::kernel::{Expand, Kernel};
    use crate::cuda::plan::samples;
    use crate::error::Error;
    use crate::tensor::Dtype;

    /// A device that counts what it loads, and refuses widths above 64.
    #[derive(Default)]
    struct Counting {
        table: Table,
        loads: AtomicUsize,
    }

    impl Backend for Counting {
        fn limits(&self) -> &Limits {
            &samples::LARGE
        }

        fn table(&self) -> &Table {
            &self.table
        }

        fn load(&self, specialisation: &Specialisation, plan: Plan) -> Result<Loaded> {
            let Specialisation::Expand(Expand { d, .. }) = *specialisation else { panic!("an expansion") };
            let function = self.loads.fetch_add(1, Ordering::Relaxed);
            std::thread::yield_now(); // another thread may find that there is no kernel yet
            match d {
                ..=64 => Ok(Loaded { kernel: specialisation.kernel(), plan, wave: d, function }),
                _ => Err(Error::Cuda(format!("no kernel for {d}"))),
            }
        }

        unsafe fn launch(&self, _: &Loaded, _: [u32; 2], _: u64, _: *mut c_void) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn threads_that_start_at_once_load_a_kernel_once() {
        let (device, start) = (Counting::default(), Barrier::new(8));
        let expand = |d: usize| samples::expansion(Kernel::ExpandForward, d, 4, 1, Dtype::F32);
        let work = || {
            start.wait();
            let found = |d: usize| loaded(&device, &(&expand(d)).into());
            let functions: Vec<usize> = (8..=64).map(|d| found(d).unwrap()).map(|l| l.function).collect();
            assert_eq!(found(65).unwrap_err().to_string(), "no kernel for 65");
            functions
        };
        let all: Vec<Vec<usize>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(work)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(all.iter().all(|functions| functions == &all[0]), "every thread has the same kernels");
        // A failure is not kept: each of the threads asks again.
        assert_eq!(device.loads.load(Ordering::Relaxed), all[0].len() + 8);
    }
}
