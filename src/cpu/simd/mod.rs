//! Arithmetic on rows, with the widest vectors of the machine.
//!
//! [`dispatch`] chooses the instruction set, [`convert`] has the number types, `halves` those of 16 bits and `lanes`
//! vectors of the others, [`interleaved`] what rows of several channels need of them, [`features`] loads and stores rows of one number per
//! feature, and [`row`] computes with them.

pub mod convert;
pub mod dispatch;
pub mod features;
pub mod halves;
pub mod interleaved;
pub mod lanes;
pub mod row;
#[cfg(test)]
mod tests;
