//! Each operator's problem: its inputs, outputs, sizes and flags, checked once and used by every backend.

mod allocate;
mod chain;
mod expand;
pub mod limits;
mod outputs;
mod rewrite_read;
mod rewrites;
mod sizes;

pub use allocate::Allocate;
pub use expand::Expand;
pub use outputs::{Gradients, Incoming, Outputs};
pub use rewrite_read::{Link, Read, Rewrite, RewriteRead};
pub use rewrites::stats_before;
pub use sizes::Sizes;
