//! A call's tensors: views of tch's tensors as inputs, and outputs as tch's tensors.

use std::borrow::Borrow;

use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::records::Map;
use crate::tensor;
use crate::torch::memory::Owned;
use crate::torch::run::Run;
use crate::torch::shims;

/// The tensors that a call views, alive until it ends.
#[derive(Default)]
pub(super) struct Views(Vec<Owned>);

impl Views {
    /// Views a tensor, or a copy if its elements are not contiguous.
    pub fn view(&mut self, name: &'static str, tensor: &Tensor) -> Result<tensor::Tensor> {
        let tensor = if tensor.is_neg() { tensor.resolve_neg() } else { tensor.shallow_clone() };
        // SAFETY: tch's tensor is a pointer to an `at::Tensor`, as torch's own handles are. This handle is a new one, and
        // `Owned` deletes it as tch would.
        let owned = unsafe { Owned::new(into_handle(tensor)) };
        let (view, owned, _) = owned.contiguous(name)?;
        self.0.push(owned);
        Ok(view)
    }

    /// Views the mask of the tokens that start a document.
    pub fn view_starts(&mut self, starts: Option<&Tensor>) -> Result<Option<tensor::Tensor>> {
        let name = "document_starts";
        match starts.map(Tensor::f_kind) {
            Some(Ok(kind)) if kind != Kind::Bool => {
                Err(Error::Dtype { name, expected: "Bool".into(), got: format!("{kind:?}") })
            }
            _ => self.map(name, &starts),
        }
    }
}

impl Map<&Tensor, tensor::Tensor> for Views {
    fn map(&mut self, name: &'static str, tensor: &&Tensor) -> Result<tensor::Tensor> {
        self.view(name, tensor)
    }
}

impl<B: Borrow<Tensor>> Map<Option<B>, Option<tensor::Tensor>> for Views {
    fn map(&mut self, name: &'static str, tensor: &Option<B>) -> Result<Option<tensor::Tensor>> {
        tensor.as_ref().map(|tensor| self.view(name, tensor.borrow())).transpose()
    }
}

/// Makes a call outside autograd. Returns what `work` does, and the call's outputs.
pub(super) fn call<R>(work: impl FnOnce(&mut Views, &mut Run) -> Result<R>) -> Result<(R, Results)> {
    shims::find_linked()?;
    let (mut views, mut run) = (Views::default(), Run::default());
    let _no_grad = tch::no_grad_guard();
    let done = work(&mut views, &mut run)?;
    Ok((done, Results(run.into_outputs().into_iter())))
}

/// The outputs of a call, in the order of the operator's schema.
pub(super) struct Results(std::vec::IntoIter<Owned>);

impl Map<Option<tensor::Tensor>, Option<Tensor>> for Results {
    fn map(&mut self, name: &'static str, output: &Option<tensor::Tensor>) -> Result<Option<Tensor>> {
        output.as_ref().map(|output| self.map(name, output)).transpose()
    }
}

/// Takes the next output that is there.
impl Map<tensor::Tensor, Tensor> for Results {
    fn map(&mut self, _: &'static str, _: &tensor::Tensor) -> Result<Tensor> {
        let owned = self.0.find(|owned| !owned.is_absent()).expect("every output was allocated");
        // SAFETY: the handle is owned, and is tch's from here on.
        Ok(unsafe { Tensor::from_ptr(owned.into_handle().cast()) })
    }
}

fn into_handle(mut tensor: Tensor) -> shims::Handle {
    let handle = tensor.as_mut_ptr().cast();
    std::mem::forget(tensor);
    handle
}
