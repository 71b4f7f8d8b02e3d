//! How a kernel's work is divided on a device.
//!
//! A plan is chosen from data. `candidates` lists every way to divide the work that is worth comparing; `footprint` has
//! the registers, the shared memory and the bytes that each takes, and why a device does not have them; and `cost` has
//! the estimated time of each. The `planner` takes a plan with a `tile` of tokens or one that was `timed` to be the fastest,
//! else the cheapest that fits; [`report`] writes the first of them down. An expansion has so few choices that its plan needs no estimates (`expand`).
//! Correctness never depends on these choices; speed does. A kernel streams memory, so it wants many bytes in flight, and
//! each of them once. All functions are pure: of sizes, types, the device's `limits` and `overrides`.

mod candidates;
mod cost;
mod expand;
mod footprint;
mod limits;
mod overrides;
#[expect(clippy::module_inception, reason = "`Plan` has the file of its name")]
mod plan;
mod planner;
mod tile;
mod timed;

pub use footprint::RESERVED;
pub use limits::{Limits, most_of_a_cluster};
pub use overrides::Overrides;
pub use plan::{Plan, Residency};
pub use planner::report;

#[cfg(test)]
mod tests;
