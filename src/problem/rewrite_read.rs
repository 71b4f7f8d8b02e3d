//! `rewrite`, `read` and `rewrite_read`: their inputs, checked.

use super::limits::{LEAST_EPS_K, LEAST_NORM_EPS};
use super::records::{Link, Read, Write};
use super::rewrites::Rewrites;
use super::sizes::{Sizes, at_least, check_documents, check_left, positive, state_sizes, stored_beside};
use crate::error::{Error, Result};
use crate::tensor::{Dtype, Tensor};

impl Read {
    /// K: 1 if the read stays within its token.
    pub fn taps(&self) -> usize {
        match &self.compress {
            Some(weight) if weight.shape.len() == 3 => weight.shape[2],
            _ => 1,
        }
    }

    /// Returns true if the read looks back in time; x is then saved for the backward.
    pub fn over_time(&self) -> bool {
        self.compress.as_ref().is_some_and(|weight| weight.shape.len() == 3)
    }
}

/// The operator between two sublayers: either half or both.
#[derive(Debug)]
pub struct RewriteRead {
    pub sizes: Sizes,
    /// leading shape, without (d, m)
    pub batch: Vec<usize>,
    /// X, or, with a chain, the anchor from which its rewrites lead to X
    pub state: Tensor,
    pub chain: Vec<Link>,
    /// what the tokens before these add to the compressed x of the first K − 1 (…, K − 1, d); None for nothing
    pub pending: Option<Tensor>,
    /// a step of a sequence in pieces, which saves nothing for a backward
    pub cached: bool,
    /// which tokens start a document (…), so that no read looks back beyond it; None for a document per sequence
    pub document_starts: Option<Tensor>,
    pub rewrite: Option<Write>,
    pub read: Option<Read>,
    /// n of the rewrite
    pub rewrites: Rewrites,
    /// n of the rewrite to come, for which the read computes v and β
    pub next: Rewrites,
}

/// The rewrites to come: the axis that the weight of the gate has, or else that of the value.
fn next_rewrites(read: &Read, Sizes { d, m, .. }: Sizes) -> Result<Rewrites> {
    match (&read.gate_weight, &read.value_weight) {
        (Some(gate), _) => Rewrites::of(gate, &[], &[d]),
        (None, Some(value)) => Rewrites::of(value, &[], &[m, d]),
        (None, None) => Ok(Rewrites::default()),
    }
}

impl RewriteRead {
    pub fn new(state: Tensor, rewrite: Option<Write>, read: Option<Read>) -> Result<RewriteRead> {
        if rewrite.is_none() && read.is_none() {
            return Err(Error::Argument("`rewrite` or `read` must be given, got neither".into()));
        }
        let over_time = read.as_ref().is_some_and(Read::over_time);
        let (sizes, batch) = state_sizes(&state, over_time)?;
        let axis = |write: &Write| Rewrites::of(&write.direction, &batch, &[sizes.d]);
        let rewrites = rewrite.as_ref().map(axis).transpose()?.unwrap_or_default();
        let next = read.as_ref().map(|read| next_rewrites(read, sizes)).transpose()?.unwrap_or_default();
        let problem = RewriteRead {
            sizes,
            rewrites,
            next,
            batch,
            state,
            chain: Vec::new(),
            pending: None,
            cached: false,
            document_starts: None,
            rewrite,
            read,
        };
        if let Some(write) = &problem.rewrite {
            problem.check_write(write)?;
        }
        if let Some(read) = &problem.read {
            problem.check_read(read)?;
        }
        Ok(problem)
    }

    /// Takes the rewrites that lead from the state, which is then an anchor, to X.
    pub fn with_chain(mut self, chain: Vec<Link>) -> Result<RewriteRead> {
        for Link { write, stats } in &chain {
            let Some(rewrite) = &self.rewrite else {
                return Err(Error::Argument("`chain` must come with a rewrite, got none".into()));
            };
            self.check_write(write)?;
            write.direction.expect_dtype(&[rewrite.direction.dtype])?;
            self.check_small(stats, &[self.rewrites.stats(self.sizes.m)])?;
        }
        self.chain = chain;
        Ok(self)
    }

    /// Makes it a call that saves for a backward, or a cached step with what earlier tokens left. Without tokens nothing
    /// is left.
    #[cfg(feature = "python")]
    pub fn that_saves(self, saves: bool, pending: Option<Tensor>) -> Result<RewriteRead> {
        match (saves, &pending) {
            (false, None) if self.state.is_empty() => Ok(RewriteRead { cached: true, ..self }),
            (false, _) => self.with_pending(pending),
            (true, None) => Ok(self),
            (true, Some(_)) => {
                Err(Error::Argument("`pending` must be None in a call that saves, got a tensor".into()))
            }
        }
    }

    /// Makes it a cached step, with what earlier tokens left for the read of these.
    pub fn with_pending(mut self, pending: Option<Tensor>) -> Result<RewriteRead> {
        check_left(&pending, self.pending_shape(), self.gate_dtype(), &self.state, "a read")?;
        (self.pending, self.cached) = (pending, true);
        Ok(self)
    }

