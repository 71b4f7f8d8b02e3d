//! A call's tensors: tch's on the way in, torch's on the way out.

use tch::Tensor;

use crate::error::Result;
use crate::tensor;
use crate::torch::memory::Owned;
use crate::torch::run::Run;
use crate::torch::shims;

/// The tensors that a call views, alive until it ends.
#[derive(Default)]
pub(super) struct Views(Vec<Owned>);

impl Views {
    /// Views a tensor, or a copy if its elements are not contiguous.
    pub fn of(&mut self, name: &'static str, tensor: &Tensor) -> Result<tensor::Tensor> {
        // SAFETY: tch's tensor is a pointer to an `at::Tensor`, as torch's own handles are. This handle is a new one, and
        // `Owned` deletes it as tch would.
        let owned = unsafe { Owned::new(tensor.shallow_clone().into_handle()) };
        let (view, owned, _) = owned.contiguous(name)?;
        self.0.push(owned);
        Ok(view)
    }

    /// Views an argument that may be left out.
    pub fn of_optional(
        &mut self,
        name: &'static str,
        tensor: Option<&Tensor>,
    ) -> Result<Option<tensor::Tensor>> {
        tensor.map(|tensor| self.of(name, tensor)).transpose()
    }
}

/// Makes a call outside autograd, and returns its outputs in the order of the operator's schema.
pub(super) fn call(work: impl FnOnce(&mut Views, &mut Run) -> Result<()>) -> Result<Results> {
    shims::find_linked()?;
    let (mut views, mut run) = (Views::default(), Run::default());
    tch::no_grad(|| work(&mut views, &mut run))?;
    Ok(Results(run.into_outputs().into_iter()))
}

/// The outputs of a call.
pub(super) struct Results(std::vec::IntoIter<Owned>);

impl Results {
    /// Takes the next output; None for a stand-in.
    pub fn next(&mut self) -> Option<Tensor> {
        let owned = self.0.next().expect("an operator has as many outputs as its schema");
        // SAFETY: the handle is owned, and is tch's from here on.
        (!owned.is_absent()).then(|| unsafe { Tensor::from_ptr(owned.into_handle().cast()) })
    }

    /// Takes the next outputs, if the operator has them.
    pub fn next_if<const N: usize>(&mut self, present: bool) -> [Option<Tensor>; N] {
        std::array::from_fn(|_| if present { self.next() } else { None })
    }
}

trait IntoHandle {
    fn into_handle(self) -> shims::Handle;
}

impl IntoHandle for Tensor {
    fn into_handle(mut self) -> shims::Handle {
        let handle = self.as_mut_ptr().cast();
        std::mem::forget(self);
        handle
    }
}
