//! The errors of a call, as whole sentences that name the argument, the expected value and the one received.

#[cfg(feature = "python")]
use pyo3::{
    PyErr,
    exceptions::{PyMemoryError, PyRuntimeError, PyTypeError, PyValueError},
};

/// The reason for which an operator failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A tensor of the wrong size: a `ValueError`.
    #[error("`{name}` must have shape {expected}, got {got}")]
    Shape { name: &'static str, expected: String, got: String },

    /// A tensor of the wrong element type: a `TypeError`.
    #[error("`{name}` must have dtype {expected}, got {got}")]
    Dtype { name: &'static str, expected: String, got: String },

    /// A tensor on the wrong device: a `ValueError`.
    #[error("`{name}` must be on {expected}, got a tensor on {got}")]
    Device { name: &'static str, expected: String, got: String },

    /// A tensor without memory, as fake and meta tensors are: a `TypeError`.
    #[error("`{name}` must be {expected}, got {got}")]
    Kind { name: &'static str, expected: &'static str, got: String },

    /// An invalid number or combination of arguments: a `ValueError`.
    #[error("{0}")]
    Argument(String),

    /// Scratch memory that could not be allocated: a `MemoryError`.
    #[error(
        "`{operator}` asked for {} of scratch memory, which could not be had; \
         take fewer taps, value channels or features, or free memory",
        memory_text(*.bytes)
    )]
    Memory { operator: &'static str, bytes: usize },

    /// Memory that torch could not allocate. Python asks torch again, for its own exception.
    #[error("{} on {device} could not be allocated", memory_text(*.bytes))]
    Allocation { bytes: usize, device: String },

    /// A failed assertion, or a call that torch failed: a `RuntimeError`.
    #[error("{0}")]
    Internal(String),

    /// Not a failure: the arguments are right, and nothing was to be computed.
    #[cfg(feature = "python")]
    #[error("the arguments are right")]
    Checked,

    /// A failure of a GPU, its driver or its compiler: a `RuntimeError`.
    #[error("{0}")]
    Cuda(String),

    /// An exception that Python raised and that is raised again: the tests' emulator could not build a kernel.
    #[cfg(feature = "python")]
    #[error("{0}")]
    Python(PyErr),
}

pub type Result<T> = std::result::Result<T, Error>;

#[cfg(feature = "python")]
impl From<Error> for PyErr {
    fn from(error: Error) -> PyErr {
        let message = error.to_string();
        match error {
            Error::Dtype { .. } | Error::Kind { .. } => PyTypeError::new_err(message),
            Error::Memory { .. } | Error::Allocation { .. } => PyMemoryError::new_err(message),
            Error::Cuda(_) | Error::Internal(_) => PyRuntimeError::new_err(message),
            Error::Python(raised) => raised,
            _ => PyValueError::new_err(message),
        }
    }
}

/// Formats a shape as Python does: `(8, 1024, 768)`, `(4,)`, `()`.
pub fn shape_text(shape: &[usize]) -> String {
    let sizes: Vec<String> = shape.iter().map(usize::to_string).collect();
    match sizes.as_slice() {
        [one] => format!("({one},)"),
        many => format!("({})", many.join(", ")),
    }
}

/// Formats a number of bytes: `1.5 GiB`, `640 MiB`.
fn memory_text(bytes: usize) -> String {
    match bytes >> 20 {
        mib @ 0..1024 => format!("{} MiB", mib.max(1)),
        mib => format!("{:.1} GiB", mib as f64 / 1024.0),
    }
}
