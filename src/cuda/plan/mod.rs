//! How a kernel's work is divided on a device.
//!
//! The `planner` takes a plan with a `tile` of tokens, or the plan that was the fastest of those that were timed (table.txt).
//! Where neither is, it takes the first of the `candidates`, in the order of one rule. `footprint` has what a plan takes,
//! and whether a device has it.
//! Correctness never depends on these choices; speed does. A kernel streams memory, so it wants many bytes in flight, and
//! each of them once. All functions are pure: of sizes, types, the device's `limits` and `overrides`.

mod candidates;
mod footprint;
mod limits;
mod overrides;
#[expect(clippy::module_inception, reason = "`Plan` has the file of its name")]
mod plan;
mod planner;
#[cfg(test)]
pub mod samples;
mod tile;

pub use footprint::RESERVED;
pub use limits::{Limits, most_of_a_cluster};
pub use overrides::Overrides;
pub use plan::{Plan, Residency};

#[cfg(test)]
mod tests;
