//! `expand`.

use std::marker::PhantomData;

use super::array::{Array, Number, view_of};
use super::memory::{Memory, elements};
use crate::cpu;
use crate::error::Result;
use crate::problem::{self, Allocate};
use crate::tensor::Tensor;

/// The inputs of an expansion: x becomes a state of m value channels, by repetition or by a causal convolution.
#[derive(Clone, Copy, Debug)]
pub struct Expand<'a, T: Number> {
    /// (…, d)
    pub x: Array<'a, T>,
    /// (d, m, K); None: repetition
    pub weight: Option<Array<'a, T>>,
    /// m
    pub value_channels: usize,
    /// Which tokens start a document (…), 0 or not, so that none looks back beyond it.
    pub document_starts: Option<Array<'a, u8>>,
    /// Threads to use at most.
    pub threads: usize,
}

impl<'a, T: Number> Expand<'a, T> {
    /// The inputs of a repetition, on one thread.
    pub fn of(x: Array<'a, T>, value_channels: usize) -> Expand<'a, T> {
        Expand { x, weight: None, value_channels, document_starts: None, threads: 1 }
    }

    /// Computes the state.
    ///
    /// # Errors
    /// An argument has the wrong shape, or memory is short.
    pub fn forward(&self) -> Result<Expanded<T>> {
        self.fill(&self.problem()?)
    }

    /// Computes the same for a step of a sequence in pieces. `before` is what the step before left in
    /// [`new_before`](Expanded::new_before), and None at the start.
    ///
    /// # Errors
    /// As [`forward`](Expand::forward).
    pub fn cached_step(&self, before: Option<Array<'_, T>>) -> Result<Expanded<T>> {
        let problem = self.problem()?.with_before(view_of("before", before)?)?;
        let mut expanded = self.fill(&problem)?;
        if let Some(shape) = problem.before_shape() {
            expanded.new_before = Some(expanded.memory.output("new_before", &shape, T::DTYPE, &problem.x)?);
            cpu::expand::leave::<T::Small>(&problem, &mut expanded.new_before)
                .map_err(|short| short.in_operator("expand"))?;
        }
        Ok(expanded)
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
        cpu::expand::backward::<T::Small>(&problem, &grad_state, &mut x, &mut weight, self.threads)
            .map_err(|short| short.in_operator("expand"))?;
        Ok(ExpandGradients { x: Some(x), weight, _memory: memory, of: PhantomData })
    }

    fn fill(&self, problem: &problem::Expand) -> Result<Expanded<T>> {
        let mut memory = Memory::default();
        let mut state = memory.output("state", &problem.state_shape(), T::DTYPE, &problem.x)?;
        cpu::expand::forward::<T::Small>(problem, &mut state, self.threads)
            .map_err(|short| short.in_operator("expand"))?;
        Ok(Expanded { state: Some(state), new_before: None, memory, of: PhantomData })
    }

    fn problem(&self) -> Result<problem::Expand> {
        let (x, weight) = (self.x.view("x")?, view_of("weight", self.weight)?);
        let channels = i64::try_from(self.value_channels).unwrap_or(i64::MAX);
        let problem = problem::Expand::new(x, weight, channels)?;
        problem.with_documents(view_of("document_starts", self.document_starts)?)
    }
}

/// Results of an expansion.
pub struct Expanded<T> {
    state: Option<Tensor>,
    new_before: Option<Tensor>,
    memory: Memory,
    of: PhantomData<T>,
}

impl<T: Number> Expanded<T> {
    /// X (…, d, m)
    pub fn state(&self) -> &[T] {
        elements(&self.state)
    }

    /// x of the last K − 1 tokens (…, K − 1, d), which the next [`cached_step`](Expand::cached_step) takes
    pub fn new_before(&self) -> &[T] {
        elements(&self.new_before)
    }
}

/// Gradients of an expansion's inputs.
pub struct ExpandGradients<T> {
    x: Option<Tensor>,
    weight: Option<Tensor>,
    _memory: Memory,
    of: PhantomData<T>,
}

impl<T: Number> ExpandGradients<T> {
    /// (…, d)
    pub fn x(&self) -> &[T] {
        elements(&self.x)
    }

    /// (d, m, K); empty for a repetition
    pub fn weight(&self) -> &[T] {
        elements(&self.weight)
    }
}
