//! The outputs of each call, allocated in the order of the operators' schemas. An [`Allocate`] makes them: `torch::run` as
//! torch's tensors, `slices::memory` as Rust's vectors.

use super::records::{Gradients, Outputs};
use super::rewrite_read::RewriteRead;
use crate::error::Result;
use crate::tensor::{Dtype, Tensor};

/// Allocates the outputs of a call, one after the other.
pub trait Allocate {
    /// Allocates the next output, on the device of `beside`.
    fn output(
        &mut self,
        name: &'static str,
        shape: &[usize],
        dtype: Dtype,
        beside: &Tensor,
    ) -> Result<Tensor>;

    /// Leaves the next output out.
    fn absent_output(&mut self) -> Result<Option<Tensor>>;

    /// Allocates the next output, or leaves it out if there is no shape.
    fn optional_output(
        &mut self,
        name: &'static str,
        shape: Option<&[usize]>,
        dtype: Dtype,
        beside: &Tensor,
    ) -> Result<Option<Tensor>> {
        match shape {
            Some(shape) => self.output(name, shape, dtype, beside).map(Some),
            None => self.absent_output(),
        }
    }

    /// Whether two outputs that are always used together are allocated as one.
    fn joins(&self) -> bool {
        false
    }

    /// Allocates two outputs, of which either may be left out, or one output `name` that has both, one after the other.
    fn joined(
        &mut self,
        name: &'static str,
        parts: [Part; 2],
        dtype: Dtype,
        beside: &Tensor,
    ) -> Result<[Option<Tensor>; 2]> {
        if !self.joins() {
            let mut next = |(name, shape): Part| self.optional_output(name, shape.as_deref(), dtype, beside);
            let [first, second] = parts;
            return Ok([next(first)?, next(second)?]);
        }
        let shape = parts.iter().any(|(_, shape)| shape.is_some()).then(|| [joined_len(&parts)]);
        let both = self.optional_output(name, shape.as_ref().map(|shape| &shape[..]), dtype, beside)?;
        Ok(both.map_or([None, None], |both| parts_of(&both, parts)))
    }

    /// Allocates the gradient of an input, if there is one and its bit of `wanted` is set.
    fn gradient(
        &mut self,
        name: &'static str,
        input: &Option<Tensor>,
        wanted: i64,
        bit: usize,
    ) -> Result<Option<Tensor>> {
        match input {
            Some(input) if wanted >> bit & 1 == 1 => self.output_like(name, input).map(Some),
            _ => self.absent_output(),
        }
    }

    /// Allocates the next output like `tensor`.
    fn output_like(&mut self, name: &'static str, tensor: &Tensor) -> Result<Tensor> {
        self.output(name, &tensor.shape, tensor.dtype, tensor)
    }
}

/// The name and the shape of an output.
pub type Part = (&'static str, Option<Vec<usize>>);

/// Returns the numbers of all parts.
pub fn joined_len(parts: &[Part]) -> usize {
    parts.iter().flat_map(|(_, shape)| shape).map(|shape| shape.iter().product::<usize>()).sum()
}

/// Returns the parts of a tensor that has them one after the other.
pub fn parts_of(joined: &Tensor, parts: [Part; 2]) -> [Option<Tensor>; 2] {
    let mut first = 0;
    parts.map(|(name, shape)| {
        let part = joined.part(name, first, shape?);
        first += part.len();
        Some(part)
    })
}

impl Outputs {
    /// Allocates the outputs of a forward, and what it saves for its backward; a cached step leaves something to the next
    /// instead.
    pub fn new(
        problem: &RewriteRead,
        context_dtype: Option<Dtype>,
        allocate: &mut dyn Allocate,
    ) -> Result<Outputs> {
        let (state, small) = (&problem.state, problem.gate_dtype());
        let mut next =
            |name, dtype| allocate.optional_output(name, problem.output_shape(name).as_deref(), dtype, state);
        let mut outputs = Outputs::default();
        if problem.rewrite.is_some() {
            outputs.new_state = next("new_state", state.dtype)?;
        }
        if problem.read.is_some() {
            outputs.context = next("context", problem.context_dtype(context_dtype)?)?;
            outputs.new_value = next("new_value", small)?;
            outputs.new_gate = next("new_gate", small)?;
        }
        [outputs.stats, outputs.rstd] = allocate.joined("stats", problem.statistics(), small, state)?;
        let mut next =
            |name, dtype| allocate.optional_output(name, problem.output_shape(name).as_deref(), dtype, state);
        if problem.read.is_some() {
            // x keeps the state's dtype: a narrower context would round or overflow it before the norm.
            outputs.compressed = next("compressed", state.dtype)?;
            outputs.new_pending = next("new_pending", small)?;
        }
        Ok(outputs)
    }
}

impl Gradients {
    /// `wanted` for all gradients.
    pub const ALL: i64 = -1;

    /// Allocates the gradients. `wanted` has a bit for each, the state's first. Parameters without their bit get none; the
    /// state and the rewrite always get theirs. `overwritten` is a gradient of X' that becomes the state's.
    pub fn new(
        problem: &RewriteRead,
        wanted: i64,
        overwritten: Option<Tensor>,
        allocate: &mut dyn Allocate,
    ) -> Result<Gradients> {
        let in_place = overwritten.is_some();
        let state = overwritten.map_or_else(|| allocate.output_like("grad_state", &problem.state), Ok)?;
        let mut gradients = Gradients { state: Some(state), in_place, ..Gradients::default() };
        let mut bit = 0;
        if let Some(write) = &problem.rewrite {
            gradients.direction = Some(allocate.output_like("grad_direction", &write.direction)?);
            gradients.value = Some(allocate.output_like("grad_value", &write.value)?);
            gradients.gate = Some(allocate.output_like("grad_gate", &write.gate)?);
            bit = 3; // bits 1 to 3 are theirs
        }
        let Some(read) = &problem.read else { return Ok(gradients) };
        let mut next = |name, parameter: &Option<Tensor>| {
            bit += 1;
            allocate.gradient(name, parameter, wanted, bit)
        };
        gradients.compress = next("grad_compress", &read.compress)?;
        gradients.norm_weight = next("grad_norm_weight", &read.norm_weight)?;
        gradients.gate_weight = next("grad_gate_weight", &read.gate_weight)?;
        gradients.gate_bias = next("grad_gate_bias", &read.gate_bias)?;
        gradients.value_weight = next("grad_value_weight", &read.value_weight)?;
        gradients.value_bias = next("grad_value_bias", &read.value_bias)?;
        Ok(gradients)
    }
}
