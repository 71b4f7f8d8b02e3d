//! The operators on NumPy arrays, for `ddl.arrays`: arguments and results are dictionaries, by name.

use half::{bf16, f16};
use numpy::npyffi::_PyArray_GET_ITEM_DATA;
use numpy::{PyUntypedArray, PyUntypedArrayMethods, get_array_module};
use pyo3::conversion::FromPyObjectOwned;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{Error, Result};
use crate::problem::{
    Allocate, DeltaRule, Erase, Expand, Given, Gradients, Incoming, Outputs, Read, RewriteRead,
    SavedOverTime, Write,
};
use crate::tensor::{Device, Dtype, Tensor, dtypes_of};
use crate::torch::execute::of_dtype;
use crate::{cpu, delta_rule};

/// Returns the outputs of an operator and what it saves; with `vjp` the gradients of its arguments, `grad_state` and so
/// on, from those of its outputs, which are then among the arguments, and the outputs, which are computed again.
/// `threads`: to use at most; None for one per processor.
#[pyfunction]
pub fn on_arrays<'py>(
    operator: &str,
    vjp: bool,
    arguments: Bound<'py, PyDict>,
    threads: Option<usize>,
) -> PyResult<Bound<'py, PyDict>> {
    let processors = || std::thread::available_parallelism().map_or(1, |count| count.get());
    let results = PyDict::new(arguments.py());
    let mut call = Call { arguments, results, threads: threads.unwrap_or_else(processors) };
    match (operator, vjp) {
        ("expand", false) => call.expand(),
        ("expand", true) => call.expand_vjp(),
        ("delta_rule", false) => call.delta_rule(&call.over_time()?, false).map(drop),
        ("delta_rule", true) => call.delta_rule_vjp(),
        (_, false) => call.rewrite_read(&call.rewrite_read_problem(operator)?).map(drop),
        (_, true) => call.rewrite_read_vjp(operator),
    }?;
    Ok(call.results)
}

struct Call<'py> {
    arguments: Bound<'py, PyDict>,
    results: Bound<'py, PyDict>,
    threads: usize,
}

impl<'py> Call<'py> {
    /// Computes without Python's lock. The dictionaries keep the arrays alive.
    fn detached<T: Send>(&self, compute: impl FnOnce(usize) -> T + Send) -> T {
        let threads = self.threads;
        self.arguments.py().detach(|| compute(threads))
    }

