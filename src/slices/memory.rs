//! Memory for a call's outputs: vectors that the caller gets.

use std::any::Any;

use half::{bf16, f16};

use crate::error::{Error, Result};
use crate::problem::Allocate;
use crate::tensor::{Device, Dtype, Element, Tensor};

/// The vectors of a call's outputs, each with the address of its elements.
#[derive(Default)]
pub(super) struct Memory(Vec<(u64, Box<dyn Any>)>);

impl Memory {
    /// Takes the elements of an output; none if it is absent.
    pub fn take<T: Element>(&mut self, output: Option<Tensor>) -> Vec<T> {
        let Some(output) = output.filter(|output| !output.is_empty()) else { return Vec::new() };
        let found = self.0.iter().position(|(address, _)| *address == output.address());
        let (_, vector) = self.0.swap_remove(found.expect("an output is taken once"));
        *vector.downcast().expect("an output has the type of its dtype")
    }

    fn add<T: Element>(&mut self, name: &'static str, shape: &[usize]) -> Result<Tensor> {
        let len = shape.iter().fold(1usize, |product, &size| product.saturating_mul(size));
        let mut elements: Vec<T> = Vec::new();
        let refused =
            |_| Error::Allocation { bytes: len.saturating_mul(size_of::<T>()), device: "cpu".into() };
        elements.try_reserve_exact(len).map_err(refused)?;
        elements.resize(len, T::default());
        // SAFETY: these elements, which nobody else has. The vector is moved, but its elements stay, and are taken after
        // the call.
        let tensor =
            unsafe { Tensor::new(name, shape.to_vec(), T::DTYPE, Device::Cpu, elements.as_mut_ptr().cast()) };
        self.0.push((tensor.address(), Box::new(elements)));
        Ok(tensor)
    }
}

impl Allocate for Memory {
    fn output(&mut self, name: &'static str, shape: &[usize], dtype: Dtype, _: &Tensor) -> Result<Tensor> {
        match dtype {
            Dtype::F32 => self.add::<f32>(name, shape),
            Dtype::F64 => self.add::<f64>(name, shape),
            Dtype::Bf16 => self.add::<bf16>(name, shape),
            Dtype::F16 => self.add::<f16>(name, shape),
            Dtype::Bool => unreachable!("no operator returns a mask"),
        }
    }

    fn absent_output(&mut self, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(None)
    }
}
