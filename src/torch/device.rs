//! Where a call runs: on the state's GPU, on the tests' emulated one, nowhere while kernels are only
//! compiled ahead, or else on the CPU.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

#[cfg(not(feature = "emulator"))]
mod emulator {
    use super::*;

    pub fn stand_in(_: &Device) -> PyResult<Option<Arc<dyn Launches>>> {
        Ok(None)
    }
}
#[cfg(feature = "emulator")]
mod emulator;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use super::{Any, Resources};
use crate::cuda::gpu::gpu;
use crate::cuda::launch::{Call, Device as Launches};
use crate::cuda::notes::{self, Notes};
use crate::cuda::nvrtc;
use crate::error::{Error, Result};
use crate::tensor::{Device, Tensor};

/// Runs `work` where `tensor` lives; returns false where that is the CPU, which is the caller's.
///
/// `like` is the same tensor in Python. The GIL is released, and a panic becomes a `RuntimeError`.
pub(super) fn on_device(
    py: Python<'_>,
    tensor: &Tensor,
    like: &Any<'_>,
    resources: Resources<'_>,
    work: impl FnOnce(&Call<'_>) -> Result<()> + Send,
) -> PyResult<bool> {
    let Some(device) = device_of(py, &tensor.device)? else { return Ok(false) };
    let Resources { stream, allocate } = resources;
    let (like, allocate) = (like.clone().unbind(), allocate.map(Bound::unbind));
    let noting = notes::is_noting();
    let kept = Mutex::new(Vec::new()); // until the kernels are launched: torch orders what follows
    let done = py.detach(|| {
        let allocate = |bytes: usize| match noting {
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

/// What launches the kernels for tensors that live somewhere; None is the CPU.
fn device_of(py: Python<'_>, place: &Device) -> PyResult<Option<Arc<dyn Launches>>> {
    if let Some(notes) = notes::current() {
        return Ok(Some(notes));
    }
    if let Some(device) = emulator::stand_in(place)? {
        return Ok(Some(device));
    }
    let Device::Cuda(index) = *place else { return Ok(None) };
    tell_where_nvrtc_is(py)?;
    Ok(Some(py.detach(|| gpu(index))?))
}

/// Memory beside `tensor`, which is `like` in Python, from torch.
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
        let scratch = Tensor::borrow("scratch", &memory)?;
        scratch.expect_beside(tensor)?;
        scratch.expect_bytes(bytes)?;
        kept.lock().expect("nothing panics while it is held").push(memory.unbind());
        PyResult::Ok(scratch.address())
    })
    .map_err(Error::Python)
}

/// NVRTC is looked for beside torch: in its site-packages, or in the environment that both live in.
fn tell_where_nvrtc_is(py: Python<'_>) -> PyResult<()> {
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

/// Why `cuda:index` cannot be used, None if it can.
#[pyfunction]
fn why_unavailable(py: Python<'_>, index: usize) -> PyResult<Option<String>> {
    tell_where_nvrtc_is(py)?;
    Ok(py.detach(|| gpu(index).err().map(|reason| reason.to_string())))
}

/// From now on this thread's calls only note which kernels they need: for an architecture like `sm_90`, or
/// for `cuda:index`.
#[pyfunction]
#[pyo3(signature = (architecture, index))]
fn note_kernels(py: Python<'_>, architecture: Option<String>, index: usize) -> PyResult<()> {
    tell_where_nvrtc_is(py)?;
    let noted = py.detach(|| match architecture {
        Some(architecture) => Notes::new(&architecture),
        None => Ok(Notes::for_gpu(gpu(index)?)),
    })?;
    notes::replace(Some(Arc::new(noted)));
    Ok(())
}

/// Ends `note_kernels`, and compiles what was noted if asked to. Returns for each kernel (name, architecture,
/// macros, registers, bytes spilled, bytes of shared memory, seconds, whether it was there already).
#[pyfunction]
#[allow(clippy::type_complexity)]
fn end_noting(
    py: Python<'_>,
    compile: bool,
) -> PyResult<Vec<(&'static str, String, String, u32, u32, usize, f64, bool)>> {
    let Some(noted) = notes::replace(None).filter(|_| compile) else { return Ok(Vec::new()) };
    let built = py.detach(|| noted.compile())?;
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

pub(super) fn add_functions(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(why_unavailable, module)?)?;
    module.add_function(wrap_pyfunction!(note_kernels, module)?)?;
    module.add_function(wrap_pyfunction!(end_noting, module)?)?;
    #[cfg(feature = "emulator")]
    emulator::add_functions(module)?;
    Ok(())
}
