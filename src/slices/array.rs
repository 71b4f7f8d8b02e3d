//! Arrays that the caller owns, and the types of their elements.

use crate::error::{Error, Result, shape_text};
use crate::records::Map;
use crate::tensor::{Device, Element, Tensor};

/// Contiguous elements, the last axis innermost, and their shape.
#[derive(Clone, Copy, Debug)]
pub struct Array<'a, T> {
    pub elements: &'a [T],
    pub shape: &'a [usize],
}

impl<'a, T: Element> Array<'a, T> {
    pub fn new(elements: &'a [T], shape: &'a [usize]) -> Array<'a, T> {
        Array { elements, shape }
    }

    /// Returns a view under the argument's name. Fails unless there are as many elements as the shape says.
    pub(super) fn view(&self, name: &'static str) -> Result<Tensor> {
        let product = self.shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
        let needed = if self.shape.contains(&0) { Some(0) } else { product };
        if needed != Some(self.elements.len()) {
            return Err(Error::Argument(format!(
                "`{name}` must have as many elements as its shape {} says, got {}",
                shape_text(self.shape),
                self.elements.len()
            )));
        }
        let first = self.elements.as_ptr().cast_mut().cast();
        // SAFETY: the elements are borrowed for longer than the call that views them, which only reads inputs.
        Ok(unsafe { Tensor::new(name, self.shape.to_vec(), T::DTYPE, Device::Cpu, first) })
    }
}

/// Views arguments.
pub(super) struct Views;

impl<T: Element> Map<Array<'_, T>, Tensor> for Views {
    fn map(&mut self, name: &'static str, array: &Array<'_, T>) -> Result<Tensor> {
        array.view(name)
    }
}

impl<T: Element> Map<Option<Array<'_, T>>, Option<Tensor>> for Views {
    fn map(&mut self, name: &'static str, array: &Option<Array<'_, T>>) -> Result<Option<Tensor>> {
        array.map(|array| array.view(name)).transpose()
    }
}
