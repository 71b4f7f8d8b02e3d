//! `rewrite`, `read` and both at once.

use tch::{Kind, Tensor};

use super::call::{Views, call};
use crate::error::{Error, Result};
use crate::problem;
use crate::tensor::Dtype;
use crate::torch::calls::{backward, cached, forward};

/// Rewrites a state, X' = X + β k̂ (vᵀ − k̂ᵀX): once, or n times in order if its tensors have an axis n after the batch.
/// Source: DDL (arXiv 2601.00417), eq. 2.5.
#[derive(Clone, Copy, Debug)]
pub struct Rewrite<'a> {
    /// k (…, d) or (…, n, d), of any norm
    pub direction: &'a Tensor,
    /// v (…, m) or (…, n, m)
    pub value: &'a Tensor,
    /// β (…) or (…, n), in [0, 2]: 0 keeps X, 1 replaces the readout k̂ᵀX by v, 2 with v = 0 reflects
    pub gate: &'a Tensor,
    /// ε_k in k̂ = k/√(|k|² + ε_k²)
    pub eps_k: f64,
}

/// Reads a state: x = compress(X'), h = norm(x), v = φ(W z + b), β = 2σ(w·h + b).
/// Source: the same paper; the gate is eq. 2.6.
#[derive(Clone, Copy, Debug, Default)]
pub struct Read<'a> {
    /// (d, m) over channels, (d, m, K) over channels and time; None for m = 1 without mixing
    pub compress: Option<&'a Tensor>,
    /// γ (d,); None for ones
    pub norm_weight: Option<&'a Tensor>,
    /// None: no normalisation
    pub norm_eps: Option<f64>,
    /// w (d,) or (n, d); None for no gate
    pub gate_weight: Option<&'a Tensor>,
    /// () or (n,)
    pub gate_bias: Option<&'a Tensor>,
    /// W (m, d) or (n, m, d); None for no value
    pub value_weight: Option<&'a Tensor>,
    /// (m,) or (n, m)
    pub value_bias: Option<&'a Tensor>,
    /// φ = scale·sigmoid; None: φ = identity
    pub value_scale: Option<f64>,
    /// z = x instead of h
    pub value_from_compressed: bool,
}

/// One of the rewrites that lead from an anchor to the state of a call, with the `stats` that its forward returned.
#[derive(Clone, Copy, Debug)]
pub struct Link<'a> {
    pub direction: &'a Tensor,
    pub value: &'a Tensor,
    pub gate: &'a Tensor,
    pub stats: &'a Tensor,
}

/// The inputs of the operator between two sublayers: a state, rewritten, or read, or both.
#[derive(Clone, Copy, Debug)]
pub struct RewriteRead<'a> {
    /// X (…, d, m)
    pub state: &'a Tensor,
    pub rewrite: Option<Rewrite<'a>>,
    pub read: Option<Read<'a>>,
    /// (…) of `Kind::Bool`: the tokens that start a document; no read looks back beyond the start. None for one document per
    /// sequence.
    pub document_starts: Option<&'a Tensor>,
    /// Dtype of the context; None for the state's.
    pub context_dtype: Option<Kind>,
}

