//! `rewrite`, `read` and both at once.

use super::array::{Array, Number, view_optional};
use super::memory::Memory;
use crate::cpu;
use crate::error::Result;
use crate::problem;
use crate::tensor::Element;

/// Rewrites a state, X' = X + β k̂ (vᵀ − k̂ᵀX): once, or n times in order if its tensors have an axis n after the batch.
/// Source: DDL (arXiv 2601.00417), eq. 2.5.
#[derive(Clone, Copy, Debug)]
pub struct Rewrite<'a, T: Number> {
    /// k (…, d) or (…, n, d), of any norm
    pub direction: Array<'a, T>,
    /// v (…, m) or (…, n, m)
    pub value: Array<'a, T::Accum>,
    /// β (…) or (…, n), in [0, 2]: 0 keeps X, 1 replaces the readout k̂ᵀX by v, 2 with v = 0 reflects
    pub gate: Array<'a, T::Accum>,
    /// ε_k in k̂ = k/√(|k|² + ε_k²)
    pub eps_k: f64,
}

/// Reads a state: x = compress(X'), h = norm(x), v = φ(W z + b), β = 2σ(w·h + b).
/// Source: the same paper; the gate is eq. 2.6.
#[derive(Clone, Copy, Debug, Default)]
pub struct Read<'a, T> {
    /// (d, m) over channels, (d, m, K) over channels and time; None for m = 1 without mixing
    pub compress: Option<Array<'a, T>>,
    /// γ (d,); None for ones
    pub norm_weight: Option<Array<'a, T>>,
    /// None: no normalisation
    pub norm_eps: Option<f64>,
    /// w (d,) or (n, d); None for no gate
    pub gate_weight: Option<Array<'a, T>>,
    /// () or (n,)
    pub gate_bias: Option<Array<'a, T>>,
    /// W (m, d) or (n, m, d); None for no value
    pub value_weight: Option<Array<'a, T>>,
    /// (m,) or (n, m)
    pub value_bias: Option<Array<'a, T>>,
    /// φ = scale·sigmoid; None: φ = identity
    pub value_scale: Option<f64>,
    /// z = x instead of h
    pub value_from_compressed: bool,
}

/// One of the rewrites that lead from an anchor to the state of a call, with the `stats` that its forward returned.
#[derive(Clone, Copy, Debug)]
pub struct Link<'a, T: Number> {
    pub direction: Array<'a, T>,
    pub value: Array<'a, T::Accum>,
    pub gate: Array<'a, T::Accum>,
    pub stats: Array<'a, T::Accum>,
}

