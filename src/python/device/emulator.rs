//! For tests: CPU tensors that take the way of CUDA tensors, to the emulated device or to `cuda:0` of
//! whatever stands in for NVIDIA's driver.

use std::sync::{Arc, PoisonError, RwLock};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::{Device, Error, Launches, gpu, tell_where_nvrtc_is};
use crate::cuda::emulated::Emulated;
use crate::cuda::plan::{Forced, Limits, Place, RESERVED};

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
    let mut forced = Forced::default();
    for (name, value) in plan {
        let value: usize = value.extract()?;
        match name.extract::<String>()?.as_str() {
            "CLUSTER" => forced.cluster = Some(value.max(1)),
            "THREADS" => forced.threads = Some(value),
            "FEATURES" => forced.features = Some(value),
            "HOLD" => forced.hold = Some(value != 0),
            "WINDOW" => forced.window = Some(place(value)?).filter(|place| *place != Place::Apart),
            "SUMS" => forced.sums = Some(place(value)?),
            "SUMS_APART" => forced.sums_apart = Some(place(value)?).filter(|place| *place != Place::Apart),
            "STAGES" if value <= 2 => forced.stages = Some(value),
            "STAGES" => return Err(PyValueError::new_err(format!("STAGES must be 0, 1 or 2, got {value}"))),
            "BLOCKS" => forced.blocks = Some(value),
            "CHUNK" => forced.chunk = Some(value),
            other => return Err(PyValueError::new_err(format!("`plan` knows no {other}"))),
        }
    }
    Ok(forced)
}

fn place(number: usize) -> PyResult<Place> {
    match number {
        0 => Ok(Place::Registers),
        1 => Ok(Place::Shared),
        2 => Ok(Place::Global),
        3 => Ok(Place::Apart),
        _ => Err(PyValueError::new_err(format!("a place must be 0, 1, 2 or 3, got {number}"))),
    }
}

pub fn add_functions(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(emulate, module)?)?;
    module.add_function(wrap_pyfunction!(pretend_gpu, module)?)?;
    Ok(())
}