impl<'a> RewriteRead<'a> {
    /// A call on `state` with neither half, to be completed with `..`.
    pub fn new(state: &'a Tensor) -> RewriteRead<'a> {
        RewriteRead { state, rewrite: None, read: None, document_starts: None, context_dtype: None }
    }

    /// Computes X', h, v and β, and what [`vjp`](RewriteRead::vjp) needs of them.
    ///
    /// # Errors
    /// An argument has the wrong shape, kind or device, a number is out of range, or memory is short.
    pub fn forward(&self) -> Result<Forward> {
        let mut results = call(|views, run| forward(self.problem(views)?, self.context_dtype()?, run))?;
        let [new_state, stats] = results.next_if(self.rewrite.is_some());
        let [context, new_value, new_gate, compressed, rstd] = results.next_if(self.read.is_some());
        let new_pending = None;
        Ok(Forward { new_state, stats, context, new_value, new_gate, new_pending, compressed, rstd })
    }

    /// Computes the outputs for the next tokens of a sequence, and saves nothing for `vjp`. `pending` is `new_pending` of
    /// the step before; None at the start.
    ///
    /// # Errors
    /// As [`forward`](RewriteRead::forward).
    pub fn cached_step(&self, pending: Option<&Tensor>) -> Result<Forward> {
        let mut results = call(|views, run| {
            let problem = self.problem(views)?.with_pending(views.view_optional("pending", pending)?)?;
            cached(problem, self.context_dtype()?, run)
        })?;
        let [new_state] = results.next_if(self.rewrite.is_some());
        let [context, new_value, new_gate] = results.next_if(self.read.is_some());
        let new_pending = results.next();
        Ok(Forward { new_state, context, new_value, new_gate, new_pending, ..Forward::default() })
    }

    /// Computes the gradients of all inputs from those of the outputs. `forward` is the result for the same inputs.
    ///
    /// # Errors
    /// As [`forward`](RewriteRead::forward), or `forward` is a result for inputs of other shapes or of `cached_step`.
    pub fn vjp(&self, forward: &Forward, incoming: &Incoming<'_>) -> Result<Gradients> {
        self.vjp_from_anchor(&[], forward, incoming)
    }

    /// Computes the same from an earlier state, so that X need not be kept: `state` is the anchor, and `chain` has the
    /// rewrites that lead from it to X, in order. They are applied again.
    ///
    /// # Errors
    /// As [`vjp`](RewriteRead::vjp), or this call does not rewrite.
    pub fn vjp_from_anchor(
        &self,
        chain: &[Link<'_>],
        forward: &Forward,
        incoming: &Incoming<'_>,
    ) -> Result<Gradients> {
        let mut results = call(|views, run| {
            let chain = chain.iter().map(|link| link.views(views)).collect::<Result<_>>()?;
            let problem = self.problem(views)?.with_chain(chain)?;
            let (incoming, saved) = (incoming.views(views)?, forward.views(views)?);
            backward(problem, incoming, saved, problem::Gradients::ALL, None, run)
        })?;
        let state = results.next().expect("a state always has a gradient");
        let [direction, value, gate] = results.next_if(self.rewrite.is_some());
        let [compress, norm_weight, gate_weight, gate_bias, value_weight, value_bias] =
            results.next_if(self.read.is_some());
        Ok(Gradients {
            state,
            direction,
            value,
            gate,
            compress,
            norm_weight,
            gate_weight,
            gate_bias,
            value_weight,
            value_bias,
        })
    }

    fn problem(&self, views: &mut Views) -> Result<problem::RewriteRead> {
        let state = views.view("state", self.state)?;
        let rewrite = self.rewrite.map(|rewrite| rewrite.views(views)).transpose()?;
        let read = self.read.map(|read| read.views(views)).transpose()?;
        let starts = views.view_starts(self.document_starts)?;
        problem::RewriteRead::new(state, rewrite, read)?.with_documents(starts)
    }

    fn context_dtype(&self) -> Result<Option<Dtype>> {
        let dtype = |kind| match kind {
            Kind::Float => Ok(Dtype::F32),
            Kind::Double => Ok(Dtype::F64),
            Kind::BFloat16 => Ok(Dtype::Bf16),
            Kind::Half => Ok(Dtype::F16),
            other => Err(Error::Dtype {
                name: "context_dtype",
                expected: "Float, Double, BFloat16 or Half".into(),
                got: format!("{other:?}"),
            }),
        };
        self.context_dtype.map(dtype).transpose()
    }
}

impl Link<'_> {
    fn views(&self, views: &mut Views) -> Result<problem::Link> {
        Ok(problem::Link {
            direction: views.view("direction of the chain", self.direction)?,
            value: views.view("value of the chain", self.value)?,
            gate: views.view("gate of the chain", self.gate)?,
            stats: views.view("stats of the chain", self.stats)?,
        })
    }
}

impl Rewrite<'_> {
    fn views(&self, views: &mut Views) -> Result<problem::Rewrite> {
        Ok(problem::Rewrite {
            direction: views.view("direction", self.direction)?,
            value: views.view("value", self.value)?,
            gate: views.view("gate", self.gate)?,
            eps_k: self.eps_k,
        })
    }
}