    /// Takes an argument; one that is left out is None.
    fn take<T: FromPyObjectOwned<'py>>(&self, name: &str) -> Result<T> {
        let value = self.arguments.call_method1("get", (name,)).map_err(Error::Python)?;
        value.extract().map_err(|error: T::Error| Error::Python(error.into()))
    }

    fn tensor(&self, name: &'static str) -> Result<Tensor> {
        let refusal = Error::Kind { name, expected: "a numpy.ndarray", got: "NoneType".into() };
        self.optional_tensor(name)?.ok_or(refusal)
    }

    fn optional_tensor(&self, name: &'static str) -> Result<Option<Tensor>> {
        self.take::<Option<_>>(name)?.map(|array| view(name, &array)).transpose()
    }

    fn write(&self) -> Result<Write> {
        Ok(Write {
            direction: self.tensor("direction")?,
            value: self.tensor("value")?,
            gate: self.tensor("gate")?,
            eps_k: self.take("eps_k")?,
            erase: if self.take::<String>("erase")? == "none" { Erase::None } else { Erase::Tied },
        })
    }

    fn read(&self) -> Result<Read> {
        Ok(Read {
            compress: self.optional_tensor("compress")?,
            norm_weight: self.optional_tensor("norm_weight")?,
            norm_eps: self.take("norm_eps")?,
            gate_weight: self.optional_tensor("gate_weight")?,
            gate_bias: self.optional_tensor("gate_bias")?,
            value_weight: self.optional_tensor("value_weight")?,
            value_bias: self.optional_tensor("value_bias")?,
            value_scale: self.take("value_scale")?,
            value_from_compressed: self.take::<String>("value_from")? == "compressed",
        })
    }

    fn rewrite_read_problem(&self, operator: &str) -> Result<RewriteRead> {
        let write = (operator != "read").then(|| self.write()).transpose()?;
        let read = (operator != "rewrite").then(|| self.read()).transpose()?;
        let problem = RewriteRead::new(self.tensor("state")?, write, read)?;
        problem.with_documents(self.optional_tensor("document_starts")?)
    }

    fn expand_problem(&self) -> Result<Expand> {
        let (x, weight) = (self.tensor("x")?, self.optional_tensor("weight")?);
        let problem = Expand::new(x, weight, self.take("value_channels")?)?;
        problem.with_documents(self.optional_tensor("document_starts")?)
    }

    fn over_time(&self) -> Result<DeltaRule> {
        DeltaRule::new(Given {
            q: self.tensor("q")?,
            k: self.tensor("k")?,
            v: self.tensor("v")?,
            beta: self.tensor("beta")?,
            g: self.optional_tensor("g")?,
            scale: self.take("scale")?,
            initial_state: self.optional_tensor("initial_state")?,
            document_starts: self.optional_tensor("document_starts")?,
        })
    }

    fn rewrite_read(&mut self, problem: &RewriteRead) -> Result<Outputs> {
        let context = self.take::<Option<String>>("context_dtype")?;
        let mut outputs = Outputs::new(problem, context.as_deref().and_then(dtype_of), self)?;
        of_dtype!(problem.state.dtype, T => {
            self.detached(|threads| cpu::rewrite_read::forward::<T>(problem, &mut outputs, threads))
        })?;
        Ok(outputs)
    }

    fn rewrite_read_vjp(&mut self, operator: &str) -> Result<()> {
        let problem = self.rewrite_read_problem(operator)?;
        let incoming = Incoming {
            grad_new_state: self.optional_tensor("grad_new_state")?,
            grad_context: self.optional_tensor("grad_context")?,
            grad_new_value: self.optional_tensor("grad_new_value")?,
            grad_new_gate: self.optional_tensor("grad_new_gate")?,
        };
        incoming.check(&problem)?;
        let saved = self.rewrite_read(&problem)?;
        let mut gradients = Gradients::new(&problem, Gradients::ALL, None, self)?;
        of_dtype!(problem.state.dtype, T => self.detached(|threads| {
            cpu::rewrite_read::backward::<T>(&problem, &saved, &incoming, &mut gradients, threads)
        }))
    }

    fn expand(&mut self) -> Result<()> {
        let problem = self.expand_problem()?;
        let mut state = self.output("state", &problem.state_shape(), problem.x.dtype, &problem.x)?;
        of_dtype!(problem.x.dtype, T => {
            self.detached(|threads| cpu::expand::forward::<T>(&problem, &mut state, threads))
        })
        .map_err(|short| short.in_operator("expand"))
    }

    fn expand_vjp(&mut self) -> Result<()> {
        let (problem, grad_state) = (self.expand_problem()?, self.tensor("grad_state")?);
        problem.check_gradient(&grad_state)?;
        let mut x = self.output_like("grad_x", &problem.x)?;
        let mut weight = self.gradient_of("grad_weight", &problem.weight)?;
        of_dtype!(problem.x.dtype, T => self.detached(|threads| {
            cpu::expand::backward::<T>(&problem, &grad_state, &mut x, &mut weight, threads)
        }))
        .map_err(|short| short.in_operator("expand"))
    }

    /// Computes the outputs, and returns the errors and states that the backward needs if it `saves` them.
    fn delta_rule(&mut self, problem: &DeltaRule, saves: bool) -> Result<Option<[Tensor; 2]>> {
        let (small, states) = (problem.small(), problem.states_shape(delta_rule::chunks(problem.sizes)));
        let mut outputs = delta_rule::forward::Outputs {
            y: self.output("y", &problem.y_shape(), problem.v.dtype, &problem.q)?,
            final_state: self.output("final_state", &problem.state_shape(), small, &problem.q)?,
            saved: None,
        };
        if saves {
            let errors = self.output("errors", &problem.errors_shape(), small, &problem.q)?;
            outputs.saved = Some([errors, self.output("states", &states, small, &problem.q)?]);
        }
        self.detached(|threads| match small {
            Dtype::F64 => delta_rule::forward::forward::<f64>(problem, &mut outputs, threads),
            _ => delta_rule::forward::forward::<f32>(problem, &mut outputs, threads),
        })
        .map_err(|short| short.in_operator("delta_rule"))?;
        Ok(outputs.saved)
    }

    fn delta_rule_vjp(&mut self) -> Result<()> {
        let problem = self.over_time()?;
        let grads = (self.optional_tensor("grad_y")?, self.optional_tensor("grad_final_state")?);
        let [errors, states] = self.delta_rule(&problem, true)?.expect("it saves them");
        let saved = SavedOverTime { errors, states, grad_y: grads.0, grad_final_state: grads.1 };
        problem.check_saved(&saved, delta_rule::chunks(problem.sizes))?;
        let mut gradients = delta_rule::backward::Gradients {
            q: self.output_like("grad_q", &problem.q)?,
            k: self.output_like("grad_k", &problem.k)?,
            v: self.output_like("grad_v", &problem.v)?,
            beta: self.output_like("grad_beta", &problem.beta)?,
            g: self.gradient_of("grad_g", &problem.g)?,
            initial_state: self.gradient_of("grad_initial_state", &problem.initial_state)?,
        };
        self.detached(|threads| match problem.small() {
            Dtype::F64 => delta_rule::backward::backward::<f64>(&problem, &saved, &mut gradients, threads),
            _ => delta_rule::backward::backward::<f32>(&problem, &saved, &mut gradients, threads),
        })
        .map_err(|short| short.in_operator("delta_rule_backward"))
    }

    fn gradient_of(&mut self, name: &'static str, argument: &Option<Tensor>) -> Result<Option<Tensor>> {
        argument.as_ref().map(|argument| self.output_like(name, argument)).transpose()
    }
}

