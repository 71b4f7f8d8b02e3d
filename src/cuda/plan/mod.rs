//! How a kernel's work is divided on a device.
//!
//! A plan is chosen from data: `candidates` lists every way to divide the work that is worth comparing, `footprint`
//! has what each takes of a multiprocessor, `fits` says whether a device has that, and `cost` orders those that fit.
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
mod planner;
mod report;

pub use limits::{Limits, RESERVED, most_of_a_cluster};
pub use macros::Plan;
pub use overrides::{Overrides, Residency};
pub use report::report;

#[cfg(test)]
mod tests;
