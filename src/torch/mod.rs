//! The interface to torch: its C `shims`, the tensors that a call owns (`memory`), the [`source`] of arguments and the
//! [`stack`] that is one, a call's device ([`run`]), checked problems and where they [`execute`], the [`operators`], and how
//! they are registered and refuse ([`dispatch`]).

pub mod dispatch;
pub mod execute;
pub(crate) mod memory;
pub mod operators;
pub mod run;
pub(crate) mod shims;
pub mod source;
pub mod stack;
