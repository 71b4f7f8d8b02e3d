//! For tests: a device that CPU tensors run on instead of the CPU.

use std::sync::{Arc, PoisonError, RwLock};

use super::backend::Backend;

/// A device and the handle of its stream.
type StandIn = Option<(Arc<dyn Backend>, u64)>;

static STAND_IN: RwLock<StandIn> = RwLock::new(None);

/// Returns the device and stream for CPU tensors, if a test has set one.
pub fn current() -> StandIn {
    STAND_IN.read().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Makes CPU tensors run on a device and stream; None ends that.
pub fn replace(device: StandIn) {
    *STAND_IN.write().unwrap_or_else(PoisonError::into_inner) = device;
}
