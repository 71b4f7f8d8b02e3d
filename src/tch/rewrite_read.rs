//! `rewrite`, `read` and both at once.

use tch::{Kind, Tensor};

use super::call::{Results, Views, call};
use crate::error::{Error, Result};
use crate::problem;
use crate::tensor::Dtype;
use crate::torch::operators::{backward, cached, forward};

/// Rewrites a state, X' = X + β k̂ (vᵀ − k̂ᵀX): one or, with an axis more before the last, n after each other.
#[derive(Clone, Copy, Debug)]
pub struct Rewrite<'a> {
    /// k (…, d) or (…, n, d)
    pub direction: &'a Tensor,
    /// v (…, m) or (…, n, m)
    pub value: &'a Tensor,
    /// β (…) or (…, n)
    pub gate: &'a Tensor,
    /// ε_k in k̂ = k/√(|k|² + ε_k²)
    pub eps_k: f64,
}

/// Reads a state: x = compress(X'), h = norm(x), v = φ(W z + b), β = 2σ(w·h + b).
#[derive(Clone, Copy, Debug, Default)]
pub struct Read<'a> {
    /// (d, m) over channels, (d, m, K) over channels and time; None for m = 1 without mixing
    pub compress: Option<&'a Tensor>,
    /// γ (d,)
    pub norm_weight: Option<&'a Tensor>,
    /// None: no normalisation
    pub norm_eps: Option<f64>,
    /// w (d,) or (n, d)
    pub gate_weight: Option<&'a Tensor>,
    /// () or (n,)
    pub gate_bias: Option<&'a Tensor>,
    /// W (m, d) or (n, m, d)
    pub value_weight: Option<&'a Tensor>,
    /// (m,) or (n, m)
    pub value_bias: Option<&'a Tensor>,
    /// φ = scale·sigmoid; None: φ = identity
    pub value_scale: Option<f64>,
    /// z = x instead of h
    pub value_from_compressed: bool,
}

/// An earlier rewrite between an anchor and the state that is meant, and the `stats` that its forward saved.
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
    /// X (…, d, m); for [`vjp`](RewriteRead::vjp) with a chain, the anchor that the chain leads from
    pub state: &'a Tensor,
    pub rewrite: Option<Rewrite<'a>>,
    pub read: Option<Read<'a>>,
    /// The rewrites from an anchor to X, the first one first, for `vjp` alone: it can do without X itself.
    pub chain: &'a [Link<'a>],
    /// Which tokens start a document (…), so that no read looks back beyond it.
    pub document_starts: Option<&'a Tensor>,
    /// Kind of the context; None is the state's.
    pub context_kind: Option<Kind>,
}

