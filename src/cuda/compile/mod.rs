//! From a kernel's text to device code: compiled by NVRTC, kept in a cache on disk, and tried again by another plan
//! if it spills registers.

mod cache;
mod compiler;
mod log;
pub mod nvrtc;
mod retry;

pub use compiler::Built;
pub use retry::build;
