//! The shapes of a call's outputs, and the checks of what is given back to it: saved outputs and gradients of outputs.

use super::records::{Incoming, Read, Saved};
use super::rewrite_read::RewriteRead;
use crate::error::{Error, Result};
use crate::records;
use crate::tensor::Tensor;

impl RewriteRead {
    /// Returns the shape of each output; None for one that this call does not have.
    pub fn output_shapes(&self) -> records::Outputs<Option<Vec<usize>>> {
        let (d, m, read, saves) = (self.sizes.d, self.sizes.m, self.read.as_ref(), !self.cached);
        let has = |part: fn(&Read) -> bool| read.is_some_and(part);
        let shape = |present: bool, last: &[usize]| present.then(|| self.batch_and(last));
        let rewrites = self.rewrite.is_some();
        records::Outputs {
            new_state: shape(rewrites, &[d, m]),
            stats: shape(rewrites && saves, &[self.rewrites.stats(m)]),
            context: shape(read.is_some(), &[d]),
            new_value: shape(has(|read| read.value_weight.is_some()), &self.next.and(&[m])),
            new_gate: shape(has(|read| read.gate_weight.is_some()), &self.next.and(&[])),
            compressed: shape(has(Read::over_time) && saves, &[d]),
            rstd: shape(has(|read| read.norm_eps.is_some()) && saves, &[]),
            // Sequences without tokens leave nothing.
            new_pending: self
                .pending_shape()
                .filter(|shape| self.cached && (!self.state.is_empty() || shape.contains(&0))),
        }
    }
}

impl Saved {
    /// Fails unless these are what the problem's forward saves for its backward.
    pub fn check_saved(&self, problem: &RewriteRead) -> Result<()> {
        let (shapes, small) = (problem.output_shapes(), problem.gate_dtype());
        for (name, tensor, shape, dtype) in [
            ("stats", &self.stats, shapes.stats, small),
            ("new_value", &self.new_value, shapes.new_value, small),
            ("new_gate", &self.new_gate, shapes.new_gate, small),
            ("rstd", &self.rstd, shapes.rstd, small),
            ("compressed", &self.compressed, shapes.compressed, problem.state.dtype),
        ] {
            match (tensor, shape) {
                (Some(tensor), Some(shape)) => problem.check(tensor, &shape, &[dtype])?,
                (None, None) => {}
                (tensor, shape) => {
                    let text = |present| if present { "a tensor" } else { "None" };
                    return Err(Error::Argument(format!(
                        "`{name}` must be what the forward saved, {}, got {}",
                        text(shape.is_some()),
                        text(tensor.is_some())
                    )));
                }
            }
        }
        Ok(())
    }
}

impl Incoming {
    /// Fails unless the gradients have the shapes and dtypes of the problem's outputs.
    pub fn check(&self, problem: &RewriteRead) -> Result<()> {
        let (shapes, small) = (problem.output_shapes(), [problem.gate_dtype()]);
        let check = |name, tensor: &Option<Tensor>, shape: Option<Vec<usize>>, dtypes: &[_]| match tensor {
            None => Ok(()),
            Some(tensor) => problem.check(tensor, &shape.ok_or_else(|| without_output(name))?, dtypes),
        };
        check("grad_new_state", &self.grad_new_state, shapes.new_state, &[problem.state.dtype])?;
        check("grad_context", &self.grad_context, shapes.context, problem.stored_dtypes())?;
        check("grad_new_value", &self.grad_new_value, shapes.new_value, &small)?;
        check("grad_new_gate", &self.grad_new_gate, shapes.new_gate, &small)
    }
}

/// The refusal of a gradient whose output the call does not have.
pub fn without_output(name: &str) -> Error {
    let output = name.trim_start_matches("grad_");
    Error::Argument(format!("`{name}` must be left out of a call without `{output}`, got a tensor"))
}
