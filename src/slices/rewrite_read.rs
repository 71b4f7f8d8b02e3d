//! `rewrite`, `read` and both at once.

use super::array::{Array, Views};
use super::memory::Memory;
use crate::cpu::state::Stored as Number;
use crate::error::Result;
use crate::records::Map;
use crate::tensor::{Element, Tensor};
use crate::{execute, problem, records};

pub type Write<'a, T> = records::Write<Array<'a, T>, Array<'a, <T as Number>::Accum>>;
pub type Link<'a, T> = records::Link<Array<'a, T>, Array<'a, <T as Number>::Accum>>;
pub type Read<'a, T> = records::Read<Option<Array<'a, T>>>;
/// Results of a forward; empty if they are absent.
pub type Forward<T> = records::Outputs<Vec<T>, Vec<<T as Number>::Accum>>;
pub type Incoming<'a, T> = records::Incoming<Option<&'a [T]>, Option<&'a [<T as Number>::Accum]>>;
/// Gradients of the inputs, each as long as its input; empty for what was not given.
pub type Gradients<T> = records::Gradients<Vec<T>, Vec<<T as Number>::Accum>>;

/// The inputs of the operator between two sublayers: a state, rewritten, or read, or both.
#[derive(Clone, Copy, Debug)]
pub struct RewriteRead<'a, T: Number> {
    /// X (…, d, m)
    pub state: Array<'a, T>,
    pub rewrite: Option<Write<'a, T>>,
    pub read: Option<Read<'a, T>>,
    /// (…): 1 for a token that starts a document, else 0; no read looks back beyond the start. None for one document per
    /// sequence.
    pub document_starts: Option<Array<'a, u8>>,
    /// Threads to use at most.
    pub threads: usize,
}

impl<'a, T: Number> RewriteRead<'a, T> {
    /// A call on `state` with neither half, to be completed with `..`, on one thread.
    pub fn new(state: Array<'a, T>) -> RewriteRead<'a, T> {
        RewriteRead { state, rewrite: None, read: None, document_starts: None, threads: 1 }
    }

    /// Computes X', h, v and β, and what [`vjp`](RewriteRead::vjp) needs of them.
    ///
    /// # Errors
    /// An argument has the wrong shape, a number is out of range, or memory is short.
    pub fn forward(&self) -> Result<Forward<T>> {
        self.run(&self.problem()?)
    }

    /// Computes the outputs for the next tokens of a sequence, and saves nothing for `vjp`. `pending` is `new_pending` of
    /// the step before; None at the start.
    ///
    /// # Errors
    /// As [`forward`](RewriteRead::forward).
    pub fn cached_step(&self, pending: Option<Array<'_, T::Accum>>) -> Result<Forward<T>> {
        self.run(&self.problem()?.with_pending(Views.map("pending", &pending)?)?)
    }

    /// Computes the gradients of all inputs from those of the outputs. `forward` is the result for the same inputs.
    ///
    /// # Errors
    /// As [`forward`](RewriteRead::forward), or `forward` is a result for inputs of other shapes or of `cached_step`.
    pub fn vjp(&self, forward: &Forward<T>, incoming: &Incoming<'_, T>) -> Result<Gradients<T>> {
        self.vjp_from_anchor(&[], forward, incoming)
    }

    /// Computes the same from an earlier state, so that X need not be kept: `state` is the anchor, and `chain` has the
    /// rewrites that lead from it to X, in order. They are applied again.
    ///
    /// # Errors
    /// As [`vjp`](RewriteRead::vjp), or this call does not rewrite.
    pub fn vjp_from_anchor(
        &self,
        chain: &[Link<'_, T>],
        forward: &Forward<T>,
        incoming: &Incoming<'_, T>,
    ) -> Result<Gradients<T>> {
        let chain = chain.iter().map(|link| link.try_map(&mut Views)).collect::<Result<_>>()?;
        let problem = self.problem()?.with_chain(chain)?;
        let mut views = OutputViews(&problem);
        let (saved, incoming) = (forward.try_map(&mut views)?, incoming.try_map(&mut views)?);
        let (all, mut memory) = (problem::Gradients::ALL, Memory::new(self.threads));
        execute::backward(&problem, &incoming, &saved, all, None, &mut memory)?.try_map(&mut memory)
    }

    fn run(&self, problem: &problem::RewriteRead) -> Result<Forward<T>> {
        let mut memory = Memory::new(self.threads);
        execute::forward(problem, None, &mut memory)?.try_map(&mut memory)
    }

    fn problem(&self) -> Result<problem::RewriteRead> {
        let rewrite = self.rewrite.map(|write| write.try_map(&mut Views)).transpose()?;
        let read = self.read.map(|read| read.try_map(&mut Views)).transpose()?;
        let problem = problem::RewriteRead::new(self.state.view("state")?, rewrite, read)?;
        problem.with_documents(Views.map("document_starts", &self.document_starts)?)
    }
}

/// Views results and their gradients, each with the shape of its output.
struct OutputViews<'a>(&'a problem::RewriteRead);

impl<T: Element> Map<Vec<T>, Option<Tensor>> for OutputViews<'_> {
    fn map(&mut self, name: &'static str, elements: &Vec<T>) -> Result<Option<Tensor>> {
        let shape = self.0.output_shape(name);
        Views.map(name, &shape.as_ref().map(|shape| Array { elements, shape }))
    }
}

impl<T: Element> Map<Option<&[T]>, Option<Tensor>> for OutputViews<'_> {
    fn map(&mut self, name: &'static str, elements: &Option<&[T]>) -> Result<Option<Tensor>> {
        let Some(elements) = elements else { return Ok(None) };
        Array { elements, shape: &self.0.shape_of_gradient(name)? }.view(name).map(Some)
    }
}
