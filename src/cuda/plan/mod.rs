//! How a kernel's work is divided on a device.
//!
//! The `planner` takes the plan of a table that was `measured` to be the fastest. Where nothing was measured it takes the
//! first of the `candidates`, in the order of one rule; that of an expansion is in `expand`. `footprint` has what a plan
//! takes, and why a device does not have it. Correctness never depends on these choices; speed does. A kernel streams
//! memory, so it wants many bytes in flight, and each of them once. All functions are pure: of sizes, types, the device's
//! `limits` and `overrides`.

mod candidates;
mod expand;
mod footprint;
mod limits;
mod measured;
mod overrides;
#[expect(clippy::module_inception, reason = "`Plan` has the file of its name")]
mod plan;
mod planner;

pub use footprint::RESERVED;
pub use limits::{Limits, most_of_a_cluster};
pub use overrides::Overrides;
pub use plan::{Plan, Residency};

#[cfg(test)]
mod tests;
