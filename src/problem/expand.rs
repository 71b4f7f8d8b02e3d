//! `expand`: a hidden state becomes a residual stream of m value channels.

use super::sizes::{Sizes, check_documents, check_left, expect_addressable, stored_beside};
use crate::error::{Error, Result};
use crate::tensor::{Dtype, Tensor};

/// Expansion of x (…, d) to a state (…, d, m), by repetition or by a causal depthwise convolution.
#[derive(Debug)]
pub struct Expand {
    pub sizes: Sizes,
    /// (…, d)
    pub x: Tensor,
    /// (d, m, K); None: repetition
    pub weight: Option<Tensor>,
    /// x of the K − 1 tokens before these (…, K − 1, d); None for zeros
    pub before: Option<Tensor>,
    /// which tokens start a document (…), so that none looks back beyond it; None for a document per sequence
    pub document_starts: Option<Tensor>,
}

impl Expand {
    pub fn new(x: Tensor, weight: Option<Tensor>, value_channels: i64) -> Result<Expand> {
        if value_channels < 1 {
            let text = format!("`value_channels` must be an integer of at least 1, got {value_channels}");
            return Err(Error::Argument(text));
        }
        let (rank, m) = (x.shape.len(), value_channels as usize);
        let (needed, expected) = match weight {
            None => (1, "(…, hidden_size)"),
            Some(_) => (2, "(…, time, hidden_size)"),
        };
        if rank < needed || x.shape[rank - 1] == 0 {
            return Err(x.wrong_shape(expected));
        }
        expect_addressable("state", &[&x.shape[..], &[m]].concat())?;
        x.expect_dtype(&Dtype::NUMBERS)?;
        let d = x.shape[rank - 1];
        if let Some(weight) = &weight {
            if weight.shape.len() != 3 || weight.shape[2] == 0 {
                return Err(weight.wrong_shape(format!("({d}, {m}, K) with K ≥ 1")));
            }
            weight.expect_shape(&[d, m, weight.shape[2]])?;
            weight.expect_beside(&x)?;
            weight.expect_dtype(stored_beside(x.dtype))?;
        }
        let tokens: usize = x.shape[..rank - 1].iter().product();
        let time = if weight.is_some() { x.shape[rank - 2] } else { tokens };
        let sizes = Sizes { sequences: tokens.checked_div(time).unwrap_or(0), time, d, m };
        Ok(Expand { sizes, x, weight, before: None, document_starts: None })
    }

    /// Takes which tokens start a document.
    pub fn with_documents(mut self, starts: Option<Tensor>) -> Result<Expand> {
        if let Some(starts) = &starts {
            let batch = &self.x.shape[..self.x.shape.len() - 1];
            check_documents(starts, batch, &self.x, self.weight.is_some(), "an expansion")?;
        }
        self.document_starts = starts;
        Ok(self)
    }

    /// Takes x of the tokens before these.
    pub fn with_before(mut self, before: Option<Tensor>) -> Result<Expand> {
        check_left(&before, self.before_shape(), self.x.dtype, &self.x, "an expansion")?;
        self.before = before;
        Ok(self)
    }

    /// Returns true for sequences without tokens.
    #[cfg(feature = "python")]
    pub fn leaves_nothing(&self) -> bool {
        self.x.is_empty() && self.before_shape().is_some_and(|shape| !shape.contains(&0))
    }

    /// Returns the shape of what these tokens leave for the next; None if an expansion stays within its token.
    pub fn before_shape(&self) -> Option<Vec<usize>> {
        let (taps, rank) = (self.taps(), self.x.shape.len());
        (taps > 1).then(|| [&self.x.shape[..rank - 2], &[taps - 1, self.sizes.d]].concat())
    }

    /// Returns the tensor and the row of x of a token that lies `back` tokens before `token`, in the same sequence or
    /// before it; None for zeros.
    pub fn row_before(&self, token: usize, back: usize) -> Option<(&Tensor, usize)> {
        let (sequence, position) = (token / self.sizes.time, token % self.sizes.time);
        if back <= position {
            return Some((&self.x, token - back));
        }
        let kept = self.taps() - 1;
        Some((self.before.as_ref()?, (sequence * kept + kept + position).checked_sub(back)?))
    }

    /// Returns the shape of the state: (…, d, m).
    pub fn state_shape(&self) -> Vec<usize> {
        [&self.x.shape[..], &[self.sizes.m]].concat()
    }

    /// Fails unless this is a gradient of the state.
    pub fn check_gradient(&self, grad_state: &Tensor) -> Result<()> {
        grad_state.expect_shape(&self.state_shape())?;
        grad_state.expect_beside(&self.x)?;
        grad_state.expect_dtype(stored_beside(self.x.dtype))
    }

    pub fn taps(&self) -> usize {
        self.weight.as_ref().map_or(1, |weight| weight.shape[2])
    }
}
