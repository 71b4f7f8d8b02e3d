//! The operators on the CPU: per-token rows that stay in cache, a partition of the tokens on which no result depends, and
//! the widest vectors of the machine.
//!
//! [`state`] does the arithmetic on a state's rows and [`simd`] that on others, [`buffer`] holds scratch memory, and
//! `partition` and `parallel` divide the tokens among threads. [`rewrite_read`] and [`expand`] are the operators.

pub mod buffer;
pub mod expand;
pub(crate) mod parallel;
pub(crate) mod partition;
pub mod rewrite_read;
pub mod simd;
pub mod state;
mod whole;
