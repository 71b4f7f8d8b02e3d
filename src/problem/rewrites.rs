//! How many rewrites follow each other between two reads, and where their numbers lie.

use super::limits::MOST_REWRITES;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// The axis of n rewrites in the tensors that have a part for each: before their last axes, and absent for a single
/// rewrite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rewrites(Option<usize>);

impl Rewrites {
    /// The axis that `tensor` has before `last` and after `batch`. One without it, or without that shape, has none.
    pub fn of(tensor: &Tensor, batch: &[usize], last: &[usize]) -> Result<Rewrites> {
        let (shape, at) = (&tensor.shape, batch.len());
        let fits = shape.len() == at + 1 + last.len() && shape.starts_with(batch) && shape.ends_with(last);
        match fits.then(|| shape[at]) {
            Some(count) if !(1..=MOST_REWRITES).contains(&count) => Err(Error::Argument(format!(
                "`{}` must have 1 to {MOST_REWRITES} rewrites, got {count}",
                tensor.name
            ))),
            count => Ok(Rewrites(count)),
        }
    }

    /// n
    pub fn count(self) -> usize {
        self.0.unwrap_or(1)
    }

    /// Returns the shape of one rewrite's part, after the axis.
    pub fn and(self, last: &[usize]) -> Vec<usize> {
        self.0.iter().chain(last).copied().collect()
    }

    /// Returns the numbers that a forward saves of a token.
    pub fn stats(self, m: usize) -> usize {
        stats_before(self.count(), m)
    }
}

/// Where rewrite `index` has its numbers among a token's statistics: r, p (m), and k·kᵢ with each earlier kᵢ.
pub fn stats_before(index: usize, m: usize) -> usize {
    index * (1 + m) + index * index.saturating_sub(1) / 2
}
