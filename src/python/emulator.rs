//! For tests: CPU tensors that take the way of CUDA tensors, to the emulated device or to `cuda:0` of
//! whatever stands in for NVIDIA's driver.

use std::sync::{Arc, PoisonError, RwLock};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::{Device, Error, Launches, gpu, tell_where_nvrtc_is};
use crate::cuda::emulated::Emulated;
use crate::cuda::plan::{Forced, Limits, RESERVED};

static STAND_IN: RwLock<Option<Arc<dyn Launches>>> = RwLock::new(None);

/// What launches kernels for CPU tensors, if anything was asked to.
pub fn stand_in(place: &Device) -> PyResult<Option<Arc<dyn Launches>>> {
    let stand_in = STAND_IN.read().unwrap_or_else(PoisonError::into_inner);
    Ok(stand_in.clone().filter(|_| *place == Device::Cpu))
}

fn replace(device: Option<Arc<dyn Launches>>) {
    *STAND_IN.write().unwrap_or_else(PoisonError::into_inner) = device;
}

/// Runs the CUDA kernels for CPU tensors, built by `build(source, defines)`, which returns the path of a
/// shared object; None ends that. `plan` forces what a plan would choose, by the names of the macros and
/// `CHUNK`.
#[pyfunction]
#[pyo3(signature = (build, *, multiprocessors=2, shared_per_block=65_536, cluster=1, plan=None))]
fn emulate(
    build: Option<Py<PyAny>>,
    multiprocessors: usize,
    shared_per_block: usize,
    cluster: usize,
    plan: Option<&Bound<'_, PyDict>>,
) -> PyResult<()> {
    let forced = plan.map(forced).transpose()?.unwrap_or_default();
    let limits = Limits {
        multiprocessors,
        shared_per_block,
        shared_per_multiprocessor: shared_per_block + RESERVED,
        registers_per_multiprocessor: 65_536,
        threads_per_multiprocessor: 2048,
        cluster,
    };
    replace(build.map(|build| -> Arc<dyn Launches> {
        let build = move |source: &str, defines: &[String]| {
            let path = Python::attach(|py| -> PyResult<String> {
                Ok(build.bind(py).call1((source, defines))?.str()?.to_string())
            });
            path.map_err(Error::Python)
        };
        Arc::new(Emulated { limits, forced, build: Box::new(build), table: Default::default() })
    }));
    Ok(())
}

/// Takes CPU tensors for tensors on `cuda:index`, to test the driver's side with a driver that is none;
/// None ends that.
#[pyfunction]
#[pyo3(signature = (index))]
fn pretend_gpu(py: Python<'_>, index: Option<usize>) -> PyResult<()> {
    tell_where_nvrtc_is(py)?;
    let device = py.detach(|| index.map(gpu).transpose())?;
    replace(device.map(|device| -> Arc<dyn Launches> { device }));
    Ok(())
}

fn forced(plan: &Bound<'_, PyDict>) -> PyResult<Forced> {
    let words: Vec<String> = plan.iter().map(|(name, value)| format!("{name}={value}")).collect();
    Forced::parse(&words.join(" ")).map_err(|fault| PyValueError::new_err(format!("`plan` {fault}")))
}

pub fn add_functions(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(emulate, module)?)?;
    module.add_function(wrap_pyfunction!(pretend_gpu, module)?)?;
    Ok(())
}
