//! The operators on the CPU: per-token rows that stay in cache, a fixed partition of the tokens, and the widest
//! vectors of the machine.
//!
//! [`simd`] does the arithmetic on rows, [`buffer`] holds scratch memory, and `partition` and `parallel`
//! divide the tokens among threads. [`rewrite_read`] and [`expand`] are the operators.

pub mod buffer;
pub mod expand;
pub(crate) mod parallel;
pub(crate) mod partition;
pub mod rewrite_read;
pub mod simd;
mod whole;
