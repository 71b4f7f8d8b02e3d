//! `expand`.

use super::array::{Array, Views};
use super::memory::Memory;
use crate::cpu::state::Stored as Number;
use crate::error::Result;
use crate::records::{self, Map};
use crate::{execute, problem};

/// Results of a cached step; empty if they are absent.
pub type Expanded<T> = records::Expanded<Vec<T>>;
pub type ExpandGradients<T> = records::ExpandGradients<Vec<T>>;

/// The inputs of an expansion: x becomes a state of m value channels, by repetition or by a causal convolution.
#[derive(Clone, Copy, Debug)]
pub struct Expand<'a, T: Number> {
    /// (…, d)
    pub x: Array<'a, T>,
    /// (d, m, K); None: repetition
    pub weight: Option<Array<'a, T>>,
    /// m
    pub value_channels: usize,
    /// (…): 1 for a token that starts a document, else 0; no expansion looks back beyond the start. None for one document
    /// per sequence.
    pub document_starts: Option<Array<'a, u8>>,
    /// Threads to use at most.
    pub threads: usize,
}

impl<'a, T: Number> Expand<'a, T> {
    /// A repetition, to be completed with `..`, on one thread.
    pub fn new(x: Array<'a, T>, value_channels: usize) -> Expand<'a, T> {
        Expand { x, weight: None, value_channels, document_starts: None, threads: 1 }
    }

    /// Computes the state.
    ///
    /// # Errors
    /// An argument has the wrong shape, or memory is short.
    pub fn forward(&self) -> Result<Vec<T>> {
        Ok(self.run(&self.problem()?, false)?.state)
    }

    /// Computes the states of the next tokens of a sequence. `before` is `new_before` of the step before; None at the
    /// start.
    ///
    /// # Errors
    /// As [`forward`](Expand::forward).
    pub fn cached_step(&self, before: Option<Array<'_, T>>) -> Result<Expanded<T>> {
        self.run(&self.problem()?.with_before(Views.map("before", &before)?)?, true)
    }

    /// Computes the gradients of x and of the weight from that of the state.
    ///
    /// # Errors
    /// As [`forward`](Expand::forward).
    pub fn vjp(&self, grad_state: &[T]) -> Result<ExpandGradients<T>> {
        let (problem, mut memory) = (self.problem()?, Memory::new(self.threads));
        let grad_state = Array { elements: grad_state, shape: &problem.state_shape() }.view("grad_state")?;
        let all = problem::Gradients::ALL;
        execute::expand_backward(&problem, &grad_state, all, &mut memory)?.try_map(&mut memory)
    }

    fn run(&self, problem: &problem::Expand, in_pieces: bool) -> Result<Expanded<T>> {
        let mut memory = Memory::new(self.threads);
        execute::expand(problem, in_pieces, &mut memory)?.try_map(&mut memory)
    }

    fn problem(&self) -> Result<problem::Expand> {
        let (x, weight) = (self.x.view("x")?, Views.map("weight", &self.weight)?);
        let channels = i64::try_from(self.value_channels).unwrap_or(i64::MAX);
        let problem = problem::Expand::new(x, weight, channels)?;
        problem.with_documents(Views.map("document_starts", &self.document_starts)?)
    }
}
