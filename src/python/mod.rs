//! The module `ddl._native`: the operators, the warm-up of a GPU, and the tests' emulator.

#[cfg(feature = "emulator")]
mod emulator;
mod warmup;

use pyo3::prelude::*;

use crate::torch::operators;

/// Native part of ddl-rs; use `ddl.functional`.
#[pymodule]
pub fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(operators::rewrite_read, module)?)?;
    module.add_function(wrap_pyfunction!(operators::rewrite_read_backward, module)?)?;
    module.add_function(wrap_pyfunction!(operators::expand_forward, module)?)?;
    module.add_function(wrap_pyfunction!(operators::expand_backward, module)?)?;
    module.add_function(wrap_pyfunction!(warmup::why_unavailable, module)?)?;
    module.add_function(wrap_pyfunction!(warmup::begin_warmup, module)?)?;
    module.add_function(wrap_pyfunction!(warmup::end_warmup, module)?)?;
    #[cfg(feature = "emulator")]
    {
        module.add_function(wrap_pyfunction!(emulator::emulate, module)?)?;
        module.add_function(wrap_pyfunction!(emulator::pretend_gpu, module)?)?;
    }
    Ok(())
}
