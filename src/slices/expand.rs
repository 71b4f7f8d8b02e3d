//! `expand`.

use super::array::{Array, Views};
use super::memory::Memory;
use crate::cpu;
use crate::cpu::state::Stored as Number;
use crate::error::Result;
use crate::problem::{self, Allocate};
use crate::records::Map;

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
        self.state(&self.problem()?)
    }

    /// Computes the states of the next tokens of a sequence. `before` is `new_before` of the step before; None at the
    /// start.
    ///
    /// # Errors
    /// As [`forward`](Expand::forward).
    pub fn cached_step(&self, before: Option<Array<'_, T>>) -> Result<Expanded<T>> {
        let problem = self.problem()?.with_before(Views.map("before", &before)?)?;
        let (state, mut memory) = (self.state(&problem)?, Memory::default());
        let shape = problem.before_shape();
        let mut new_before = memory.optional_output("new_before", shape.as_deref(), T::DTYPE, &problem.x)?;
        cpu::expand::leave::<T::Accum>(&problem, &mut new_before)
            .map_err(|short| short.in_operator("expand"))?;
        Ok(Expanded { state, new_before: memory.map("new_before", &new_before)? })
    }

    /// Computes the gradients of x and of the weight from that of the state.
    ///
    /// # Errors
    /// As [`forward`](Expand::forward).
    pub fn vjp(&self, grad_state: &[T]) -> Result<ExpandGradients<T>> {
        let (problem, mut memory) = (self.problem()?, Memory::default());
        let grad_state = Array { elements: grad_state, shape: &problem.state_shape() }.view("grad_state")?;
        let mut x = memory.output_like("grad_x", &problem.x)?;
        let like = |weight| memory.output_like("grad_weight", weight);
        let mut weight = problem.weight.as_ref().map(like).transpose()?;
        cpu::expand::backward::<T>(&problem, &grad_state, &mut x, &mut weight, self.threads)
            .map_err(|short| short.in_operator("expand"))?;
        Ok(ExpandGradients { x: memory.take(), weight: memory.map("grad_weight", &weight)? })
    }

    fn state(&self, problem: &problem::Expand) -> Result<Vec<T>> {
        let mut memory = Memory::default();
        let mut state = memory.output("state", &problem.state_shape(), T::DTYPE, &problem.x)?;
        cpu::expand::forward::<T>(problem, &mut state, self.threads)
            .map_err(|short| short.in_operator("expand"))?;
        Ok(memory.take())
    }

    fn problem(&self) -> Result<problem::Expand> {
        let (x, weight) = (self.x.view("x")?, Views.map("weight", &self.weight)?);
        let channels = i64::try_from(self.value_channels).unwrap_or(i64::MAX);
        let problem = problem::Expand::new(x, weight, channels)?;
        problem.with_documents(Views.map("document_starts", &self.document_starts)?)
    }
}

/// Results of a cached step.
#[derive(Clone, Debug)]
pub struct Expanded<T> {
    /// X (…, d, m)
    pub state: Vec<T>,
    /// x of the last K − 1 tokens (…, K − 1, d); empty for a repetition
    pub new_before: Vec<T>,
}

/// Gradients of an expansion's inputs.
#[derive(Clone, Debug)]
pub struct ExpandGradients<T> {
    /// (…, d)
    pub x: Vec<T>,
    /// (d, m, K); empty for a repetition
    pub weight: Vec<T>,
}
