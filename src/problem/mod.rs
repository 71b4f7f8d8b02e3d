//! Each operator's problem: its inputs, outputs, sizes and flags, checked once and used by every backend.

mod allocate;
#[cfg(feature = "python")]
mod delta_rule;
mod expand;
pub mod limits;
mod outputs;
mod records;
mod rewrite_read;
mod rewrites;
mod sizes;

pub use allocate::Allocate;
#[cfg(feature = "python")]
pub use allocate::{joined_len, parts_of};
#[cfg(feature = "python")]
pub use delta_rule::{DeltaRule, Given, OverTime, SavedOverTime};
pub use expand::Expand;
pub use limits::MOST_REWRITES;
pub use records::{
    Erase, ExpandGradients, Expanded, Gradients, Incoming, Link, Outputs, ParameterSums, Read, Saved, Write,
};
pub use rewrite_read::RewriteRead;
pub use rewrites::stats_before;
pub use sizes::Sizes;
