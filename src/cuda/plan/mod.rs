//! How a kernel's work is divided on a device.
//!
//! A plan is chosen from data: `candidates` lists every way to divide the work that is worth comparing, `footprint`
//! has what each takes of a multiprocessor, `fits` says whether a device has that, and `cost` estimates the time of each.
//! The `planner` takes the cheapest; [`report`] writes the first of them down. Correctness never depends on these
//! choices; speed does. A kernel streams memory, so it wants many bytes in flight, and each of them once.
//!
//! All of it are pure functions of sizes, types, the device's `limits` and `overrides`.

mod candidates;
pub mod chunk;
mod cost;
mod fits;
mod footprint;
mod limits;
mod macros;
mod overrides;
#[expect(clippy::module_inception, reason = "`Plan` has the file of its name")]
mod plan;
mod planner;
mod report;
mod residency;

pub use limits::{Limits, RESERVED, most_of_a_cluster};
pub use overrides::{Choice, Overrides};
pub use plan::Plan;
pub use report::report;
pub use residency::Residency;

#[cfg(test)]
mod tests;
