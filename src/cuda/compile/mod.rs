//! Compiles a kernel's source by NVRTC, caches the device code on disk, and tries another plan if registers are
//! spilled.

mod cache;
mod compiler;
mod log;
pub mod nvrtc;
mod retry;

#[cfg(feature = "python")]
pub use compiler::Built;
pub use retry::build;