impl<'a> RewriteRead<'a> {
    /// The inputs without a rewrite or a read.
    pub fn of(state: &'a Tensor) -> RewriteRead<'a> {
        RewriteRead {
            state,
            rewrite: None,
            read: None,
            chain: &[],
            document_starts: None,
            context_kind: None,
        }
    }

    /// Computes X', h, v and β, and what [`vjp`](RewriteRead::vjp) needs of them.
    ///
    /// # Errors
    /// An argument has the wrong shape, kind or device, a number is out of range, or memory is short.
    pub fn forward(&self) -> Result<Forward> {
        self.expect_no_chain()?;
        let mut results = call(|views, run| forward(self.problem(views)?, self.context_dtype()?, run))?;
        let [new_state, stats] = results.next_if(self.rewrite.is_some());
        let [context, new_value, new_gate, compressed, rstd] = results.next_if(self.read.is_some());
        let new_pending = None;
        Ok(Forward { new_state, stats, context, new_value, new_gate, new_pending, compressed, rstd })
    }

    /// Computes the same for a step of a sequence in pieces, for inference. `pending` is what the step before left in
    /// `new_pending`, and None at the start.
    ///
    /// # Errors
    /// As [`forward`](RewriteRead::forward).
    pub fn cached_step(&self, pending: Option<&Tensor>) -> Result<Forward> {
        self.expect_no_chain()?;
        let mut results = call(|views, run| {
            let problem = self.problem(views)?.with_pending(views.of_optional("pending", pending)?)?;
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
        let mut results = call(|views, run| {
            let chain = self.links(views)?;
            let problem = self.problem(views)?.with_chain(chain)?;
            let (incoming, saved) = (incoming.views(views)?, forward.views(views)?);
            backward(problem, incoming, saved, -1, None, run)
        })?;
        Ok(self.gradients(&mut results))
    }

    fn gradients(&self, results: &mut Results) -> Gradients {
        let [state] = results.next_if(true);
        let [direction, value, gate] = results.next_if(self.rewrite.is_some());
        let [compress, norm_weight, gate_weight, gate_bias, value_weight, value_bias] =
            results.next_if(self.read.is_some());
        let state = state.expect("a state always has a gradient");
        Gradients {
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
        }
    }

    fn expect_no_chain(&self) -> Result<()> {
        match self.chain.len() {
            0 => Ok(()),
            links => Err(Error::Argument(format!("`chain` is for `vjp` alone, got {links} rewrites"))),
        }
    }

    fn problem(&self, views: &mut Views) -> Result<problem::RewriteRead> {
        if self.rewrite.is_none() && self.read.is_none() {
            return Err(Error::Argument("`rewrite` or `read` must be given, got neither".into()));
        }
        let state = views.of("state", self.state)?;
        let rewrite = self.rewrite.map(|rewrite| rewrite.views(views)).transpose()?;
        let read = self.read.map(|read| read.views(views)).transpose()?;
        let starts = views.of_optional("document_starts", self.document_starts)?;
        problem::RewriteRead::new(state, rewrite, read)?.with_documents(starts)
    }

    fn links(&self, views: &mut Views) -> Result<Vec<crate::tensor::Tensor>> {
        let tensors = self.chain.iter().flat_map(|link| [link.direction, link.value, link.gate, link.stats]);
        tensors.map(|tensor| views.of("chain", tensor)).collect()
    }

    fn context_dtype(&self) -> Result<Option<Dtype>> {
        let dtype = |kind| match kind {
            Kind::Float => Ok(Dtype::F32),
            Kind::Double => Ok(Dtype::F64),
            Kind::BFloat16 => Ok(Dtype::Bf16),
            Kind::Half => Ok(Dtype::F16),
            other => Err(Error::Dtype {
                name: "context_kind",
                expected: "Float, Double, BFloat16 or Half".into(),
                got: format!("{other:?}"),
            }),
        };
        self.context_kind.map(dtype).transpose()
    }
}

impl Rewrite<'_> {
    fn views(&self, views: &mut Views) -> Result<problem::Rewrite> {
        Ok(problem::Rewrite {
            direction: views.of("direction", self.direction)?,
            value: views.of("value", self.value)?,
            gate: views.of("gate", self.gate)?,
            eps_k: self.eps_k,
        })
    }
}

impl Read<'_> {
    fn views(&self, views: &mut Views) -> Result<problem::Read> {
        Ok(problem::Read {
            compress: views.of_optional("compress", self.compress)?,
            norm_weight: views.of_optional("norm_weight", self.norm_weight)?,
            norm_eps: self.norm_eps,
            gate_weight: views.of_optional("gate_weight", self.gate_weight)?,
            gate_bias: views.of_optional("gate_bias", self.gate_bias)?,
            value_weight: views.of_optional("value_weight", self.value_weight)?,
            value_bias: views.of_optional("value_bias", self.value_bias)?,
            value_scale: self.value_scale,
            value_from_compressed: self.value_from_compressed,
        })
    }
}

/// Results of a forward; None if their half is absent or nothing asked for them.
#[derive(Debug, Default)]
pub struct Forward {
    /// X' (…, d, m)
    pub new_state: Option<Tensor>,
    /// 1/√(|k|² + ε_k²) and k̂ᵀX (…, 1 + m), for a [`Link`]
    pub stats: Option<Tensor>,
    /// h (…, d)
    pub context: Option<Tensor>,
    /// v (…, m) or (…, n, m), if the read has a `value_weight`
    pub new_value: Option<Tensor>,
    /// β (…) or (…, n), if the read has a `gate_weight`
    pub new_gate: Option<Tensor>,
    /// what the tokens of a cached step add to the next ones' x (…, K − 1, d)
    pub new_pending: Option<Tensor>,
    compressed: Option<Tensor>,
    rstd: Option<Tensor>,
}

impl Forward {
    fn views(&self, views: &mut Views) -> Result<problem::Outputs> {
        Ok(problem::Outputs {
            stats: views.of_optional("stats", self.stats.as_ref())?,
            new_value: views.of_optional("new_value", self.new_value.as_ref())?,
            new_gate: views.of_optional("new_gate", self.new_gate.as_ref())?,
            compressed: views.of_optional("compressed", self.compressed.as_ref())?,
            rstd: views.of_optional("rstd", self.rstd.as_ref())?,
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
            grad_new_state: views.of_optional("grad_new_state", self.grad_new_state)?,
            grad_context: views.of_optional("grad_context", self.grad_context)?,
            grad_new_value: views.of_optional("grad_new_value", self.grad_new_value)?,
            grad_new_gate: views.of_optional("grad_new_gate", self.grad_new_gate)?,
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
