//! A kernel as the host sees it: the [`Specialisation`] that it is compiled for, and the [`arguments`] that it
//! takes.

pub mod arguments;
mod specialisation;

pub use specialisation::{Compress, Kernel, Parts, Specialisation, Types};
