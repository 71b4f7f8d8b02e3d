//! The operators on NVIDIA GPUs: kernels/*.cu compiled at run time for the GPU at hand, and launched on
//! torch's stream in torch's context.
//!
//! [`kernel`] has a kernel's specialisation and its arguments, [`plan`] divides its work for a device,
//! [`compile`] makes device code of it and keeps that in a cache, and [`device`] loads and launches it.
//! [`rewrite_read`] and [`expand`] are the operators: they say which kernels run with which arguments.
//!
//! The driver and NVRTC are opened by a table of names ([`library`]) instead of a binding crate: it takes the
//! NVRTC that came with torch, where a bare name would find the system's, and says what is missing, where a
//! crate that binds all of CUDA panics.

mod auxiliary;
pub mod compile;
pub mod device;
pub mod expand;
pub mod kernel;
mod library;
pub mod plan;
pub mod rewrite_read;
