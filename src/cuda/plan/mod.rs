//! How a kernel is planned for a device: threads, the numbers that a thread holds, where sums live, tokens per
//! block.
//!
//! Pure functions of sizes, types and the device's limits. Correctness never depends on the choices made here;
//! speed does. A kernel streams memory, so it wants many bytes in flight: packets of 16 bytes, several for each
//! thread. Numbers that a token needs twice are kept in registers, and none of these are spilled.

mod cluster;
pub mod expand;
mod footprint;
mod limits;
mod overrides;
mod parameters;
mod planner;
pub mod rewrite_read;

pub use footprint::Plan;
pub use limits::{Limits, RESERVED, most_of_a_cluster};
pub use overrides::{Overrides, Residency};

#[cfg(test)]
mod tests;
