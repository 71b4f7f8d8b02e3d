//! One call: its device, its scratch memory and the outputs that it allocates.

use std::cell::RefCell;
use std::sync::Arc;

use super::memory::{BYTE, Owned, last_axis_first, number_of};
use super::shims::shims;
use crate::cuda::device::gpu::gpu;
use crate::cuda::device::{Backend, Call, Memory};
use crate::error::Result;
use crate::problem::Allocate;
use crate::tensor::{Device, Dtype, Tensor};

/// A call in progress.
#[derive(Default)]
pub struct Run {
    /// lists the kernels of the call instead of running them; no tensor has memory
    listing: Option<Arc<dyn Backend>>,
    /// outputs in the order of the schema
    outputs: Vec<Owned>,
}

impl Run {
    /// A call that only lists its kernels.
    #[cfg(feature = "python")]
    pub fn listing(device: Arc<dyn Backend>) -> Run {
        Run { listing: Some(device), ..Run::default() }
    }

    pub fn into_outputs(self) -> Vec<Owned> {
        self.outputs
    }

    /// Runs the operator on the GPU of `tensor`. If it is on the CPU, returns the number of threads to do it with.
    pub fn on_device(
        &self,
        tensor: &Tensor,
        launch: impl FnOnce(&Call<'_>) -> Result<()>,
    ) -> Result<Option<usize>> {
        if let Some(device) = &self.listing {
            launch(&Call { device: &**device, stream: 0, memory: &Nothing })?;
            return Ok(None);
        }
        let Some((device, stream)) = device_of(&tensor.device)? else { return Ok(Some(shims().threads())) };
        let memory = Scratch { device: &tensor.device, held: RefCell::default() };
        launch(&Call { device: &*device, stream, memory: &memory })?;
        Ok(None)
    }
}

impl Allocate for Run {
    fn output(
        &mut self,
        name: &'static str,
        shape: &[usize],
        dtype: Dtype,
        beside: &Tensor,
    ) -> Result<Tensor> {
        if self.listing.is_some() {
            return Ok(Tensor::fake(name, shape.to_vec(), dtype, 0));
        }
        let owned = Owned::empty(shape, number_of(dtype), &beside.device)?;
        let (tensor, _) = owned.view(name)?;
        self.outputs.push(owned);
        Ok(tensor)
    }

    /// A stand-in takes the place of the next output.
    fn absent_output(&mut self, beside: &Tensor) -> Result<Option<Tensor>> {
        if self.listing.is_none() {
            self.outputs.push(Owned::empty(&[0], BYTE, &beside.device)?);
        }
        Ok(None)
    }
}

/// Returns the backend and the stream for tensors on `tensors_on`; None is the CPU.
fn device_of(tensors_on: &Device) -> Result<Option<(Arc<dyn Backend>, u64)>> {
    #[cfg(feature = "emulator")]
    if *tensors_on == Device::Cpu {
        return Ok(crate::cuda::device::stand_in::current());
    }
    let Device::Cuda(index) = *tensors_on else { return Ok(None) };
    Ok(Some((gpu(index)?, shims().cuda_stream(index)?)))
}

/// Memory from torch, held until the kernels are launched: the stream orders later uses after them.
struct Scratch<'a> {
    device: &'a Device,
    held: RefCell<Vec<Owned>>,
}

impl Scratch<'_> {
    fn hold(&self, owned: Owned) -> u64 {
        let address = owned.address();
        self.held.borrow_mut().push(owned);
        address
    }
}

impl Memory for Scratch<'_> {
    fn allocate(&self, bytes: usize) -> Result<u64> {
        Ok(self.hold(Owned::bytes(bytes, self.device)?))
    }

    fn last_axis_first(&self, weight: &Tensor) -> Result<u64> {
        Ok(self.hold(last_axis_first(weight)?))
    }
}

/// No memory, for calls whose kernels are only compiled.
struct Nothing;

impl Memory for Nothing {
    fn allocate(&self, _: usize) -> Result<u64> {
        Ok(0)
    }

    fn last_axis_first(&self, _: &Tensor) -> Result<u64> {
        Ok(0)
    }
}
