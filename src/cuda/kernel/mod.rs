//! A kernel as the host sees it: the [`Specialisation`] that it is compiled for, and its [`arguments`].

pub mod arguments;
mod specialisation;

#[cfg(test)]
pub use specialisation::Types;
pub use specialisation::{Compress, Kernel, ParameterSums, Parts, Specialisation};
