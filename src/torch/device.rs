//! Chooses a call's device: the state's GPU, the tests' emulated one, the one that only compiles ahead of time,
//! or else the CPU.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use super::borrow::borrow;
use crate::cuda::compile::nvrtc;
use crate::cuda::device::gpu::gpu;
use crate::cuda::device::{Backend, Call, ahead_of_time};
use crate::error::{Error, Result};
use crate::tensor::{Device, Tensor};

/// A call's resources on a GPU: torch's stream, and `allocate(like, bytes)` for memory on the device of `like`.
pub struct Resources<'py> {
    pub stream: u64,
    pub allocate: Option<Bound<'py, PyAny>>,
}

/// Runs `work` on the device of `tensor`. If that is the CPU, returns false, and the caller does the work.
///
/// `like` is the same tensor in Python. The GIL is released, and a panic becomes a `RuntimeError`.
pub fn on_device(
    py: Python<'_>,
    tensor: &Tensor,
    like: &Bound<'_, PyAny>,
    resources: Resources<'_>,
    work: impl FnOnce(&Call<'_>) -> Result<()> + Send,
) -> PyResult<bool> {
    let Some(device) = device_of(py, &tensor.device)? else { return Ok(false) };
    let Resources { stream, allocate } = resources;
    let (like, allocate) = (like.clone().unbind(), allocate.map(Bound::unbind));
    let compiling = ahead_of_time::is_active();
    let kept = Mutex::new(Vec::new()); // until the kernels are launched; torch orders later uses of the memory
    let done = py.detach(|| {
        let allocate = |bytes: usize| match compiling {
            true => Ok(0),
            false => allocate_through(&allocate, &like, tensor, bytes, &kept),
        };
        let call = Call { device: &*device, stream, allocate: &allocate };
        catch_unwind(AssertUnwindSafe(|| work(&call))).unwrap_or_else(|_| {
            Err(Error::Cuda("an assertion of ddl-rs failed; please report it with the lines above".into()))
        })
    });
    done?;
    Ok(true)
}

/// Returns the backend that launches the kernels for tensors on `tensors_on`; None is the CPU.
fn device_of(py: Python<'_>, tensors_on: &Device) -> PyResult<Option<Arc<dyn Backend>>> {
    if let Some(device) = ahead_of_time::current() {
        return Ok(Some(device));
    }
    #[cfg(feature = "emulator")]
    if *tensors_on == Device::Cpu
        && let Some(device) = crate::cuda::device::stand_in::current()
    {
        return Ok(Some(device));
    }
    let Device::Cuda(index) = *tensors_on else { return Ok(None) };
    tell_where_nvrtc_is(py)?;
    Ok(Some(py.detach(|| gpu(index))?))
}

/// Allocates memory through torch on the device of `tensor`, which is `like` in Python.
fn allocate_through(
    allocate: &Option<Py<PyAny>>,
    like: &Py<PyAny>,
    tensor: &Tensor,
    bytes: usize,
    kept: &Mutex<Vec<Py<PyAny>>>,
) -> Result<u64> {
    let Some(allocate) = allocate else {
        return Err(Error::Argument("`allocate` must be a function for a call that needs memory".into()));
    };
    Python::attach(|py| {
        let memory = allocate.bind(py).call1((like, bytes))?;
        let scratch = borrow("scratch", &memory)?;
        scratch.expect_beside(tensor)?;
        scratch.expect_bytes(bytes)?;
        kept.lock().expect("nothing panics while it is held").push(memory.unbind());
        PyResult::Ok(scratch.address())
    })
    .map_err(Error::Python)
}

/// Tells the search for NVRTC which directories lie beside torch: its site-packages and the environment's prefix.
pub fn tell_where_nvrtc_is(py: Python<'_>) -> PyResult<()> {
    static TOLD: PyOnceLock<()> = PyOnceLock::new();
    TOLD.get_or_try_init(py, || {
        let torch: PathBuf = py.import("torch")?.getattr("__file__")?.extract()?;
        let prefix: PathBuf = py.import("sys")?.getattr("prefix")?.extract()?;
        let packages = torch.ancestors().nth(2).map(Path::to_path_buf);
        nvrtc::look_in(packages.into_iter().chain([prefix]).collect());
        PyResult::Ok(())
    })?;
    Ok(())
}
