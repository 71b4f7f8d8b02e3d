//! `expand`.

use tch::Tensor;

use super::call::{Views, call};
use crate::error::Result;
use crate::execute::{expand, expand_backward};
use crate::records::Map;
use crate::{problem, records};

pub type Expanded = records::Expanded<Tensor, Option<Tensor>>;
pub type ExpandGradients = records::ExpandGradients<Tensor, Option<Tensor>>;

/// The inputs of an expansion: x becomes a state of m value channels, by repetition or by a causal convolution.
#[derive(Clone, Copy, Debug)]
pub struct Expand<'a> {
    /// (…, d)
    pub x: &'a Tensor,
    /// (d, m, K); None: repetition
    pub weight: Option<&'a Tensor>,
    /// m
    pub value_channels: i64,
    /// (…) of `Kind::Bool`: the tokens that start a document; no expansion looks back beyond the start. None for one document
    /// per sequence.
    pub document_starts: Option<&'a Tensor>,
}

impl<'a> Expand<'a> {
    /// A repetition, to be completed with `..`.
    pub fn new(x: &'a Tensor, value_channels: i64) -> Expand<'a> {
        Expand { x, weight: None, value_channels, document_starts: None }
    }

    /// Computes the state.
    ///
    /// # Errors
    /// An argument has the wrong shape, kind or device, or memory is short.
    pub fn forward(&self) -> Result<Tensor> {
        let (expanded, mut results) = call(|views, run| expand(&self.problem(views)?, false, run))?;
        Ok(expanded.try_map(&mut results)?.state)
    }

    /// Computes the states of the next tokens of a sequence. `before` is `new_before` of the step before; None at the
    /// start.
    ///
    /// # Errors
    /// As [`forward`](Expand::forward).
    pub fn cached_step(&self, before: Option<&Tensor>) -> Result<Expanded> {
        let (expanded, mut results) = call(|views, run| {
            let problem = self.problem(views)?.with_before(views.map("before", &before)?)?;
            expand(&problem, true, run)
        })?;
        expanded.try_map(&mut results)
    }

    /// Computes the gradients of x and of the weight from that of the state.
    ///
    /// # Errors
    /// As [`forward`](Expand::forward).
    pub fn vjp(&self, grad_state: &Tensor) -> Result<ExpandGradients> {
        let (gradients, mut results) = call(|views, run| {
            let (problem, grad_state) = (self.problem(views)?, views.view("grad_state", grad_state)?);
            expand_backward(&problem, &grad_state, problem::Gradients::ALL, run)
        })?;
        gradients.try_map(&mut results)
    }

    fn problem(&self, views: &mut Views) -> Result<problem::Expand> {
        let (x, weight) = (views.view("x", self.x)?, views.map("weight", &self.weight)?);
        let starts = views.view_starts(self.document_starts)?;
        problem::Expand::new(x, weight, self.value_channels)?.with_documents(starts)
    }
}
