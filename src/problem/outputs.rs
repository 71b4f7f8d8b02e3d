//! Outputs of `rewrite`, `read` and `rewrite_read`, and the gradients of both sides.

use super::rewrite_read::{Read, RewriteRead};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Outputs that the forward fills; `None` if their half is absent or they are not requested.
#[derive(Default)]
pub struct Outputs {
    /// X' (…, d, m)
    pub new_state: Option<Tensor>,
    /// r, p (…, 1 + m)
    pub stats: Option<Tensor>,
    /// h (…, d)
    pub context: Option<Tensor>,
    /// v (…, m)
    pub new_value: Option<Tensor>,
    /// β (…)
    pub new_gate: Option<Tensor>,
    /// x (…, d)
    pub compressed: Option<Tensor>,
    /// 1/√(mean x² + ε) (…)
    pub rstd: Option<Tensor>,
}

impl Outputs {
    /// Fails unless these are what the problem's forward saves for its backward.
    pub fn check_saved(&self, problem: &RewriteRead) -> Result<()> {
        let (d, m, read) = (problem.sizes.d, problem.sizes.m, problem.read.as_ref());
        let check = |tensor: &Option<Tensor>, name, expected, last: &[usize]| {
            if tensor.is_some() != expected {
                return Err(Error::Argument(format!("`{name}` must be what this rewrite and read save")));
            }
            tensor.as_ref().map_or(Ok(()), |tensor| problem.check_gate(tensor, last))
        };
        check(&self.stats, "stats", problem.rewrite.is_some(), &[1 + m])?;
        check(&self.new_value, "new_value", read.is_some_and(|read| read.value_weight.is_some()), &[m])?;
        check(&self.new_gate, "new_gate", read.is_some_and(|read| read.gate_weight.is_some()), &[])?;
        check(&self.rstd, "rstd", read.is_some_and(|read| read.norm_eps.is_some()), &[])?;
        check(&None, "compressed", read.is_some_and(Read::over_time) != self.compressed.is_some(), &[])?;
        let Some(compressed) = &self.compressed else { return Ok(()) };
        problem.check_stored(compressed, &[d])?;
        compressed.expect_dtype(&[problem.state.dtype])
    }
}

/// Incoming gradients of X', h, v and β; `None` is zero.
#[derive(Default)]
pub struct Incoming {
    pub grad_new_state: Option<Tensor>,
    pub grad_context: Option<Tensor>,
    pub grad_new_value: Option<Tensor>,
    pub grad_new_gate: Option<Tensor>,
}

impl Incoming {
    /// Fails unless the gradients have the shapes and dtypes of the problem's outputs.
    pub fn check(&self, problem: &RewriteRead) -> Result<()> {
        let (d, m) = (problem.sizes.d, problem.sizes.m);
        if let Some(grad) = &self.grad_new_state {
            problem.check_stored(grad, &[d, m])?;
            grad.expect_dtype(&[problem.state.dtype])?;
        }
        let check = |grad: &Option<Tensor>, check: &dyn Fn(&Tensor) -> Result<()>| {
            grad.as_ref().map_or(Ok(()), check)
        };
        check(&self.grad_context, &|grad| problem.check_stored(grad, &[d]))?;
        check(&self.grad_new_value, &|grad| problem.check_gate(grad, &[m]))?;
        check(&self.grad_new_gate, &|grad| problem.check_gate(grad, &[]))
    }
}

/// Gradients to fill: of the state, of the rewrite's inputs, of the read's parameters; `None` is not computed.
#[derive(Default)]
pub struct Gradients {
    pub state: Option<Tensor>,
    /// `state` holds the incoming ∂L/∂X', each row is overwritten after its use, and `grad_new_state` is `None`.
    pub in_place: bool,
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

impl Gradients {
    /// Returns true if any parameter's gradient is wanted.
    pub fn of_parameters(&self) -> bool {
        let Gradients { compress, norm_weight, gate_weight, gate_bias, value_weight, value_bias, .. } = self;
        let wanted = [compress, norm_weight, gate_weight, gate_bias, value_weight, value_bias];
        wanted.iter().any(|gradient| gradient.is_some())
    }
}
