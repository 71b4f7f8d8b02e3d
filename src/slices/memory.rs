//! Memory for a call's outputs: vectors that the caller gets.

use std::any::Any;
use std::collections::VecDeque;

use crate::error::{Error, Result};
use crate::problem::Allocate;
use crate::records::Map;
use crate::tensor::{Device, Dtype, Element, Tensor, of_dtype};

/// The vectors of a call's outputs, in the order in which they were allocated.
#[derive(Default)]
pub(super) struct Memory(VecDeque<Box<dyn Any>>);

impl Memory {
    /// Takes the next output.
    pub fn take<T: Element>(&mut self) -> Vec<T> {
        let vector = self.0.pop_front().expect("outputs are taken once");
        *vector.downcast().expect("outputs are taken in the order in which they were allocated")
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
        self.0.push_back(Box::new(elements));
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

/// Takes the outputs that are there; the others are empty.
impl<T: Element> Map<Option<Tensor>, Vec<T>> for Memory {
    fn map(&mut self, _: &'static str, output: &Option<Tensor>) -> Result<Vec<T>> {
        Ok(if output.is_some() { self.take() } else { Vec::new() })
    }
}
