//! Sizes of a state, and the checks that all operators share.

use crate::error::{Error, Result, shape_text};
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

/// Storage dtypes that go with float32 arithmetic.
const STORED: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

/// Returns the storage dtypes that go with a state's.
pub(super) fn stored_beside(state: Dtype) -> &'static [Dtype] {
    if state == Dtype::F64 { &[Dtype::F64] } else { &STORED }
}

/// Fails if the sizes without zeros multiply to so many elements that no address would reach them.
pub(super) fn expect_addressable(name: &'static str, shape: &[usize]) -> Result<()> {
    let elements = shape.iter().filter(|&&size| size > 0).try_fold(1usize, |product, &size| {
        product.checked_mul(size).filter(|&product| product <= isize::MAX as usize / 64)
    });
    match elements {
        Some(_) => Ok(()),
        None => Err(Error::Shape { name, expected: "with fewer elements".into(), got: shape_text(shape) }),
    }
}

/// Returns the sizes of a state and its leading shape without (d, m). Fails if it lacks an axis.
pub(super) fn state_sizes(state: &Tensor, over_time: bool) -> Result<(Sizes, Vec<usize>)> {
    let rank = state.shape.len();
    state.expect_dtype(&Dtype::NUMBERS)?;
    expect_addressable(state.name, &state.shape)?;
    if over_time && rank < 3 {
        return Err(state.wrong_shape("(…, time, hidden_size, value_channels)"));
    }
    if rank < 2 || state.shape[rank - 2..].contains(&0) {
        return Err(state.wrong_shape("(…, hidden_size, value_channels)"));
    }
    let (batch, last) = state.shape.split_at(rank - 2);
    let tokens: usize = batch.iter().product();
    let time = if over_time { *batch.last().expect("rank ≥ 3") } else { tokens };
    let sequences = tokens.checked_div(time).unwrap_or(0);
    Ok((Sizes { sequences, time, d: last[0], m: last[1] }, batch.to_vec()))
}

/// Fails unless `starts` is a mask of the tokens of `beside`, whose leading shape is `batch`, and something looks back in
/// time.
pub(super) fn check_documents(
    starts: &Tensor,
    batch: &[usize],
    beside: &Tensor,
    over_time: bool,
    what: &str,
) -> Result<()> {
    if !over_time {
        let text = format!("`document_starts` must be left out for {what} within a token, got a tensor");
        return Err(Error::Argument(text));
    }
    starts.expect_shape(batch)?;
    starts.expect_beside(beside)?;
    starts.expect_dtype(&[Dtype::Bool])
}

/// Fails unless `left` is what the tokens before `tokens` left: a tensor of this shape and dtype, or None. There is a shape
/// if `what` looks back in time; it then needs tokens.
pub(super) fn check_left(
    left: &Option<Tensor>,
    shape: Option<Vec<usize>>,
    dtype: Dtype,
    tokens: &Tensor,
    what: &str,
) -> Result<()> {
    match (left, &shape) {
        (None, _) => {}
        (Some(left), Some(shape)) => {
            left.expect_shape(shape)?;
            left.expect_beside(tokens)?;
            left.expect_dtype(&[dtype])?;
        }
        (Some(left), None) => {
            let text = format!("`{}` must be left out for {what} within a token, got a tensor", left.name);
            return Err(Error::Argument(text));
        }
    }
    if tokens.is_empty() && shape.is_some_and(|shape| !shape.contains(&0)) {
        return Err(tokens.wrong_shape("with at least one token"));
    }
    Ok(())
}

/// Fails unless `number` is positive and finite.
pub(super) fn positive(name: &str, number: f64) -> Result<()> {
    if number > 0.0 && number.is_finite() {
        return Ok(());
    }
    Err(Error::Argument(format!("`{name}` must be a positive finite number, got {}", number_text(number))))
}

/// Fails unless `number` is positive, finite and at least `least`.
pub(super) fn at_least(name: &str, number: f64, least: f64) -> Result<()> {
    positive(name, number)?;
    if number >= least {
        return Ok(());
    }
    Err(Error::Argument(format!("`{name}` must be at least {least:e}, got {}", number_text(number))))
}

/// Formats a number as Python does: `0.0`, `nan`, `-inf`.
fn number_text(number: f64) -> String {
    format!("{number:?}").to_lowercase()
}
