//! From a specialisation to a launch: one table look-up, a few divisions, one structure by value.
//!
//! Nothing here synchronises with the device or reads from it. What runs the kernel is a [`Device`]: a
//! GPU, the emulated one of the tests, or nothing at all where kernels are only compiled ahead.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError, RwLock};

use super::arguments::Address;
use super::plan::{Forced, Limits, Plan};
use super::specialisation::{Kernel, Specialisation};
use crate::error::Result;

/// What kernels are planned for, loaded on and launched on.
pub trait Device: Send + Sync {
    fn limits(&self) -> &Limits;

    /// The kernels loaded so far.
    fn table(&self) -> &Table;

    /// Choices made by hand.
    fn forced(&self) -> Forced {
        Forced::default()
    }

    /// Compiles a kernel, or finds it compiled, and loads it. The plan comes back, because one that spills
    /// registers is relaxed.
    fn load(&self, specialisation: &Specialisation, plan: Plan) -> Result<Loaded>;

    /// # Safety
    /// `argument` points to the structure that the kernel takes, and every address in it is null or
    /// valid on this device for what the kernel does with it.
    unsafe fn launch(
        &self,
        loaded: &Loaded,
        grid: [u32; 2],
        stream: u64,
        argument: *mut c_void,
    ) -> Result<()>;
}

/// A kernel that is ready to be launched.
#[derive(Clone, Copy, Debug)]
pub struct Loaded {
    pub kernel: Kernel,
    pub plan: Plan,
    /// blocks that run on the device at once
    pub wave: usize,
    /// the device's handle of it
    pub function: usize,
}

/// The kernels of one device, by what they were compiled for.
#[derive(Default)]
pub struct Table {
    loaded: RwLock<HashMap<Specialisation, Loaded>>,
    /// held while a kernel is built, so that threads do not build the same one
    building: Mutex<()>,
}

impl Table {
    fn get(&self, specialisation: &Specialisation) -> Option<Loaded> {
        self.loaded.read().unwrap_or_else(PoisonError::into_inner).get(specialisation).copied()
    }

    fn insert(&self, specialisation: Specialisation, loaded: Loaded) {
        self.loaded.write().unwrap_or_else(PoisonError::into_inner).insert(specialisation, loaded);
    }
}

/// The kernel of a specialisation, built on its first use.
pub fn loaded(device: &dyn Device, specialisation: &Specialisation) -> Result<Loaded> {
    if let Some(loaded) = device.table().get(specialisation) {
        return Ok(loaded);
    }
    let _alone = device.table().building.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(loaded) = device.table().get(specialisation) {
        return Ok(loaded); // built while this thread waited
    }
    let plan = Plan::new(specialisation, device.limits(), &device.forced())?;
    let loaded = device.load(specialisation, plan)?;
    device.table().insert(*specialisation, loaded);
    Ok(loaded)
}

/// Where one call runs.
pub struct Call<'a> {
    pub device: &'a dyn Device,
    /// handle of the stream, 0 for the default one
    pub stream: u64,
    /// Memory of so many bytes on the device, aligned to 16, that lives until the kernels have run.
    pub allocate: &'a dyn Fn(usize) -> Result<Address>,
}

impl Call<'_> {
    pub fn loaded(&self, specialisation: &Specialisation) -> Result<Loaded> {
        loaded(self.device, specialisation)
    }

    /// Launches a kernel of this call. `T` is the structure of arguments.rs that it takes.
    pub fn launch<T: Copy>(&self, loaded: &Loaded, grid: [usize; 2], mut argument: T) -> Result<()> {
        let grid = grid.map(|blocks| u32::try_from(blocks).expect("plans keep to the limits of a grid"));
        // SAFETY: `T` is the kernel's structure; its addresses are those of tensors that outlive the call,
        // of the sizes that were checked (tensor.rs), and of `allocate`.
        unsafe { self.device.launch(loaded, grid, self.stream, (&raw mut argument).cast()) }
    }
}
