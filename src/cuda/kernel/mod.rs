//! A kernel as the host sees it: the [`Specialisation`] that it is compiled for, and its [`arguments`].

pub mod arguments;
mod expand;
mod rewrite_read;

pub use crate::problem::ParameterSums;
pub use expand::Expand;
pub use rewrite_read::{Compress, Kernel, RewriteRead};
#[cfg(test)]
pub use rewrite_read::{Parts, Types};

/// A kernel and all properties of a call that it is compiled for. The number of tokens, pointers and ε are
/// arguments. Threads, memory and registers follow from this and the device, in [`crate::cuda::plan`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Specialisation {
    RewriteRead(RewriteRead),
    Expand(Expand),
}

impl Specialisation {
    pub fn kernel(&self) -> Kernel {
        match self {
            Specialisation::RewriteRead(s) => s.kernel,
            Specialisation::Expand(s) => s.kernel,
        }
    }

    /// Returns the macros that kernels/*.cu expect, except the plan's.
    pub fn defines(&self) -> Vec<(&'static str, String)> {
        match self {
            Specialisation::RewriteRead(s) => s.defines(),
            Specialisation::Expand(s) => s.defines(),
        }
    }
}

impl From<&RewriteRead> for Specialisation {
    fn from(s: &RewriteRead) -> Specialisation {
        Specialisation::RewriteRead(*s)
    }
}

impl From<&Expand> for Specialisation {
    fn from(s: &Expand) -> Specialisation {
        Specialisation::Expand(*s)
    }
}