    /// Takes which tokens start a document.
    pub fn with_documents(mut self, starts: Option<Tensor>) -> Result<RewriteRead> {
        if let Some(starts) = &starts {
            let over_time = self.read.as_ref().is_some_and(Read::over_time);
            check_documents(starts, &self.batch, &self.state, over_time, "a read")?;
        }
        self.document_starts = starts;
        Ok(self)
    }

    /// Returns the shape of what these tokens leave for the next; None if the read stays within its token.
    pub fn pending_shape(&self) -> Option<Vec<usize>> {
        let taps = self.taps();
        let sequences = self.batch.split_last()?.1;
        (taps > 1).then(|| [sequences, &[taps - 1, self.sizes.d]].concat())
    }

    /// K: 1 if no read looks back in time.
    pub fn taps(&self) -> usize {
        self.read.as_ref().map_or(1, Read::taps)
    }

    /// The operator's name in Python.
    pub fn operator(&self) -> &'static str {
        match (&self.rewrite, &self.read) {
            (Some(_), Some(_)) => "rewrite_read",
            (Some(_), None) => "rewrite",
            (None, _) => "read",
        }
    }

    pub fn double(&self) -> bool {
        self.state.dtype == Dtype::F64
    }

    /// Returns the dtype of v, β, their gradients and all saved statistics.
    pub fn gate_dtype(&self) -> Dtype {
        if self.double() { Dtype::F64 } else { Dtype::F32 }
    }

    /// Returns the dtype of the context: the one that is asked for, or else the state's.
    pub fn context_dtype(&self, asked: Option<Dtype>) -> Result<Dtype> {
        let dtype = asked.unwrap_or(self.state.dtype);
        let allowed = self.stored_dtypes();
        if allowed.contains(&dtype) {
            return Ok(dtype);
        }
        let names: Vec<&str> = allowed.iter().map(|dtype| dtype.name()).collect();
        Err(Error::Dtype { name: "context_dtype", expected: names.join(" or "), got: dtype.name().into() })
    }

    /// Returns the leading shape followed by `last`.
    pub fn batch_and(&self, last: &[usize]) -> Vec<usize> {
        [&self.batch, last].concat()
    }

    /// Returns the storage dtypes that go with the state's.
    pub fn stored_dtypes(&self) -> &'static [Dtype] {
        stored_beside(self.state.dtype)
    }

    /// Fails unless `tensor` has this shape, the state's device and one of these dtypes.
    pub fn check(&self, tensor: &Tensor, shape: &[usize], dtypes: &[Dtype]) -> Result<()> {
        tensor.expect_shape(shape)?;
        tensor.expect_beside(&self.state)?;
        tensor.expect_dtype(dtypes)
    }

    /// Checks a small float32 (float64) tensor, whose shape is the leading one followed by `last`.
    fn check_small(&self, tensor: &Tensor, last: &[usize]) -> Result<()> {
        self.check(tensor, &self.batch_and(last), &[self.gate_dtype()])
    }

    fn check_write(&self, write: &Write) -> Result<()> {
        let Sizes { d, m, .. } = self.sizes;
        self.check(&write.direction, &self.batch_and(&self.rewrites.and(&[d])), self.stored_dtypes())?;
        self.check_small(&write.value, &self.rewrites.and(&[m]))?;
        self.check_small(&write.gate, &self.rewrites.and(&[]))?;
        at_least("eps_k", write.eps_k, LEAST_EPS_K)
    }

    fn check_parameter(&self, tensor: &Option<Tensor>, shape: &[usize]) -> Result<()> {
        tensor.as_ref().map_or(Ok(()), |tensor| self.check(tensor, shape, self.stored_dtypes()))
    }

    fn check_read(&self, read: &Read) -> Result<()> {
        let Sizes { d, m, .. } = self.sizes;
        match &read.compress {
            Some(weight) if read.over_time() => {
                if weight.shape[2] == 0 {
                    return Err(Error::Argument("`compress` must have at least one tap, got 0".into()));
                }
                self.check_parameter(&read.compress, &[d, m, weight.shape[2]])?;
            }
            Some(_) => self.check_parameter(&read.compress, &[d, m])?,
            None if m != 1 => {
                return Err(Error::Argument(format!(
                    "`compress` must be a weight of shape ({d}, {m}) or ({d}, {m}, K) for {m} value channels, got None"
                )));
            }
            None => {}
        }
        self.check_parameter(&read.norm_weight, &[d])?;
        self.check_parameter(&read.gate_weight, &self.next.and(&[d]))?;
        self.check_parameter(&read.gate_bias, &self.next.and(&[]))?;
        self.check_parameter(&read.value_weight, &self.next.and(&[m, d]))?;
        self.check_parameter(&read.value_bias, &self.next.and(&[m]))?;
        let bias_alone = [
            ("gate_bias", "gate_weight", read.gate_bias.is_some() && read.gate_weight.is_none()),
            ("value_bias", "value_weight", read.value_bias.is_some() && read.value_weight.is_none()),
        ];
        for (name, needed, alone) in bias_alone {
            if alone {
                return Err(Error::Argument(format!(
                    "`{name}` must come with `{needed}`, got None for `{needed}`"
                )));
            }
        }
        if let Some(eps) = read.norm_eps {
            at_least("norm_eps", eps, LEAST_NORM_EPS)?;
        }
        if let Some(scale) = read.value_scale {
            positive("value_scale", scale)?;
        }
        Ok(())
    }
}
