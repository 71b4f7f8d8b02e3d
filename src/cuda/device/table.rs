//! The kernels that a device has loaded.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

use crate::cuda::kernel::{Kernel, Specialisation};
use crate::cuda::plan::Plan;

/// A kernel that is ready to be launched.
#[derive(Clone, Copy, Debug)]
pub struct Loaded {
    pub kernel: Kernel,
    pub plan: Plan,
    /// blocks that run on the device at once
    pub wave: usize,
    /// the device's handle of the kernel
    pub function: usize,
}

/// The kernels of one device, by their specialisations.
#[derive(Default)]
pub struct Table {
    loaded: RwLock<HashMap<Specialisation, Loaded>>,
    /// held so that two threads do not build the same kernel
    building: Mutex<()>,
}

impl Table {
    pub(super) fn get(&self, specialisation: &Specialisation) -> Option<Loaded> {
        self.loaded.read().unwrap_or_else(PoisonError::into_inner).get(specialisation).copied()
    }

    pub(super) fn insert(&self, specialisation: Specialisation, loaded: Loaded) {
        self.loaded.write().unwrap_or_else(PoisonError::into_inner).insert(specialisation, loaded);
    }

    /// Returns the lock to hold while a kernel is built.
    pub(super) fn building(&self) -> MutexGuard<'_, ()> {
        self.building.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
