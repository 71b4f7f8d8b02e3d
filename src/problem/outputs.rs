//! The shapes of a call's outputs, and the checks of what is given back to it: saved outputs and gradients of outputs.

use super::allocate::Part;
use super::records::{Incoming, Read, Saved};
use super::rewrite_read::RewriteRead;
use crate::error::{Error, Result};

impl RewriteRead {
    /// Returns the shape of an output; None if this call does not have it.
    pub fn output_shape(&self, name: &str) -> Option<Vec<usize>> {
        let (d, m, read, saves) = (self.sizes.d, self.sizes.m, self.read.as_ref(), !self.cached);
        let has = |part: fn(&Read) -> bool| read.is_some_and(part);
        let rewrites = self.rewrite.is_some();
        let (is_there, last) = match name {
            "new_state" => (rewrites, vec![d, m]),
            "stats" => (rewrites && saves, vec![self.rewrites.stats(m)]),
            "context" => (read.is_some(), vec![d]),
            "new_value" => (has(|read| read.value_weight.is_some()), self.next.and(&[m])),
            "new_gate" => (has(|read| read.gate_weight.is_some()), self.next.and(&[])),
            "compressed" => (has(Read::over_time) && saves, vec![d]),
            "rstd" => (has(|read| read.norm_eps.is_some()) && saves, vec![]),
            "new_pending" => {
                // Sequences without tokens leave nothing.
                let leaves = |shape: &Vec<usize>| !self.state.is_empty() || shape.contains(&0);
                return self.pending_shape().filter(|shape| self.cached && leaves(shape));
            }
            _ => unreachable!("`{name}` is not an output"),
        };
        is_there.then(|| self.batch_and(&last))
    }

    /// Returns the statistics of the rewrite and of the read, which torch gets as one output.
    pub fn statistics(&self) -> [Part; 2] {
        ["stats", "rstd"].map(|name| (name, self.output_shape(name)))
    }

    /// Fails unless these are what the forward saves for its backward.
    pub fn check_saved(&self, saved: &Saved) -> Result<()> {
        let small = self.gate_dtype();
        for (name, tensor, dtype) in [
            ("stats", &saved.stats, small),
            ("new_value", &saved.new_value, small),
            ("new_gate", &saved.new_gate, small),
            ("rstd", &saved.rstd, small),
            ("compressed", &saved.compressed, self.state.dtype),
        ] {
            match (tensor, self.output_shape(name)) {
                (Some(tensor), Some(shape)) => self.check(tensor, &shape, &[dtype])?,
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

    /// Fails unless the gradients have the shapes and dtypes of the outputs.
    pub fn check_incoming(&self, incoming: &Incoming) -> Result<()> {
        let small = [self.gate_dtype()];
        for (grad, dtypes) in [
            (&incoming.grad_new_state, &[self.state.dtype][..]),
            (&incoming.grad_context, self.stored_dtypes()),
            (&incoming.grad_new_value, &small),
            (&incoming.grad_new_gate, &small),
        ] {
            if let Some(grad) = grad {
                self.check(grad, &self.shape_of_gradient(grad.name)?, dtypes)?;
            }
        }
        Ok(())
    }

    /// Returns the shape of an output's gradient. Fails if this call does not have the output.
    pub fn shape_of_gradient(&self, name: &str) -> Result<Vec<usize>> {
        let output = name.trim_start_matches("grad_");
        self.output_shape(output).ok_or_else(|| {
            Error::Argument(format!("`{name}` must be left out of a call without `{output}`, got a tensor"))
        })
    }
}
