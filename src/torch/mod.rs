//! The interface to torch: its C `shims`, the tensors that a call owns (`memory`), a call's device ([`run`]) and the
//! operators' [`calls`]. For Python there are also the `dispatcher`, its [`stack`] of arguments, the [`operators`] on it,
//! and how they are registered and refuse ([`dispatch`]).

pub mod calls;
#[cfg(feature = "python")]
pub mod dispatch;
#[cfg(feature = "python")]
mod dispatcher;
pub(crate) mod memory;
#[cfg(feature = "python")]
pub mod operators;
pub mod run;
pub(crate) mod shims;
#[cfg(feature = "python")]
pub mod stack;
