//! The interface to torch: its C `shims`, the tensors that a call owns (`memory`), the [`stack`] of arguments, a
//! call's device ([`run`]), the [`operators`], and how they are registered and refuse ([`dispatch`]).

pub mod dispatch;
pub(crate) mod memory;
pub mod operators;
pub mod run;
pub(crate) mod shims;
pub mod stack;
