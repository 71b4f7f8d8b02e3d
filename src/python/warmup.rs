//! Checks that a GPU can be used, and compiles for it ahead of time.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::cuda::device::ahead_of_time::{self, AheadOfTime};
use crate::cuda::device::gpu::gpu;
use crate::torch::device::tell_where_nvrtc_is;

/// Returns the reason for which `cuda:index` cannot be used, None if it can.
#[pyfunction]
pub fn why_unavailable(py: Python<'_>, index: usize) -> PyResult<Option<String>> {
    tell_where_nvrtc_is(py)?;
    Ok(py.detach(|| gpu(index).err().map(|reason| reason.to_string())))
}

/// Makes this thread's calls only list the kernels that they need: for an architecture like `sm_90`, or for
/// `cuda:index`.
#[pyfunction]
#[pyo3(signature = (architecture, index))]
pub fn begin_warmup(py: Python<'_>, architecture: Option<String>, index: usize) -> PyResult<()> {
    tell_where_nvrtc_is(py)?;
    let warmup = py.detach(|| match architecture {
        Some(architecture) => AheadOfTime::new(&architecture),
        None => Ok(AheadOfTime::for_gpu(gpu(index)?)),
    })?;
    ahead_of_time::replace(Some(Arc::new(warmup)));
    Ok(())
}

/// Ends `begin_warmup` and, if `compile`, compiles the listed kernels. Returns for each kernel (name, architecture,
/// macros, registers, bytes spilled, bytes of shared memory, seconds, true if it was in the cache).
#[pyfunction]
#[allow(clippy::type_complexity)]
pub fn end_warmup(
    py: Python<'_>,
    compile: bool,
) -> PyResult<Vec<(&'static str, String, String, u32, u32, usize, f64, bool)>> {
    let Some(warmup) = ahead_of_time::replace(None).filter(|_| compile) else { return Ok(Vec::new()) };
    let built = py.detach(|| warmup.compile())?;
    let rows = built.iter().map(|kernel| {
        let (binary, shared) = (&kernel.binary, kernel.binary.shared as usize + kernel.plan.shared);
        (
            kernel.specialisation.kernel.name(),
            kernel.target.to_string(),
            kernel.macros(),
            binary.registers,
            binary.spilled,
            shared,
            kernel.seconds,
            kernel.cached,
        )
    });
    Ok(rows.collect())
}
