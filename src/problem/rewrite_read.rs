//! What is asked of a boundary between two sublayers: borrowed inputs, sizes and flags. Checked once,
//! here, and used by every backend.

use crate::error::{Error, Result};
use crate::tensor::{Dtype, Tensor};

/// Sizes of a state `(…, d, m)` seen as `sequences × time` tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    pub sequences: usize,
    pub time: usize,
    /// hidden size
    pub d: usize,
    /// value channels
    pub m: usize,
}

impl Sizes {
    pub fn tokens(&self) -> usize {
        self.sequences * self.time
    }
}

/// The rewriting half: X' = X + β k̂ (v − k̂ᵀX)ᵀ.
#[derive(Debug)]
pub struct Rewrite {
    /// k (…, d)
    pub direction: Tensor,
    /// v (…, m)
    pub value: Tensor,
    /// β (…)
    pub gate: Tensor,
    /// ε_k in k̂ = k/√(|k|² + ε_k²)
    pub eps_k: f64,
}

/// The reading half: x = compress(X'), h = norm(x), v = φ(W z + b), β = 2σ(w·h + b).
#[derive(Debug)]
pub struct Read {
    /// (d, m) over channels, (d, m, K) over channels and time; None for m = 1 without mixing
    pub compress: Option<Tensor>,
    /// γ (d,)
    pub norm_weight: Option<Tensor>,
    /// None: no normalisation
    pub norm_eps: Option<f64>,
    /// (d,)
    pub gate_weight: Option<Tensor>,
    /// ()
    pub gate_bias: Option<Tensor>,
    /// (m, d)
    pub value_weight: Option<Tensor>,
    /// (m,)
    pub value_bias: Option<Tensor>,
    /// φ = scale·sigmoid; None: φ = identity
    pub value_scale: Option<f64>,
    /// z = x instead of h
    pub value_from_compressed: bool,
}

impl Read {
    /// K: 1 where the read stays within its token.
    pub fn taps(&self) -> usize {
        match &self.compress {
            Some(weight) if weight.shape.len() == 3 => weight.shape[2],
            _ => 1,
        }
    }

    /// Whether the read looks back in time, so that x is saved for the backward.
    pub fn over_time(&self) -> bool {
        self.compress.as_ref().is_some_and(|weight| weight.shape.len() == 3)
    }
}

/// A boundary: either half or both.
#[derive(Debug)]
pub struct Boundary {
    pub sizes: Sizes,
    /// leading shape, without (d, m)
    pub batch: Vec<usize>,
    pub state: Tensor,
    pub rewrite: Option<Rewrite>,
    pub read: Option<Read>,
}

/// Smallest ε_k and norm ε: where k or x is 0 they are all that stands under the root, and float32 has to
/// keep ε_k² and ε with room to spare on every backend, subnormal numbers flushed or not.
const LEAST_EPS_K: f64 = 1e-18;
const LEAST_NORM_EPS: f64 = 1e-36;

const STORED: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

impl Boundary {
    pub fn new(state: Tensor, rewrite: Option<Rewrite>, read: Option<Read>) -> Result<Boundary> {
        let over_time = read.as_ref().is_some_and(Read::over_time);
        let (sizes, batch) = state_sizes(&state, over_time)?;
        state.expect_reachable()?;
        let boundary = Boundary { sizes, batch, state, rewrite, read };
        if let Some(rewrite) = &boundary.rewrite {
            boundary.check_rewrite(rewrite)?;
        }
        if let Some(read) = &boundary.read {
            boundary.check_read(read)?;
        }
        Ok(boundary)
    }

    /// What callers know it by.
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

    /// dtype of v, β, their gradients and all saved statistics
    pub fn gate_dtype(&self) -> Dtype {
        if self.double() { Dtype::F64 } else { Dtype::F32 }
    }

    /// The leading shape followed by `last`.
    pub fn batch_and(&self, last: &[usize]) -> Vec<usize> {
        [&self.batch, last].concat()
    }

    /// Fails unless `tensor` has the leading shape followed by `last`, lies beside the state and has a
    /// dtype that goes with it.
    pub fn check_stored(&self, tensor: &Tensor, last: &[usize]) -> Result<()> {
        tensor.expect_shape(&self.batch_and(last))?;
        self.check_dtype(tensor)
    }

    /// The same for the small float32 (float64) tensors: v, β, statistics.
    pub fn check_gate(&self, tensor: &Tensor, last: &[usize]) -> Result<()> {
        tensor.expect_shape(&self.batch_and(last))?;
        tensor.expect_beside(&self.state)?;
        tensor.expect_dtype(&[self.gate_dtype()])
    }

