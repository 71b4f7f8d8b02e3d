//! `expand`: a hidden state becomes a residual stream of m value channels.

use super::sizes::{STORED, Sizes, state_sizes};
use crate::error::{Error, Result, shape_text};
use crate::tensor::{Dtype, Tensor};

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
                    got: shape_text(&weight.shape),
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
