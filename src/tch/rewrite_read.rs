//! `rewrite`, `read` and both at once.

use tch::{Kind, Tensor};

use super::call::{Views, call};
use crate::error::{Error, Result};
use crate::execute::{backward, forward};
use crate::records::Map;
use crate::tensor::Dtype;
use crate::{problem, records};

pub type Write<'a> = records::Write<&'a Tensor>;
pub type Link<'a> = records::Link<&'a Tensor>;
pub type Read<'a> = records::Read<Option<&'a Tensor>>;
pub type Forward = records::Outputs<Option<Tensor>>;
pub type Incoming<'a> = records::Incoming<Option<&'a Tensor>>;
pub type Gradients = records::Gradients<Option<Tensor>>;

/// The inputs of the operator between two sublayers: a state, rewritten, or read, or both.
#[derive(Clone, Copy, Debug)]
pub struct RewriteRead<'a> {
    /// X (…, d, m)
    pub state: &'a Tensor,
    pub rewrite: Option<Write<'a>>,
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
        let (outputs, mut results) =
            call(|views, run| forward(&self.problem(views)?, self.context_dtype()?, run))?;
        outputs.try_map(&mut results)
    }

    /// Computes the outputs for the next tokens of a sequence, and saves nothing for `vjp`. `pending` is `new_pending` of
    /// the step before; None at the start.
    ///
    /// # Errors
    /// As [`forward`](RewriteRead::forward).
    pub fn cached_step(&self, pending: Option<&Tensor>) -> Result<Forward> {
        let (outputs, mut results) = call(|views, run| {
            let problem = self.problem(views)?.with_pending(views.map("pending", &pending)?)?;
            forward(&problem, self.context_dtype()?, run)
        })?;
        outputs.try_map(&mut results)
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
        let (gradients, mut results) = call(|views, run| {
            let chain = chain.iter().map(|link| link.try_map(views)).collect::<Result<_>>()?;
            let problem = self.problem(views)?.with_chain(chain)?;
            let (incoming, saved) = (incoming.try_map(views)?, forward.try_map(views)?);
            backward(&problem, &incoming, &saved, problem::Gradients::ALL, None, run)
        })?;
        gradients.try_map(&mut results)
    }

    fn problem(&self, views: &mut Views) -> Result<problem::RewriteRead> {
        let state = views.view("state", self.state)?;
        let rewrite = self.rewrite.map(|write| write.try_map(views)).transpose()?;
        let read = self.read.map(|read| read.try_map(views)).transpose()?;
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