/// NumPy allocates every output, and raises its own error if memory is short.
impl Allocate for Call<'_> {
    fn output(&mut self, name: &'static str, shape: &[usize], dtype: Dtype, _: &Tensor) -> Result<Tensor> {
        let numpy = get_array_module(self.results.py()).map_err(Error::Python)?;
        let array = numpy
            .call_method1("empty", (shape, dtype.name().trim_start_matches("torch.")))
            .map_err(Error::Python)?;
        self.results.set_item(name, &array).map_err(Error::Python)?;
        view(name, array.cast().expect("an array"))
    }

    fn absent_output(&mut self) -> Result<Option<Tensor>> {
        Ok(None)
    }
}

fn dtype_of(name: &str) -> Option<Dtype> {
    Dtype::ALL.into_iter().find(|dtype| dtype.name().strip_prefix("torch.") == Some(name))
}

/// Views an array, which `ddl.arrays` has made contiguous. It has to live as long as the call.
fn view(name: &'static str, array: &Bound<'_, PyUntypedArray>) -> Result<Tensor> {
    let (expected, got) = (dtypes_of(name), array.dtype().to_string());
    let is_mask = name == "document_starts";
    let dtype = dtype_of(&got).filter(|&dtype| (dtype == Dtype::Bool) == is_mask);
    let dtype = dtype.ok_or(Error::Dtype { name, expected, got })?;
    if !array.is_c_contiguous() || !array.is_aligned() {
        return Err(Error::Kind { name, expected: "contiguous", got: "an array with strides".into() });
    }
    // SAFETY: a live array, whose fields are read while Python's lock is held.
    let data = unsafe { (*_PyArray_GET_ITEM_DATA(array.as_array_ptr())).data };
    // SAFETY: contiguous elements of this dtype, which the dictionary of the call keeps alive.
    Ok(unsafe { Tensor::new(name, array.shape().to_vec(), dtype, Device::Cpu, data.cast()) })
}
