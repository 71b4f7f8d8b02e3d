//! The diagnostics of [`crate::spectra`] over numpy arrays, without copies and without Python's lock.
//!
//! `ddl.lab.analysis.spectra` has checked the arguments and allocated the outputs. numpy has to be imported by then.

use numpy::{PyReadonlyArray3, PyReadwriteArrayDyn};
use pyo3::prelude::*;

use crate::error::Result;
use crate::spectra;
use crate::spectra::eigenvalues::REGIMES;
use crate::spectra::survival::{Rewrites, mean_write_survival};
use crate::spectra::view::{Elements, View};

/// An input: (N, rows, columns), with any strides.
#[derive(FromPyObject)]
pub enum Input<'py> {
    F32(PyReadonlyArray3<'py, f32>),
    F64(PyReadonlyArray3<'py, f64>),
}

impl Input<'_> {
    fn view(&self, name: &'static str) -> View<'_> {
        match self {
            Input::F32(array) => View::new(name, Elements::F32(array.as_array())),
            Input::F64(array) => View::new(name, Elements::F64(array.as_array())),
        }
    }
}

type Output<'py> = PyReadwriteArrayDyn<'py, f64>;

/// Runs `work`, without Python's lock, on the elements of `output`.
fn fill(
    py: Python<'_>,
    mut output: Output,
    work: impl FnOnce(&mut [f64]) -> Result<()> + Send,
) -> PyResult<()> {
    let output = output.as_slice_mut()?;
    Ok(py.detach(|| work(output))?)
}

/// Name, lower and upper bound of every regime.
#[pyfunction]
pub fn regimes() -> Vec<(&'static str, f64, f64)> {
    REGIMES.iter().map(|regime| (regime.name, regime.lower, regime.upper)).collect()
}

/// Gates and norms (N, L, 1) → (N, L).
#[pyfunction]
pub fn eigenvalues(
    py: Python<'_>,
    gates: Input,
    norms: Input,
    output: Output,
    threads: usize,
) -> PyResult<()> {
    let (gates, norms) = (gates.view("gates"), norms.view("norms"));
    fill(py, output, |output| spectra::eigenvalues::eigenvalues(&gates, &norms, threads, output))
}

/// Eigenvalues (N, L, 1) → (N,).
#[pyfunction]
pub fn determinants(py: Python<'_>, eigenvalues: Input, output: Output, threads: usize) -> PyResult<()> {
    let eigenvalues = eigenvalues.view("eigenvalues");
    fill(py, output, |output| spectra::eigenvalues::determinants(&eigenvalues, threads, output))
}

/// Eigenvalues (N, L, 1) → the shares, in the order of `regimes`.
#[pyfunction]
pub fn regime_shares(py: Python<'_>, eigenvalues: Input, threads: usize) -> PyResult<Vec<f64>> {
    let eigenvalues = eigenvalues.view("eigenvalues");
    Ok(py.detach(|| spectra::eigenvalues::regime_shares(&eigenvalues, threads))?.to_vec())
}

/// Directions (N, L, d) → (N, L − 1).
#[pyfunction]
pub fn coherence(py: Python<'_>, directions: Input, output: Output, threads: usize) -> PyResult<()> {
    let directions = directions.view("directions");
    fill(py, output, |output| spectra::coherence::coherence(&directions, threads, output))
}

/// Directions (N, L, d) → (L, L).
#[pyfunction]
pub fn coherence_matrix(py: Python<'_>, directions: Input, output: Output, threads: usize) -> PyResult<()> {
    let directions = directions.view("directions");
    fill(py, output, |output| spectra::coherence::coherence_matrix(&directions, threads, output))
}

/// States (N, d, m) → (N,).
#[pyfunction]
pub fn effective_rank(py: Python<'_>, states: Input, output: Output, threads: usize) -> PyResult<()> {
    let states = states.view("states");
    fill(py, output, |output| spectra::rank::effective_rank(&states, threads, output))
}

/// Directions (N, L, d) and gates (N, L, 1) → (N, min(L, d)).
#[pyfunction]
pub fn product_singular_values(
    py: Python<'_>,
    directions: Input,
    gates: Input,
    output: Output,
    threads: usize,
) -> PyResult<()> {
    let (directions, gates) = (directions.view("directions"), gates.view("gates"));
    fill(py, output, |output| spectra::product::product_singular_values(&directions, &gates, threads, output))
}

/// Directions (N, L, d), gates (N, L, 1), values (N, L, m) and embedding (N, d, m) → (N, L + 2, L + 1), or its mean.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub fn write_survival(
    py: Python<'_>,
    directions: Input,
    gates: Input,
    values: Input,
    embedding: Input,
    output: Output,
    mean: bool,
    threads: usize,
) -> PyResult<()> {
    let rewrites = Rewrites {
        directions: directions.view("directions"),
        gates: gates.view("gates"),
        values: values.view("values"),
        embedding: embedding.view("embedding"),
    };
    fill(py, output, |output| match mean {
        true => mean_write_survival(&rewrites, threads, output),
        false => spectra::survival::write_survival(&rewrites, threads, output),
    })
}
