//! The outputs of each call: names, shapes and dtypes, in the order of the operators' schemas. An [`Allocate`] makes
//! them: `torch::run` as torch's tensors, `slices::memory` as Rust's vectors.

use super::outputs::{Gradients, Outputs};
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
    fn absent_output(&mut self, beside: &Tensor) -> Result<Option<Tensor>>;

    /// Allocates the next output if it is wanted.
    fn optional_output(
        &mut self,
        wanted: bool,
        name: &'static str,
        shape: &[usize],
        dtype: Dtype,
        beside: &Tensor,
    ) -> Result<Option<Tensor>> {
        if wanted {
            return self.output(name, shape, dtype, beside).map(Some);
        }
        self.absent_output(beside)
    }

    /// Allocates the next output like `tensor`.
    fn output_like(&mut self, name: &'static str, tensor: &Tensor) -> Result<Tensor> {
        self.output(name, &tensor.shape, tensor.dtype, tensor)
    }
}

impl Outputs {
    /// Allocates the outputs of a forward, and what it saves for its backward.
    pub fn new(
        problem: &RewriteRead,
        context_dtype: Option<Dtype>,
        allocate: &mut dyn Allocate,
    ) -> Result<Outputs> {
        let (d, m, state, small) = (problem.sizes.d, problem.sizes.m, &problem.state, problem.gate_dtype());
        let shape = |last: &[usize]| problem.batch_and(last);
        let mut outputs = Outputs::default();
        if problem.rewrite.is_some() {
            outputs.new_state = Some(allocate.output_like("new_state", state)?);
            outputs.stats =
                Some(allocate.output("stats", &shape(&[problem.rewrites.stats(m)]), small, state)?);
        }
        let Some(read) = &problem.read else { return Ok(outputs) };
        let (over_time, normed) = (read.over_time(), read.norm_eps.is_some());
        outputs.add_read(problem, context_dtype, allocate)?;
        // x keeps the state's dtype: a narrower context would round or overflow it before the norm.
        outputs.compressed =
            allocate.optional_output(over_time, "compressed", &shape(&[d]), state.dtype, state)?;
        outputs.rstd = allocate.optional_output(normed, "rstd", &shape(&[]), small, state)?;
        Ok(outputs)
    }

    /// Allocates the outputs of a step of a sequence in pieces.
    pub fn for_cached_step(
        problem: &RewriteRead,
        context_dtype: Option<Dtype>,
        allocate: &mut dyn Allocate,
    ) -> Result<Outputs> {
        let mut outputs = Outputs::default();
        if problem.rewrite.is_some() {
            outputs.new_state = Some(allocate.output_like("new_state", &problem.state)?);
        }
        outputs.add_read(problem, context_dtype, allocate)?;
        let shape = problem.pending_shape();
        let (wanted, small, state) = (shape.is_some(), problem.gate_dtype(), &problem.state);
        outputs.new_pending =
            allocate.optional_output(wanted, "new_pending", &shape.unwrap_or_default(), small, state)?;
        Ok(outputs)
    }

    /// Allocates h, v and β.
    fn add_read(
        &mut self,
        problem: &RewriteRead,
        context_dtype: Option<Dtype>,
        allocate: &mut dyn Allocate,
    ) -> Result<()> {
        let (d, m, state, small) = (problem.sizes.d, problem.sizes.m, &problem.state, problem.gate_dtype());
        let Some(read) = &problem.read else { return Ok(()) };
        let shape = |last: &[usize]| problem.batch_and(&problem.next.and(last));
        let dtype = problem.context_dtype(context_dtype)?;
        let (value, gate) = (read.value_weight.is_some(), read.gate_weight.is_some());
        self.context = Some(allocate.output("context", &problem.batch_and(&[d]), dtype, state)?);
        self.new_value = allocate.optional_output(value, "new_value", &shape(&[m]), small, state)?;
        self.new_gate = allocate.optional_output(gate, "new_gate", &shape(&[]), small, state)?;
        Ok(())
    }
}

impl Gradients {
    /// `wanted` for all gradients.
    pub const ALL: i64 = -1;

    /// Allocates the gradients. `wanted` has a bit for each, the state's first; only parameters heed it.
    /// `overwritten` is a gradient of X' that becomes the state's.
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
        if let Some(rewrite) = &problem.rewrite {
            gradients.direction = Some(allocate.output_like("grad_direction", &rewrite.direction)?);
            gradients.value = Some(allocate.output_like("grad_value", &rewrite.value)?);
            gradients.gate = Some(allocate.output_like("grad_gate", &rewrite.gate)?);
            bit = 3; // bits 1 to 3 are theirs
        }
        let Some(read) = &problem.read else { return Ok(gradients) };
        let mut next = |name, parameter: &Option<Tensor>| {
            bit += 1;
            match parameter {
                Some(parameter) if wanted >> bit & 1 == 1 => allocate.output_like(name, parameter).map(Some),
                _ => allocate.absent_output(&problem.state),
            }
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
