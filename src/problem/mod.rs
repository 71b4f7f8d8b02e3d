//! Each operator as a problem: borrowed inputs, outputs, sizes and flags. They are checked once, here, and used
//! by every backend.

mod expand;
mod rewrite_read;
mod sizes;

pub use expand::Expand;
pub use rewrite_read::{Gradients, Incoming, Outputs, Read, Rewrite, RewriteRead};
pub use sizes::Sizes;
