//! `rewrite`, `read` and both at once.

use std::marker::PhantomData;

use super::array::{Array, Number, view_of};
use super::memory::{Memory, elements};
use crate::cpu;
use crate::error::{Error, Result};
use crate::problem;
use crate::tensor::Tensor;

/// Rewrites a state, X' = X + β k̂ (vᵀ − k̂ᵀX): one or, with an axis more before the last, n after each other.
#[derive(Clone, Copy, Debug)]
pub struct Rewrite<'a, T: Number> {
    /// k (…, d) or (…, n, d)
    pub direction: Array<'a, T>,
    /// v (…, m) or (…, n, m)
    pub value: Array<'a, T::Small>,
    /// β (…) or (…, n)
    pub gate: Array<'a, T::Small>,
    /// ε_k in k̂ = k/√(|k|² + ε_k²)
    pub eps_k: f64,
}

/// Reads a state: x = compress(X'), h = norm(x), v = φ(W z + b), β = 2σ(w·h + b).
#[derive(Clone, Copy, Debug)]
pub struct Read<'a, T> {
    /// (d, m) over channels, (d, m, K) over channels and time; None for m = 1 without mixing
    pub compress: Option<Array<'a, T>>,
    /// γ (d,)
    pub norm_weight: Option<Array<'a, T>>,
    /// None: no normalisation
    pub norm_eps: Option<f64>,
    /// w (d,) or (n, d)
    pub gate_weight: Option<Array<'a, T>>,
    /// () or (n,)
    pub gate_bias: Option<Array<'a, T>>,
    /// W (m, d) or (n, m, d)
    pub value_weight: Option<Array<'a, T>>,
    /// (m,) or (n, m)
    pub value_bias: Option<Array<'a, T>>,
    /// φ = scale·sigmoid; None: φ = identity
    pub value_scale: Option<f64>,
    /// z = x instead of h
    pub value_from_compressed: bool,
}

impl<T> Default for Read<'_, T> {
    fn default() -> Self {
        Read {
            compress: None,
            norm_weight: None,
            norm_eps: None,
            gate_weight: None,
            gate_bias: None,
            value_weight: None,
            value_bias: None,
            value_scale: None,
            value_from_compressed: false,
        }
    }
}

/// An earlier rewrite between an anchor and the state that is meant, and the `stats` that its forward saved.
#[derive(Clone, Copy, Debug)]
pub struct Link<'a, T: Number> {
    pub direction: Array<'a, T>,
    pub value: Array<'a, T::Small>,
    pub gate: Array<'a, T::Small>,
    pub stats: Array<'a, T::Small>,
}

/// The inputs of the operator between two sublayers: a state, rewritten, or read, or both.
#[derive(Clone, Copy, Debug)]
pub struct RewriteRead<'a, T: Number> {
    /// X (…, d, m); for [`vjp`](RewriteRead::vjp) with a chain, the anchor that the chain leads from
    pub state: Array<'a, T>,
    pub rewrite: Option<Rewrite<'a, T>>,
    pub read: Option<Read<'a, T>>,
    /// The rewrites from an anchor to X, the first one first, for `vjp` alone: it can do without X itself.
    pub chain: &'a [Link<'a, T>],
    /// Which tokens start a document (…), 0 or not, so that no read looks back beyond it.
    pub document_starts: Option<Array<'a, u8>>,
    /// Threads to use at most.
    pub threads: usize,
}

