//! From a specialisation to a launch: one table look-up, a few divisions, one structure by value.
//!
//! Nothing here synchronises with the device or reads from it.

use super::backend::{Backend, loaded};
use super::table::Loaded;
use crate::cuda::kernel::Specialisation;
use crate::cuda::kernel::arguments::Address;
use crate::error::Result;
use crate::tensor::Tensor;

/// The device, stream and memory of one call.
pub struct Call<'a> {
    pub device: &'a dyn Backend,
    /// handle of the stream, 0 for the default one
    pub stream: u64,
    pub memory: &'a dyn Memory,
}

/// Memory on the device of a call, which lives until the kernels have run.
pub trait Memory {
    /// Allocates so many bytes, aligned to 16.
    fn allocate(&self, bytes: usize) -> Result<Address>;

    /// Copies a weight over time, (d, m, K), as (K, d, m): neighbouring threads then load neighbouring weights. A copy
    /// kept from call to call would be stale in a CUDA graph, which replays the launches after the weight has changed;
    /// this one is replayed with them, and takes as long as some tens of tokens.
    fn last_axis_first(&self, weight: &Tensor) -> Result<Address>;
}

impl Call<'_> {
    pub fn loaded(&self, specialisation: impl Into<Specialisation>) -> Result<Loaded> {
        loaded(self.device, &specialisation.into())
    }

    /// Launches a kernel of this call. `T` is its structure in arguments.rs.
    pub fn launch<T: Copy>(&self, loaded: &Loaded, grid: [usize; 2], mut argument: T) -> Result<()> {
        let grid = grid.map(|blocks| u32::try_from(blocks).expect("plans keep to the limits of a grid"));
        // SAFETY: `T` is the kernel's structure; its addresses are those of tensors that outlive the call,
        // of the sizes that were checked (src/problem), and of `memory`.
        unsafe { self.device.launch(loaded, grid, self.stream, (&raw mut argument).cast()) }
    }
}
