//! The interface to torch: its C `shims`, the tensors that a call owns (`memory`), a call's device ([`run`]).
//! For Python there are also the `dispatcher`, the [`source`] of arguments and the
//! [`stack`] that is one, the [`operators`], and how they are registered and refuse a call ([`dispatch`]).

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
pub mod source;
#[cfg(feature = "python")]
pub mod stack;
