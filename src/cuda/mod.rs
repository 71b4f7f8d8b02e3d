//! The operators on NVIDIA GPUs: kernels/*.cu compiled at run time for the GPU at hand, and launched on
//! torch's stream in torch's context.
//!
//! [`kernel`] has a kernel's specialisation and its arguments, [`plan`] divides its work for a device,
//! [`compile`] makes device code of it and keeps that in a cache, and [`device`] loads and launches it.
//! [`rewrite_read`] and [`expand`] are the operators: they say which kernels run with which arguments.
//!
//! The driver is declared by cudarc (`device::driver` says how it is called). NVRTC is not: cudarc's loader
//! takes the first `libnvrtc.so` that the system has, and cannot be told to take the one that came with torch.
//! So [`compile::nvrtc`] has a loader of its own. Both open their libraries through [`library`], and the
//! emulator does, too.

mod auxiliary;
pub mod compile;
pub mod device;
pub mod expand;
pub mod kernel;
mod library;
pub mod plan;
pub mod rewrite_read;