/// The inputs of the operator between two sublayers: a state, rewritten, or read, or both.
#[derive(Clone, Copy, Debug)]
pub struct RewriteRead<'a, T: Number> {
    /// X (…, d, m)
    pub state: Array<'a, T>,
    pub rewrite: Option<Rewrite<'a, T>>,
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
        let (problem, mut memory) = (self.problem()?, Memory::default());
        let outputs = problem::Outputs::new(&problem, None, &mut memory)?;
        self.fill(&problem, outputs, memory)
    }

    /// Computes the outputs for the next tokens of a sequence, and saves nothing for `vjp`. `pending` is `new_pending` of
    /// the step before; None at the start.
    ///
    /// # Errors
    /// As [`forward`](RewriteRead::forward).
    pub fn cached_step(&self, pending: Option<Array<'_, T::Accum>>) -> Result<Forward<T>> {
        let problem = self.problem()?.with_pending(view_optional("pending", pending)?)?;
        let mut memory = Memory::default();
        let outputs = problem::Outputs::for_cached_step(&problem, None, &mut memory)?;
        self.fill(&problem, outputs, memory)
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
        let chain = chain.iter().map(Link::views).collect::<Result<_>>()?;
        let problem = self.problem()?.with_chain(chain)?;
        let (saved, incoming) = (forward.saved(&problem)?, incoming.views(&problem)?);
        saved.check_saved(&problem)?;
        incoming.check(&problem)?;
        let mut memory = Memory::default();
        let all = problem::Gradients::ALL;
        let mut gradients = problem::Gradients::new(&problem, all, None, &mut memory)?;
        let threads = self.threads;
        cpu::rewrite_read::backward::<T::Accum>(&problem, &saved, &incoming, &mut gradients, threads)
            .map_err(|short| short.in_operator(problem.operator()))?;
        Ok(Gradients::taken(gradients, memory))
    }

    fn fill(
        &self,
        problem: &problem::RewriteRead,
        mut outputs: problem::Outputs,
        memory: Memory,
    ) -> Result<Forward<T>> {
        cpu::rewrite_read::forward::<T::Accum>(problem, &mut outputs, self.threads)
            .map_err(|short| short.in_operator(problem.operator()))?;
        Ok(Forward::taken(outputs, memory))
    }

    fn problem(&self) -> Result<problem::RewriteRead> {
        let rewrite = self.rewrite.map(|rewrite| rewrite.views()).transpose()?;
        let read = self.read.map(|read| read.views()).transpose()?;
        let problem = problem::RewriteRead::new(self.state.view("state")?, rewrite, read)?;
        problem.with_documents(view_optional("document_starts", self.document_starts)?)
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
            compress: view_optional("compress", self.compress)?,
            norm_weight: view_optional("norm_weight", self.norm_weight)?,
            norm_eps: self.norm_eps,
            gate_weight: view_optional("gate_weight", self.gate_weight)?,
            gate_bias: view_optional("gate_bias", self.gate_bias)?,
            value_weight: view_optional("value_weight", self.value_weight)?,
            value_bias: view_optional("value_bias", self.value_bias)?,
            value_scale: self.value_scale,
            value_from_compressed: self.value_from_compressed,
        })
    }
}

impl<T: Number> Link<'_, T> {
    fn views(&self) -> Result<problem::Link> {
        Ok(problem::Link {
            direction: self.direction.view("direction of the chain")?,
            value: self.value.view("value of the chain")?,
            gate: self.gate.view("gate of the chain")?,
            stats: self.stats.view("stats of the chain")?,
        })
    }
}

/// Results of a forward; empty if their half is absent or nothing asked for them.
///
/// `vjp` needs `stats`, `new_value` and `new_gate` as the forward left them.
#[derive(Clone, Debug)]
pub struct Forward<T: Number> {
    /// X' (…, d, m)
    pub new_state: Vec<T>,
    /// statistics of the rewrite, for a [`Link`]: 1/√(|k|² + ε_k²) and k̂ᵀX, (…, 1 + m); for n rewrites
    /// (…, n(1 + m) + n(n − 1)/2), with the products k_j·k_i
    pub stats: Vec<T::Accum>,
    /// h (…, d)
    pub context: Vec<T>,
    /// v (…, m) or (…, n, m), if the read has a `value_weight`
    pub new_value: Vec<T::Accum>,
    /// β (…) or (…, n), if the read has a `gate_weight`
    pub new_gate: Vec<T::Accum>,
    /// contribution of the tokens of a cached step to the compressed x of the next K − 1 (…, K − 1, d)
    pub new_pending: Vec<T::Accum>,
    compressed: Vec<T>,
    rstd: Vec<T::Accum>,
}

impl<T: Number> Forward<T> {
    fn taken(outputs: problem::Outputs, mut memory: Memory) -> Forward<T> {
        Forward {
            new_state: memory.take(outputs.new_state),
            stats: memory.take(outputs.stats),
            context: memory.take(outputs.context),
            new_value: memory.take(outputs.new_value),
            new_gate: memory.take(outputs.new_gate),
            new_pending: memory.take(outputs.new_pending),
            compressed: memory.take(outputs.compressed),
            rstd: memory.take(outputs.rstd),
        }
    }