impl<'a, T: Number> RewriteRead<'a, T> {
    /// The inputs without a rewrite or a read, on one thread.
    pub fn of(state: Array<'a, T>) -> RewriteRead<'a, T> {
        RewriteRead { state, rewrite: None, read: None, chain: &[], document_starts: None, threads: 1 }
    }

    /// Computes X', h, v and β, and what [`vjp`](RewriteRead::vjp) needs of them.
    ///
    /// # Errors
    /// An argument has the wrong shape, a number is out of range, or memory is short.
    pub fn forward(&self) -> Result<Forward<T>> {
        self.expect_no_chain()?;
        let (problem, mut memory) = (self.problem()?, Memory::default());
        let outputs = problem::Outputs::new(&problem, None, &mut memory)?;
        self.fill(&problem, outputs, memory)
    }

    /// Computes the same for a step of a sequence in pieces, for inference. `pending` is what the step before left in
    /// [`new_pending`](Forward::new_pending), and None at the start.
    ///
    /// # Errors
    /// As [`forward`](RewriteRead::forward).
    pub fn cached_step(&self, pending: Option<Array<'_, T::Small>>) -> Result<Forward<T>> {
        self.expect_no_chain()?;
        let problem = self.problem()?.with_pending(view_of("pending", pending)?)?;
        let mut memory = Memory::default();
        let outputs = problem::Outputs::of_cached_step(&problem, None, &mut memory)?;
        self.fill(&problem, outputs, memory)
    }

    /// Computes the gradients of all inputs from those of the outputs. `forward` is the result for the same inputs.
    ///
    /// # Errors
    /// As [`forward`](RewriteRead::forward), or `forward` is a result for inputs of other shapes or of `cached_step`.
    pub fn vjp(&self, forward: &Forward<T>, incoming: &Incoming<'_, T>) -> Result<Gradients<T>> {
        let problem = self.problem()?.with_chain(self.links()?)?;
        forward.outputs.check_saved(&problem)?;
        let incoming = incoming.views(&problem)?;
        incoming.check(&problem)?;
        let mut memory = Memory::default();
        let mut gradients = problem::Gradients::new(&problem, -1, None, &mut memory)?;
        cpu::rewrite_read::backward::<T::Small>(
            &problem,
            &forward.outputs,
            &incoming,
            &mut gradients,
            self.threads,
        )
        .map_err(|short| short.in_operator(problem.operator()))?;
        Ok(Gradients { gradients, _memory: memory, of: PhantomData })
    }

    fn fill(
        &self,
        problem: &problem::RewriteRead,
        mut outputs: problem::Outputs,
        memory: Memory,
    ) -> Result<Forward<T>> {
        cpu::rewrite_read::forward::<T::Small>(problem, &mut outputs, self.threads)
            .map_err(|short| short.in_operator(problem.operator()))?;
        Ok(Forward { outputs, _memory: memory, of: PhantomData })
    }

    fn expect_no_chain(&self) -> Result<()> {
        match self.chain.len() {
            0 => Ok(()),
            links => Err(Error::Argument(format!("`chain` is for `vjp` alone, got {links} rewrites"))),
        }
    }

    fn problem(&self) -> Result<problem::RewriteRead> {
        let rewrite = self.rewrite.map(|rewrite| rewrite.views()).transpose()?;
        let read = self.read.map(|read| read.views()).transpose()?;
        if rewrite.is_none() && read.is_none() {
            return Err(Error::Argument("`rewrite` or `read` must be given, got neither".into()));
        }
        let problem = problem::RewriteRead::new(self.state.view("state")?, rewrite, read)?;
        problem.with_documents(view_of("document_starts", self.document_starts)?)
    }

    fn links(&self) -> Result<Vec<Tensor>> {
        let views = |link: &Link<'_, T>| {
            let Link { direction, value, gate, stats } = link;
            Ok([direction.view("chain")?, value.view("chain")?, gate.view("chain")?, stats.view("chain")?])
        };
        Ok(self.chain.iter().map(views).collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
    }
}

impl<T: Number> Rewrite<'_, T> {
    fn views(&self) -> Result<problem::Rewrite> {
        Ok(problem::Rewrite {
            direction: self.direction.view("direction")?,
            value: self.value.view("value")?,
            gate: self.gate.view("gate")?,
            eps_k: self.eps_k,
        })
    }
}

impl<T: Number> Read<'_, T> {
    fn views(&self) -> Result<problem::Read> {
        Ok(problem::Read {
            compress: view_of("compress", self.compress)?,
            norm_weight: view_of("norm_weight", self.norm_weight)?,
            norm_eps: self.norm_eps,
            gate_weight: view_of("gate_weight", self.gate_weight)?,
            gate_bias: view_of("gate_bias", self.gate_bias)?,
            value_weight: view_of("value_weight", self.value_weight)?,
            value_bias: view_of("value_bias", self.value_bias)?,
            value_scale: self.value_scale,
            value_from_compressed: self.value_from_compressed,
        })
    }
}

