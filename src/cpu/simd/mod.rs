//! Arithmetic on rows, with the widest vectors of the machine.
//!
//! [`dispatch`] chooses the instruction set, [`convert`] has the number types, `lanes` their vectors,
//! [`channels`] loads and stores rows, and [`row`] computes with them.

pub mod channels;
pub mod convert;
pub mod dispatch;
mod lanes;
pub mod row;
