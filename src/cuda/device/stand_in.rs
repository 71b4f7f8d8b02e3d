//! For tests: a device that CPU tensors run on instead of the CPU.

use std::sync::{Arc, PoisonError, RwLock};

use super::backend::Backend;

static STAND_IN: RwLock<Option<Arc<dyn Backend>>> = RwLock::new(None);

/// Returns the device for CPU tensors, if a test has set one.
pub fn current() -> Option<Arc<dyn Backend>> {
    STAND_IN.read().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Makes CPU tensors run on `device`; None ends that.
pub fn replace(device: Option<Arc<dyn Backend>>) {
    *STAND_IN.write().unwrap_or_else(PoisonError::into_inner) = device;
}
