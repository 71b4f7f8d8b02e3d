//! The interface to torch: `operators` that Python calls, their `arguments`, the borrowing of tensors, and the
//! choice of a device.

mod arguments;
mod borrow;
pub mod device;
pub mod operators;
