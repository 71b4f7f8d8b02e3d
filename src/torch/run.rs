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

    /// Returns where the operator runs: where `tensor` is. A listing is made by its own device.
    pub fn place<'a>(&self, tensor: &'a Tensor) -> Result<Place<'a>> {
        let (device, stream, tensors_on) = match &self.listing {
            Some(device) => (device.clone(), 0, None),
            None => match device_of(&tensor.device)? {
                Some((device, stream)) => (device, stream, Some(&tensor.device)),
                None => return Ok(Place::Cpu { threads: shims().threads() }),
            },
        };
        Ok(Place::Gpu(Gpu { device, stream, memory: Scratch { tensors_on, held: RefCell::default() } }))
    }
}

impl Run {
    /// Returns the threads of an operator that runs on CPUs alone; fails if `tensor` is elsewhere.
    #[cfg(feature = "python")]
    pub fn threads(&self, tensor: &Tensor) -> Result<usize> {
        match (&tensor.device, &self.listing) {
            (Device::Cpu, None) => Ok(shims().threads()),
            (device, _) => {
                let (expected, got) = (Device::Cpu.to_string(), device.to_string());
                Err(crate::error::Error::Device { name: tensor.name, expected, got })
            }
        }
    }
}

/// Where an operator runs.
pub enum Place<'a> {
    Cpu { threads: usize },
    Gpu(Gpu<'a>),
}

/// A GPU, its stream, and the memory that one call takes there.
pub struct Gpu<'a> {
    device: Arc<dyn Backend>,
    stream: u64,
    memory: Scratch<'a>,
}

impl Gpu<'_> {
    pub fn call(&self) -> Call<'_> {
        Call { device: &*self.device, stream: self.stream, memory: &self.memory }
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

/// Memory from torch, held until the kernels are launched: the stream orders later uses after them. None, if the
/// kernels are only listed.
struct Scratch<'a> {
    tensors_on: Option<&'a Device>,
    held: RefCell<Vec<Owned>>,
}

impl Scratch<'_> {
    fn hold(&self, make: impl FnOnce(&Device) -> Result<Owned>) -> Result<u64> {
        let Some(device) = self.tensors_on else { return Ok(0) };
        let owned = make(device)?;
        let address = owned.address();
        self.held.borrow_mut().push(owned);
        Ok(address)
    }
}

impl Memory for Scratch<'_> {
    fn allocate(&self, bytes: usize) -> Result<u64> {
        self.hold(|device| Owned::bytes(bytes, device))
    }

    fn last_axis_first(&self, weight: &Tensor) -> Result<u64> {
        self.hold(|_| last_axis_first(weight))
    }
}