/// Results of a forward, each as long as its shape says; empty if its half is absent or nothing asked for it.
pub struct Forward<T> {
    outputs: problem::Outputs,
    _memory: Memory,
    of: PhantomData<T>,
}

impl<T: Number> Forward<T> {
    /// X' (…, d, m)
    pub fn new_state(&self) -> &[T] {
        elements(&self.outputs.new_state)
    }

    /// h (…, d)
    pub fn context(&self) -> &[T] {
        elements(&self.outputs.context)
    }

    /// v (…, m) or (…, n, m), if the read has a `value_weight`
    pub fn new_value(&self) -> &[T::Small] {
        elements(&self.outputs.new_value)
    }

    /// β (…) or (…, n), if the read has a `gate_weight`
    pub fn new_gate(&self) -> &[T::Small] {
        elements(&self.outputs.new_gate)
    }

    /// What the rewrite saved (…, 1 + m), for a [`Link`]: 1/√(|k|² + ε_k²) and k̂ᵀX.
    pub fn stats(&self) -> &[T::Small] {
        elements(&self.outputs.stats)
    }

    /// What the tokens of a [`cached_step`](RewriteRead::cached_step) add to the next ones' x (…, K − 1, d).
    pub fn new_pending(&self) -> &[T::Small] {
        elements(&self.outputs.new_pending)
    }
}

/// Gradients of a forward's results; None is zero.
#[derive(Clone, Copy, Debug)]
pub struct Incoming<'a, T: Number> {
    pub grad_new_state: Option<&'a [T]>,
    pub grad_context: Option<&'a [T]>,
    pub grad_new_value: Option<&'a [T::Small]>,
    pub grad_new_gate: Option<&'a [T::Small]>,
}

impl<T: Number> Default for Incoming<'_, T> {
    fn default() -> Self {
        Incoming { grad_new_state: None, grad_context: None, grad_new_value: None, grad_new_gate: None }
    }
}

impl<T: Number> Incoming<'_, T> {
    fn views(&self, problem: &problem::RewriteRead) -> Result<problem::Incoming> {
        let (d, m, next) = (problem.sizes.d, problem.sizes.m, problem.next);
        let shape = |last: &[usize]| problem.batch_and(last);
        let gate = |name, slice: Option<&[T::Small]>, shape: &[usize]| {
            view_of(name, slice.map(|elements| Array { elements, shape }))
        };
        let stored = |name, slice: Option<&[T]>, shape: &[usize]| {
            view_of(name, slice.map(|elements| Array { elements, shape }))
        };
        Ok(problem::Incoming {
            grad_new_state: stored("grad_new_state", self.grad_new_state, &shape(&[d, m]))?,
            grad_context: stored("grad_context", self.grad_context, &shape(&[d]))?,
            grad_new_value: gate("grad_new_value", self.grad_new_value, &shape(&next.and(&[m])))?,
            grad_new_gate: gate("grad_new_gate", self.grad_new_gate, &shape(&next.and(&[])))?,
        })
    }
}

/// Gradients of the inputs, each as long as its input; empty for what was not given.
pub struct Gradients<T> {
    gradients: problem::Gradients,
    _memory: Memory,
    of: PhantomData<T>,
}

impl<T: Number> Gradients<T> {
    pub fn state(&self) -> &[T] {
        elements(&self.gradients.state)
    }

    pub fn direction(&self) -> &[T] {
        elements(&self.gradients.direction)
    }

    pub fn value(&self) -> &[T::Small] {
        elements(&self.gradients.value)
    }

    pub fn gate(&self) -> &[T::Small] {
        elements(&self.gradients.gate)
    }

    pub fn compress(&self) -> &[T] {
        elements(&self.gradients.compress)
    }

    pub fn norm_weight(&self) -> &[T] {
        elements(&self.gradients.norm_weight)
    }

    pub fn gate_weight(&self) -> &[T] {
        elements(&self.gradients.gate_weight)
    }

    pub fn gate_bias(&self) -> &[T] {
        elements(&self.gradients.gate_bias)
    }

    pub fn value_weight(&self) -> &[T] {
        elements(&self.gradients.value_weight)
    }

    pub fn value_bias(&self) -> &[T] {
        elements(&self.gradients.value_bias)
    }
}
