//! The operators on NVIDIA GPUs: kernels/*.cu compiled at run time for the GPU at hand, and launched on
//! torch's stream in torch's context.
//!
//! [`boundary`] and [`expand`] say which kernels run with which arguments, [`specialisation`] what a kernel
//! is compiled for, [`plan`] how it is cut for a device, [`compiler`] makes device code of it with [`nvrtc`]
//! and keeps that in a [`cache`]. [`launch`] is the interface to a device, of which there are three:
//! [`gpu`] (through its `driver`), the tests' `emulated` one, and [`notes`], which only compile.
//!
//! The driver and NVRTC are opened by a table of names ([`library`]) instead of a binding crate: it takes the
//! NVRTC that came with torch, where a bare name would find the system's, and says what is missing, where a
//! crate that binds all of CUDA panics.

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
