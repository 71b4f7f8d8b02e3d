//! Outputs of `rewrite`, `read` and `rewrite_read`, and the gradients of both sides.

use super::rewrite_read::{Read, RewriteRead};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Outputs that the forward fills; `None` if their half is absent or they are not requested.
#[derive(Debug, Default)]
pub struct Outputs {
    /// X' (…, d, m)
    pub new_state: Option<Tensor>,
    /// r, p (…, 1 + m); see [`super::stats_before`] for several rewrites
    pub stats: Option<Tensor>,
    /// h (…, d)
    pub context: Option<Tensor>,
    /// v (…, m), or (…, n, m)
    pub new_value: Option<Tensor>,
    /// β (…), or (…, n)
    pub new_gate: Option<Tensor>,
    /// x (…, d)
    pub compressed: Option<Tensor>,
    /// 1/√(mean x² + ε) (…)
    pub rstd: Option<Tensor>,
    /// what these tokens add to x of the K − 1 after them (…, K − 1, d)
    pub new_pending: Option<Tensor>,
}

impl Outputs {
    /// Fails unless these are what the problem's forward saves for its backward.
    pub fn check_saved(&self, problem: &RewriteRead) -> Result<()> {
        let (d, m, read) = (problem.sizes.d, problem.sizes.m, problem.read.as_ref());
        expect_present("stats", &self.stats, problem.rewrite.is_some())?;
        expect_present("new_value", &self.new_value, read.is_some_and(|read| read.value_weight.is_some()))?;
        expect_present("new_gate", &self.new_gate, read.is_some_and(|read| read.gate_weight.is_some()))?;
        expect_present("rstd", &self.rstd, read.is_some_and(|read| read.norm_eps.is_some()))?;
        expect_present("compressed", &self.compressed, read.is_some_and(Read::over_time))?;
        check(&self.stats, &|stats| problem.check_gate(stats, &[problem.rewrites.stats(m)]))?;
        check(&self.new_value, &|value| problem.check_gate(value, &problem.next.and(&[m])))?;
        check(&self.new_gate, &|gate| problem.check_gate(gate, &problem.next.and(&[])))?;
        check(&self.rstd, &|rstd| problem.check_gate(rstd, &[]))?;
        check(&self.compressed, &|x| {
            problem.check_stored(x, &[d])?;
            x.expect_dtype(&[problem.state.dtype])
        })
    }
}

fn check(tensor: &Option<Tensor>, check: &dyn Fn(&Tensor) -> Result<()>) -> Result<()> {
    tensor.as_ref().map_or(Ok(()), check)
}

/// Fails unless the forward of this rewrite and read saves the tensor, or saves none.
fn expect_present(name: &str, tensor: &Option<Tensor>, expected: bool) -> Result<()> {
    let text = |present| if present { "a tensor" } else { "an empty tensor of bytes" };
    match tensor.is_some() {
        got if got == expected => Ok(()),
        got => Err(Error::Argument(format!(
            "`{name}` must be what the forward saved, {}, got {}",
            text(expected),
            text(got)
        ))),
    }
}

/// Incoming gradients of X', h, v and β; `None` is zero.
#[derive(Debug, Default)]
pub struct Incoming {
    pub grad_new_state: Option<Tensor>,
    pub grad_context: Option<Tensor>,
    pub grad_new_value: Option<Tensor>,
    pub grad_new_gate: Option<Tensor>,
}

impl Incoming {
    /// Fails unless the gradients have the shapes and dtypes of the problem's outputs.
    pub fn check(&self, problem: &RewriteRead) -> Result<()> {
        let (d, m, read) = (problem.sizes.d, problem.sizes.m, problem.read.as_ref());
        let (value, gate) =
            (read.and_then(|r| r.value_weight.as_ref()), read.and_then(|r| r.gate_weight.as_ref()));
        let unasked = [
            ("grad_new_state", self.grad_new_state.is_some() && problem.rewrite.is_none()),
            ("grad_context", self.grad_context.is_some() && read.is_none()),
            ("grad_new_value", self.grad_new_value.is_some() && value.is_none()),
            ("grad_new_gate", self.grad_new_gate.is_some() && gate.is_none()),
        ];
        if let Some((name, _)) = unasked.iter().find(|(_, unasked)| *unasked) {
            let output = name.trim_start_matches("grad_");
            let text = format!("`{name}` must be left out of a call without `{output}`, got a tensor");
            return Err(Error::Argument(text));
        }
        if let Some(grad) = &self.grad_new_state {
            problem.check_stored(grad, &[d, m])?;
            grad.expect_dtype(&[problem.state.dtype])?;
        }
        check(&self.grad_context, &|grad| problem.check_stored(grad, &[d]))?;
        check(&self.grad_new_value, &|grad| problem.check_gate(grad, &problem.next.and(&[m])))?;
        check(&self.grad_new_gate, &|grad| problem.check_gate(grad, &problem.next.and(&[])))
    }
}

/// Gradients to fill: of the state, of the rewrite's inputs, of the read's parameters; `None` is not computed.
#[derive(Debug, Default)]
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

#[cfg(feature = "torch")]
impl Gradients {
    /// Returns true if any parameter's gradient is wanted.
    pub fn of_parameters(&self) -> bool {
        let Gradients { compress, norm_weight, gate_weight, gate_bias, value_weight, value_bias, .. } = self;
        let wanted = [compress, norm_weight, gate_weight, gate_bias, value_weight, value_bias];
        wanted.iter().any(|gradient| gradient.is_some())
    }
}
