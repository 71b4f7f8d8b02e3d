//! Each operator's problem: its borrowed inputs, outputs, sizes and flags, checked once and used by every backend.

mod expand;
mod rewrite_read;
mod sizes;

pub use expand::Expand;
pub use rewrite_read::{Gradients, Incoming, Outputs, Read, Rewrite, RewriteRead};
pub use sizes::Sizes;
