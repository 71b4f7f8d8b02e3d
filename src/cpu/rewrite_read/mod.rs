//! `rewrite`, `read` and `rewrite_read`, one token row at a time.
//!
//! The backward has a file for each half, `backward_read` and `backward_rewrite`. `one_rewrite` has the
//! scalars of a rewrite, for both directions; `weights` holds the read's parameters and the sums of their gradients.

mod backward;
mod backward_read;
mod backward_rewrite;
mod forward;
mod one_rewrite;
mod weights;

pub use backward::backward;
pub use forward::forward;

/// The slot of a token in a ring of K rows.
#[inline(always)]
fn slot(taps: usize, token: usize) -> usize {
    if taps == 1 { 0 } else { token % taps }
}
