//! Devices that kernels are loaded and launched on.
//!
//! [`Backend`] is the interface to one. There are three: [`gpu`] (through its `driver`), the tests' `emulated` one,
//! and [`ahead_of_time`], which only compiles. [`Call`] launches kernels on any of them.

#[cfg(feature = "python")]
pub mod ahead_of_time;
mod backend;
mod driver;
#[cfg(feature = "emulator")]
pub mod emulated;
pub mod gpu;
mod launch;
#[cfg(feature = "emulator")]
pub mod stand_in;
mod table;

pub use backend::Backend;
pub use launch::{Call, Memory};
pub use table::Loaded;