    /// Views what the backward of the problem needs.
    fn saved(&self, problem: &problem::RewriteRead) -> Result<problem::Outputs> {
        let (d, m, read) = (problem.sizes.d, problem.sizes.m, problem.read.as_ref());
        let (rewrites, next) = (problem.rewrites, problem.next);
        let asked = |has: fn(&problem::Read) -> bool| read.is_some_and(has);
        let value = asked(|read| read.value_weight.is_some());
        let gate = asked(|read| read.gate_weight.is_some());
        let rstd = asked(|read| read.norm_eps.is_some());
        Ok(problem::Outputs {
            stats: saved("stats", problem.rewrite.is_some(), &self.stats, problem, &[rewrites.stats(m)])?,
            new_value: saved("new_value", value, &self.new_value, problem, &next.and(&[m]))?,
            new_gate: saved("new_gate", gate, &self.new_gate, problem, &next.and(&[]))?,
            compressed: saved(
                "compressed",
                asked(problem::Read::over_time),
                &self.compressed,
                problem,
                &[d],
            )?,
            rstd: saved("rstd", rstd, &self.rstd, problem, &[])?,
            ..problem::Outputs::default()
        })
    }
}

/// Views an output of a forward, whose shape is the batch and `last`.
fn saved<T: Element>(
    name: &'static str,
    present: bool,
    elements: &[T],
    problem: &problem::RewriteRead,
    last: &[usize],
) -> Result<Option<crate::tensor::Tensor>> {
    let shape = problem.batch_and(last);
    view_optional(name, present.then_some(Array { elements, shape: &shape }))
}

/// Gradients of a forward's results; None is zero.
#[derive(Clone, Copy, Debug, Default)]
pub struct Incoming<'a, T: Number> {
    pub grad_new_state: Option<&'a [T]>,
    pub grad_context: Option<&'a [T]>,
    pub grad_new_value: Option<&'a [T::Accum]>,
    pub grad_new_gate: Option<&'a [T::Accum]>,
}

impl<T: Number> Incoming<'_, T> {
    fn views(&self, problem: &problem::RewriteRead) -> Result<problem::Incoming> {
        let (d, m, next) = (problem.sizes.d, problem.sizes.m, problem.next);
        let shape = problem.batch_and(&[d, m]);
        let grad_new_state = self.grad_new_state.map(|elements| Array { elements, shape: &shape });
        let shape = problem.batch_and(&[d]);
        let grad_context = self.grad_context.map(|elements| Array { elements, shape: &shape });
        let shape = problem.batch_and(&next.and(&[m]));
        let grad_new_value = self.grad_new_value.map(|elements| Array { elements, shape: &shape });
        let shape = problem.batch_and(&next.and(&[]));
        let grad_new_gate = self.grad_new_gate.map(|elements| Array { elements, shape: &shape });
        Ok(problem::Incoming {
            grad_new_state: view_optional("grad_new_state", grad_new_state)?,
            grad_context: view_optional("grad_context", grad_context)?,
            grad_new_value: view_optional("grad_new_value", grad_new_value)?,
            grad_new_gate: view_optional("grad_new_gate", grad_new_gate)?,
        })
    }
}

/// Gradients of the inputs, each as long as its input; empty for what was not given.
#[derive(Clone, Debug)]
pub struct Gradients<T: Number> {
    pub state: Vec<T>,
    pub direction: Vec<T>,
    pub value: Vec<T::Accum>,
    pub gate: Vec<T::Accum>,
    pub compress: Vec<T>,
    pub norm_weight: Vec<T>,
    pub gate_weight: Vec<T>,
    pub gate_bias: Vec<T>,
    pub value_weight: Vec<T>,
    pub value_bias: Vec<T>,
}

impl<T: Number> Gradients<T> {
    fn taken(gradients: problem::Gradients, mut memory: Memory) -> Gradients<T> {
        Gradients {
            state: memory.take(gradients.state),
            direction: memory.take(gradients.direction),
            value: memory.take(gradients.value),
            gate: memory.take(gradients.gate),
            compress: memory.take(gradients.compress),
            norm_weight: memory.take(gradients.norm_weight),
            gate_weight: memory.take(gradients.gate_weight),
            gate_bias: memory.take(gradients.gate_bias),
            value_weight: memory.take(gradients.value_weight),
            value_bias: memory.take(gradients.value_bias),
        }
    }
}
