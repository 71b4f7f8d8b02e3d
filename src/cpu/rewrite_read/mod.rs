//! `rewrite`, `read` and `rewrite_read`, one token row at a time.
//!
//! The backward has a file for each half, `backward_read` and `backward_rewrite`. `coefficients` has the
//! scalars of a rewrite, for both directions; `weights` holds the read's parameters and the sums of their gradients.

mod backward;
mod backward_read;
mod backward_rewrite;
mod coefficients;
mod forward;
mod weights;

pub use backward::backward;
pub use forward::forward;
