//! For tests: treats CPU tensors as CUDA tensors, on the emulated device or on `cuda:0` of a stand-in for
//! NVIDIA's driver.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::cuda::device::emulated::Emulated;
use crate::cuda::device::gpu::gpu;
use crate::cuda::device::{Backend, stand_in};
use crate::cuda::kernel::arguments::{LAYOUTS, Layout};
use crate::cuda::plan::{Limits, Overrides, RESERVED};
use crate::error::Error;

/// Runs the CUDA kernels for CPU tensors; `build=None` ends that. `build(source, defines)` compiles a kernel and
/// returns the path of a shared object; if it returns None, the launch panics, for a test. `plan` overrides the planner's choices, by the names of the macros and
/// `CHUNK`.
#[pyfunction]
#[pyo3(signature = (build, *, multiprocessors=2, shared_per_block=65_536, cluster=1, plan=None))]
pub fn emulate(
    build: Option<Py<PyAny>>,
    multiprocessors: usize,
    shared_per_block: usize,
    cluster: usize,
    plan: Option<&Bound<'_, PyDict>>,
) -> PyResult<()> {
    let overrides = plan.map(parse).transpose()?.unwrap_or_default();
    let limits = Limits {
        multiprocessors,
        shared_per_block,
        shared_per_multiprocessor: shared_per_block + RESERVED,
        registers_per_multiprocessor: 65_536,
        threads_per_multiprocessor: 2048,
        blocks_per_multiprocessor: 32,
        cluster: cluster.max(overrides.get("CLUSTER").unwrap_or(1)),
    };
    stand_in::replace(build.map(|build| -> (Arc<dyn Backend>, u64) {
        let build = move |source: &str, defines: &[String]| {
            let path = Python::attach(|py| -> PyResult<Option<String>> {
                build.bind(py).call1((source, defines))?.extract()
            });
            Ok(path.map_err(Error::Python)?.expect("a test asks for a panic by None"))
        };
        (Arc::new(Emulated { limits, overrides, build: Box::new(build), table: Default::default() }), 0)
    }));
    Ok(())
}

/// Treats CPU tensors as tensors on `cuda:index` and on a stream, to test calls of the driver with a stand-in; None
/// ends that.
#[pyfunction]
#[pyo3(signature = (index, stream=0))]
pub fn pretend_gpu(py: Python<'_>, index: Option<usize>, stream: u64) -> PyResult<()> {
    let device = py.detach(|| index.map(gpu).transpose())?;
    stand_in::replace(device.map(|device| -> (Arc<dyn Backend>, u64) { (device, stream) }));
    Ok(())
}

/// Returns the kernels' argument structures as the host lays them out: name, size, and (name, offset, size) of each field.
#[pyfunction]
pub fn argument_layouts() -> [Layout; LAYOUTS.len()] {
    LAYOUTS
}

fn parse(plan: &Bound<'_, PyDict>) -> PyResult<Overrides> {
    let words: Vec<String> = plan.iter().map(|(name, value)| format!("{name}={value}")).collect();
    Overrides::parse(&words.join(" ")).map_err(|fault| PyValueError::new_err(format!("`plan` {fault}")))
}
