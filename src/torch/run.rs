//! One call: its device, its scratch memory and the outputs that it allocates.

use std::cell::RefCell;
use std::sync::Arc;

use super::memory::{BYTE, Owned, last_axis_first, number_of};
use super::shims::shims;
use crate::cuda::device::gpu::gpu;
use crate::cuda::device::{Backend, Call, Memory};
use crate::error::{Error, Result};
use crate::execute::{self, Caller, Target};
use crate::problem::Allocate;
use crate::tensor::{Device, Dtype, Tensor};

/// What is done with a call from torch.
#[derive(Default)]
enum Purpose {
    #[default]
    Run,
    /// Its kernels are listed; no tensor has memory.
    #[cfg(feature = "python")]
    List(Arc<dyn Backend>),
    /// Its arguments are checked; no tensor has memory.
    #[cfg(feature = "python")]
    Check,
}

/// A call from torch.
#[derive(Default)]
pub struct Run {
    purpose: Purpose,
    /// two parts of one output are allocated as one
    joins: bool,
    /// outputs in the order of the schema
    outputs: Vec<Owned>,
}

#[cfg(feature = "python")]
impl Run {
    /// A call from torch's dispatcher.
    pub fn dispatched() -> Run {
        Run { joins: true, ..Run::default() }
    }

    /// A call that only lists its kernels.
    pub fn listing(device: Arc<dyn Backend>) -> Run {
        Run { purpose: Purpose::List(device), ..Run::default() }
    }

    /// A call that ends with [`Error::Checked`] once its arguments are checked.
    pub fn checking() -> Run {
        Run { purpose: Purpose::Check, ..Run::default() }
    }
}

impl Run {
    fn has_memory(&self) -> bool {
        matches!(self.purpose, Purpose::Run)
    }

    pub fn into_outputs(self) -> Vec<Owned> {
        self.outputs
    }
}

impl Caller for Run {
    /// A listing is made by its own device.
    fn target(&self, tensor: &Tensor) -> Result<Target> {
        let (device, stream, tensors_on) = match &self.purpose {
            #[cfg(feature = "python")]
            Purpose::Check => return Err(Error::Checked),
            #[cfg(feature = "python")]
            Purpose::List(device) => (device.clone(), 0, None),
            Purpose::Run => match device_of(tensor)? {
                Some((device, stream)) => (device, stream, Some(tensor.device.clone())),
                None => return Ok(Target::Cpu { threads: shims().threads() }),
            },
        };
        Ok(Target::Gpu(Box::new(Gpu { device, stream, tensors_on, held: RefCell::default() })))
    }
}

/// A GPU, its stream, and memory from torch, held until the kernels are launched: the stream orders later uses after them.
struct Gpu {
    device: Arc<dyn Backend>,
    stream: u64,
    /// None if the kernels are only listed
    tensors_on: Option<Device>,
    held: RefCell<Vec<Owned>>,
}

impl execute::Gpu for Gpu {
    fn call(&self) -> Call<'_> {
        Call { device: &*self.device, stream: self.stream, memory: self }
    }
}

impl Gpu {
    fn hold(&self, make: impl FnOnce(&Device) -> Result<Owned>) -> Result<u64> {
        let Some(device) = &self.tensors_on else { return Ok(0) };
        let owned = make(device)?;
        let address = owned.address();
        self.held.borrow_mut().push(owned);
        Ok(address)
    }
}

impl Memory for Gpu {
    fn allocate(&self, bytes: usize) -> Result<u64> {
        self.hold(|device| Owned::empty(&[bytes], BYTE, device)) // torch aligns to 16 at least
    }

    fn last_axis_first(&self, weight: &Tensor) -> Result<u64> {
        self.hold(|_| last_axis_first(weight))
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
        if !self.has_memory() {
            return Ok(Tensor::fake(name, shape.to_vec(), dtype, Device::Cuda(0), 0));
        }
        let owned = Owned::empty(shape, number_of(dtype), &beside.device)?;
        let (tensor, _) = owned.view(name)?;
        self.outputs.push(owned);
        Ok(tensor)
    }

    /// A stand-in takes the place of the next output.
    fn absent_output(&mut self) -> Result<Option<Tensor>> {
        if self.has_memory() {
            self.outputs.push(Owned::undefined()?);
        }
        Ok(None)
    }

    fn joins(&self) -> bool {
        self.joins
    }
}

/// Returns the backend and the stream for a tensor; None is the CPU.
fn device_of(tensor: &Tensor) -> Result<Option<(Arc<dyn Backend>, u64)>> {
    match &tensor.device {
        #[cfg(feature = "emulator")]
        Device::Cpu => Ok(crate::cuda::device::stand_in::current()),
        #[cfg(not(feature = "emulator"))]
        Device::Cpu => Ok(None),
        Device::Cuda(index) => Ok(Some((gpu(*index)?, shims().cuda_stream(*index)?))),
        Device::Elsewhere(got) => {
            Err(Error::Device { name: tensor.name, expected: "cpu or cuda".into(), got: got.clone() })
        }
    }
}
