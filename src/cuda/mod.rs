//! The operators on NVIDIA GPUs: kernels/*.cu compiled at run time for the GPU at hand, and launched on
//! torch's stream in torch's context.
//!
//! [`boundary`] and [`expand`] say which kernels run with which arguments, [`specialisation`] what a kernel
//! is compiled for, [`plan`] how it is cut for a device, [`compiler`] makes device code of it with [`nvrtc`]
//! and keeps that in a [`cache`]. [`launch`] is the interface to a device, of which there are three:
//! [`gpu`] (through the [`driver`]), the tests' `emulated` one, and [`notes`], which only compile.
//!
//! The driver is declared by cudarc ([`driver`] says how it is called). NVRTC is not: cudarc's loader takes the
//! first `libnvrtc.so` that the system has, and cannot be told to take the one that came with torch. So
//! [`nvrtc`] has a loader of its own. Both open their libraries through [`library`], and the emulator does, too.

pub mod arguments;
pub mod boundary;
mod cache;
mod compiler;
mod driver;
#[cfg(feature = "emulator")]
pub mod emulated;
pub mod expand;
pub mod gpu;
pub mod launch;
mod library;
pub mod notes;
pub mod nvrtc;
pub mod plan;
pub mod specialisation;

/// A line on stderr, or nothing where nobody reads that any more (`eprintln!` would panic).
fn say(line: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "ddl: {line}");
}