    fn check_dtype(&self, tensor: &Tensor) -> Result<()> {
        tensor.expect_beside(&self.state)?;
        tensor.expect_dtype(if self.double() { &[Dtype::F64] } else { &STORED })
    }

    fn check_parameter(&self, tensor: &Option<Tensor>, shape: &[usize]) -> Result<()> {
        let Some(tensor) = tensor else { return Ok(()) };
        tensor.expect_shape(shape)?;
        self.check_dtype(tensor)
    }

    fn check_rewrite(&self, rewrite: &Rewrite) -> Result<()> {
        let Sizes { d, m, .. } = self.sizes;
        self.check_stored(&rewrite.direction, &[d])?;
        self.check_gate(&rewrite.value, &[m])?;
        self.check_gate(&rewrite.gate, &[])?;
        positive("eps_k", rewrite.eps_k)?;
        at_least("eps_k", rewrite.eps_k, LEAST_EPS_K)
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
        self.check_parameter(&read.gate_weight, &[d])?;
        self.check_parameter(&read.gate_bias, &[])?;
        self.check_parameter(&read.value_weight, &[m, d])?;
        self.check_parameter(&read.value_bias, &[m])?;
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
            positive("norm_eps", eps)?;
            at_least("norm_eps", eps, LEAST_NORM_EPS)?;
        }
        if let Some(scale) = read.value_scale {
            positive("value_scale", scale)?;
        }
        Ok(())
    }
}

/// Expansion of x (…, d) to a state (…, d, m), by repetition or by a causal depthwise convolution.
#[derive(Debug)]
pub struct Expand {
    pub sizes: Sizes,
    pub batch: Vec<usize>,
    /// (d, m, K); None: repetition
    pub weight: Option<Tensor>,
}

impl Expand {
    /// `state` is the expanded side: the output of the forward, the incoming gradient of the backward.
    pub fn new(x: &Tensor, weight: Option<Tensor>, state: &Tensor) -> Result<Expand> {
        let (sizes, batch) = state_sizes(state, weight.is_some())?;
        x.expect_shape(&[&batch[..], &[sizes.d]].concat())?;
        x.expect_reachable()?;
        state.expect_beside(x)?;
        let double = x.dtype == Dtype::F64;
        let stored: &[Dtype] = if double { &[Dtype::F64] } else { &STORED };
        state.expect_dtype(stored)?;
        if let Some(weight) = &weight {
            if weight.shape.len() != 3 || weight.shape[2] == 0 {
                return Err(Error::Shape {
                    name: weight.name,
                    expected: format!("({}, {}, K) with K ≥ 1", sizes.d, sizes.m),
                    got: crate::error::shape_text(&weight.shape),
                });
            }
            weight.expect_shape(&[sizes.d, sizes.m, weight.shape[2]])?;
            weight.expect_beside(x)?;
            weight.expect_dtype(stored)?;
        }
        Ok(Expand { sizes, batch, weight })
    }

    pub fn taps(&self) -> usize {
        self.weight.as_ref().map_or(1, |weight| weight.shape[2])
    }
}

fn state_sizes(state: &Tensor, over_time: bool) -> Result<(Sizes, Vec<usize>)> {
    let rank = state.shape.len();
    let wrong = |expected: &str| Error::Shape {
        name: state.name,
        expected: expected.into(),
        got: crate::error::shape_text(&state.shape),
    };
    if over_time && rank < 3 {
        return Err(wrong("(…, time, hidden_size, value_channels)"));
    }
    if rank < 2 || state.shape[rank - 2..].contains(&0) {
        return Err(wrong("(…, hidden_size, value_channels)"));
    }
    let (batch, last) = state.shape.split_at(rank - 2);
    let tokens: usize = batch.iter().product();
    let time = if over_time { *batch.last().expect("rank ≥ 3") } else { tokens };
    let sequences = tokens.checked_div(time).unwrap_or(0);
    Ok((Sizes { sequences, time, d: last[0], m: last[1] }, batch.to_vec()))
}

fn positive(name: &str, number: f64) -> Result<()> {
    if number > 0.0 && number.is_finite() {
        return Ok(());
    }
    Err(Error::Argument(format!("`{name}` must be a positive finite number, got {}", number_text(number))))
}

fn at_least(name: &str, number: f64, least: f64) -> Result<()> {
    if number >= least {
        return Ok(());
    }
    Err(Error::Argument(format!("`{name}` must be at least {least:e}, got {}", number_text(number))))
}

/// A number as Python writes it: `0.0`, `nan`, `-inf`.
fn number_text(number: f64) -> String {
    format!("{number:?}").to_lowercase()
}
