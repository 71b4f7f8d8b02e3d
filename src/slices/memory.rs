//! Memory for a call's outputs: vectors that the caller gets.

use std::any::Any;
use std::collections::VecDeque;

use crate::error::{Error, Result};
use crate::execute::{Caller, Target};
use crate::problem::Allocate;
use crate::records::Map;
use crate::tensor::{Device, Dtype, Element, Tensor, of_dtype};

/// A call, and the vectors of its outputs in the order in which they were allocated.
pub(super) struct Memory {
    outputs: VecDeque<Box<dyn Any>>,
    threads: usize,
}

impl Memory {
    pub fn new(threads: usize) -> Memory {
        Memory { outputs: VecDeque::new(), threads }
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
        self.outputs.push_back(Box::new(elements));
        Ok(tensor)
    }
}

impl Allocate for Memory {
    fn output(&mut self, name: &'static str, shape: &[usize], dtype: Dtype, _: &Tensor) -> Result<Tensor> {
        of_dtype!(dtype, T => self.add::<T>(name, shape))
    }

    fn absent_output(&mut self) -> Result<Option<Tensor>> {
        Ok(None)
    }
}

impl Caller for Memory {
    fn target(&self, _: &Tensor) -> Result<Target> {
        Ok(Target::Cpu { threads: self.threads })
    }
}

/// Takes the next output.
impl<T: Element> Map<Tensor, Vec<T>> for Memory {
    fn map(&mut self, _: &'static str, _: &Tensor) -> Result<Vec<T>> {
        let vector = self.outputs.pop_front().expect("outputs are taken once");
        Ok(*vector.downcast().expect("outputs are taken in the order in which they were allocated"))
    }
}

/// Takes the outputs that are there; the others are empty.
impl<T: Element> Map<Option<Tensor>, Vec<T>> for Memory {
    fn map(&mut self, name: &'static str, output: &Option<Tensor>) -> Result<Vec<T>> {
        output.as_ref().map_or(Ok(Vec::new()), |output| self.map(name, output))
    }
}
