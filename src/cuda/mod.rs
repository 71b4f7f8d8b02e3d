//! The operators on NVIDIA GPUs: kernels/*.cu compiled at run time for the GPU at hand, and launched on
//! torch's stream in torch's context.
//!
//! [`kernel`] has a kernel's specialisation and its arguments, [`plan`] divides its work for a device,
//! [`compile`] compiles it and caches the device code, and [`device`] loads and launches it.
//! [`rewrite_read`] and [`expand`] are the operators: they choose the kernels and their arguments.
//!
//! cudarc declares the driver's functions (`device::driver` says how they are called). NVRTC's are declared in
//! [`compile::nvrtc`], because cudarc's loader opens the first `libnvrtc.so` on the system and cannot be told to
//! open the one that came with torch. Both, and the emulator, open their libraries through `crate::library`.

mod auxiliary;
pub mod compile;
pub mod device;
pub mod expand;
pub mod kernel;
pub mod plan;
pub mod rewrite_read;