impl Read<'_> {
    fn views(&self, views: &mut Views) -> Result<problem::Read> {
        Ok(problem::Read {
            compress: views.view_optional("compress", self.compress)?,
            norm_weight: views.view_optional("norm_weight", self.norm_weight)?,
            norm_eps: self.norm_eps,
            gate_weight: views.view_optional("gate_weight", self.gate_weight)?,
            gate_bias: views.view_optional("gate_bias", self.gate_bias)?,
            value_weight: views.view_optional("value_weight", self.value_weight)?,
            value_bias: views.view_optional("value_bias", self.value_bias)?,
            value_scale: self.value_scale,
            value_from_compressed: self.value_from_compressed,
        })
    }
}

/// Results of a forward; None if their half is absent or nothing asked for them.
///
/// `vjp` needs `stats`, `new_value` and `new_gate` as the forward left them: changing them in place changes the gradients.
#[derive(Debug, Default)]
pub struct Forward {
    /// X' (…, d, m)
    pub new_state: Option<Tensor>,
    /// statistics of the rewrite, for a [`Link`]: 1/√(|k|² + ε_k²) and k̂ᵀX, (…, 1 + m); for n rewrites
    /// (…, n(1 + m) + n(n − 1)/2), with the products k_j·k_i
    pub stats: Option<Tensor>,
    /// h (…, d)
    pub context: Option<Tensor>,
    /// v (…, m) or (…, n, m), if the read has a `value_weight`
    pub new_value: Option<Tensor>,
    /// β (…) or (…, n), if the read has a `gate_weight`
    pub new_gate: Option<Tensor>,
    /// contribution of the tokens of a cached step to the compressed x of the next K − 1 (…, K − 1, d)
    pub new_pending: Option<Tensor>,
    compressed: Option<Tensor>,
    rstd: Option<Tensor>,
}

impl Forward {
    fn views(&self, views: &mut Views) -> Result<problem::Outputs> {
        Ok(problem::Outputs {
            stats: views.view_optional("stats", self.stats.as_ref())?,
            new_value: views.view_optional("new_value", self.new_value.as_ref())?,
            new_gate: views.view_optional("new_gate", self.new_gate.as_ref())?,
            compressed: views.view_optional("compressed", self.compressed.as_ref())?,
            rstd: views.view_optional("rstd", self.rstd.as_ref())?,
            ..problem::Outputs::default()
        })
    }
}

/// Gradients of a forward's results; None is zero.
#[derive(Clone, Copy, Debug, Default)]
pub struct Incoming<'a> {
    pub grad_new_state: Option<&'a Tensor>,
    pub grad_context: Option<&'a Tensor>,
    pub grad_new_value: Option<&'a Tensor>,
    pub grad_new_gate: Option<&'a Tensor>,
}

impl Incoming<'_> {
    fn views(&self, views: &mut Views) -> Result<problem::Incoming> {
        Ok(problem::Incoming {
            grad_new_state: views.view_optional("grad_new_state", self.grad_new_state)?,
            grad_context: views.view_optional("grad_context", self.grad_context)?,
            grad_new_value: views.view_optional("grad_new_value", self.grad_new_value)?,
            grad_new_gate: views.view_optional("grad_new_gate", self.grad_new_gate)?,
        })
    }
}

/// Gradients of the inputs, each with its input's shape and kind; None for what was not given.
#[derive(Debug)]
pub struct Gradients {
    pub state: Tensor,
    pub direction: Option<Tensor>,
    pub value: Option<Tensor>,
    pub gate: Option<Tensor>,
    pub compress: Option<Tensor>,
    pub norm_weight: Option<Tensor>,
    pub gate_weight: Option<Tensor>,
    pub gate_bias: Option<Tensor>,
    pub value_weight: Option<Tensor>,
    pub value_bias: Option<Tensor>,
}
