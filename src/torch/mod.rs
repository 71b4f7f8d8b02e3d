//! The interface to torch: its C [`shims`], the tensors that a call owns ([`memory`]), the [`stack`] of arguments, a
//! call's device ([`run`]), the [`operators`], and how they are registered and refuse ([`dispatch`]).

pub mod dispatch;
mod memory;
pub mod operators;
pub mod run;
mod shims;
pub mod stack;
