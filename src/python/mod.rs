//! The module `ddl._native`: registration of the operators, the same on NumPy arrays, the warm-up of a GPU, and the
//! tests' emulator.

mod arguments;
mod arrays;
#[cfg(feature = "emulator")]
mod emulator;
mod registration;
mod warmup;

use pyo3::prelude::*;

use crate::cuda::kernel::arguments::MOST_LINKS;
use crate::delta_rule::CHUNK_STEPS;
use crate::problem::limits::{LEAST_EPS_K, LEAST_NORM_EPS, MOST_REWRITES};

/// Native part of ddl-rs; use `ddl.functional`.
// Safe without Python's lock: docs/decisions/free-threading.md.
#[pymodule(gil_used = false)]
pub fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("LEAST_EPS_K", LEAST_EPS_K)?;
    module.add("LEAST_NORM_EPS", LEAST_NORM_EPS)?;
    module.add("MOST_REWRITES", MOST_REWRITES)?;
    module.add("MOST_LINKS", MOST_LINKS)?;
    module.add("CHUNK_STEPS", CHUNK_STEPS)?;
    module.add_function(wrap_pyfunction!(registration::register, module)?)?;
    module.add_function(wrap_pyfunction!(registration::simd_level, module)?)?;
    module.add_function(wrap_pyfunction!(registration::take_refusal, module)?)?;
    module.add_function(wrap_pyfunction!(registration::check, module)?)?;
    module.add_function(wrap_pyfunction!(warmup::search_nvrtc_in, module)?)?;
    module.add_function(wrap_pyfunction!(warmup::why_unavailable, module)?)?;
    module.add_function(wrap_pyfunction!(arrays::on_arrays, module)?)?;
    module.add_class::<warmup::Warmup>()?;
    #[cfg(feature = "emulator")]
    {
        module.add_function(wrap_pyfunction!(emulator::emulate, module)?)?;
        module.add_function(wrap_pyfunction!(emulator::pretend_gpu, module)?)?;
        module.add_function(wrap_pyfunction!(emulator::argument_layouts, module)?)?;
    }
    Ok(())
}
