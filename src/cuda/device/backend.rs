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
