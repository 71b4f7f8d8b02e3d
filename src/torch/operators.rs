//! The operators: each decodes its arguments, allocates its outputs and chooses a backend.
//!
//! A declaration lists the arguments in the order of the schema in python/ddl/ops/declarations.py. The operators on a
//! state share one forward and one backward, in which either half may be absent.

use super::run::Run;
use super::stack::{Argument, Overwritten, Saved, Source, arguments};
use crate::cuda::device::Call;
use crate::error::{Error, Result};
use crate::problem::{Allocate, Expand, Gradients, Incoming, Link, Outputs, Read, Rewrite, RewriteRead};
use crate::tensor::{Dtype, Tensor};
use crate::{cpu, cuda};

/// An operator of the library `ddl`, without its autograd.
pub trait Operator {
    const NAME: &'static std::ffi::CStr;
    const OUTPUTS: &'static [&'static str];
    type Arguments: Argument;
    fn run(arguments: Self::Arguments, run: &mut Run) -> Result<()>;
}

/// Takes an operator's arguments and runs it.
pub fn run<O: Operator>(source: &mut dyn Source, run: &mut Run) -> Result<()> {
    let arguments = O::Arguments::take("", source);
    source.finish()?;
    O::run(arguments, run)
}

macro_rules! operator {
    ($operator:ident($arguments:ident) = $name:literal -> [$($output:literal),*], |$given:pat_param, $run:ident| $body:expr) => {
        pub struct $operator;
        impl Operator for $operator {
            const NAME: &'static std::ffi::CStr = $name;
            const OUTPUTS: &'static [&'static str] = &[$($output),*];
            type Arguments = $arguments;
            fn run($given: $arguments, $run: &mut Run) -> Result<()> {
                $body
            }
        }
    };
}

// --- forward --------------------------------------------------------------------------------------

arguments! { struct RewriteArguments { state: Tensor, rewrite: Rewrite } }
operator! { RewriteOperator(RewriteArguments) = c"rewrite" -> ["new_state", "stats"],
    |RewriteArguments { state, rewrite }, run| forward(RewriteRead::new(state, Some(rewrite), None)?, None, run)
}

arguments! { struct ReadArguments {
    state: Tensor, read: Read, context_dtype: Option<Dtype>, document_starts: Option<Tensor>,
} }
operator! { ReadOperator(ReadArguments) = c"read" -> ["context", "new_value", "new_gate", "compressed", "rstd"],
    |ReadArguments { state, read, context_dtype, document_starts }, run| {
        forward(RewriteRead::new(state, None, Some(read))?.with_documents(document_starts)?, context_dtype, run)
    }
}

// The anchor and the chain are for the backward alone, which gets them as `state` and `chain`.
arguments! { struct RewriteReadArguments {
    state: Tensor, rewrite: Rewrite, read: Read, context_dtype: Option<Dtype>, anchor: Option<Tensor>,
    chain: Option<Vec<Tensor>>, document_starts: Option<Tensor>,
} }
operator! { RewriteReadOperator(RewriteReadArguments) = c"rewrite_read"
        -> ["new_state", "stats", "context", "new_value", "new_gate", "compressed", "rstd"],
    |RewriteReadArguments { state, rewrite, read, context_dtype, anchor, chain, document_starts }, run| {
        let links = chain.map_or(0, |chain| chain.len());
        if anchor.is_none() && links > 0 {
            return Err(Error::Argument(format!("`chain` must come with an `anchor`, got {links} tensors")));
        }
        let problem = RewriteRead::new(state, Some(rewrite), Some(read))?.with_documents(document_starts)?;
        forward(problem, context_dtype, run)
    }
}

// A step of a sequence in pieces, for inference: what is saved for a backward is left out, and what the tokens add to
// the next ones' x takes its place.
arguments! { struct CachedReadArguments {
    state: Tensor, read: Read, context_dtype: Option<Dtype>, pending: Option<Tensor>,
    document_starts: Option<Tensor>,
} }
operator! { CachedRead(CachedReadArguments) = c"cached_read" -> ["context", "new_value", "new_gate", "new_pending"],
    |CachedReadArguments { state, read, context_dtype, pending, document_starts }, run| {
        let problem = RewriteRead::new(state, None, Some(read))?.with_documents(document_starts)?;
        cached(problem.with_pending(pending)?, context_dtype, run)
    }
}

arguments! { struct CachedRewriteReadArguments {
    state: Tensor, rewrite: Rewrite, read: Read, context_dtype: Option<Dtype>, pending: Option<Tensor>,
    document_starts: Option<Tensor>,
} }
operator! { CachedRewriteRead(CachedRewriteReadArguments) = c"cached_rewrite_read"
        -> ["new_state", "context", "new_value", "new_gate", "new_pending"],
    |CachedRewriteReadArguments { state, rewrite, read, context_dtype, pending, document_starts }, run| {
        let problem = RewriteRead::new(state, Some(rewrite), Some(read))?.with_documents(document_starts)?;
        cached(problem.with_pending(pending)?, context_dtype, run)
    }
}

/// Computes a step of a sequence in pieces.
pub fn cached(problem: RewriteRead, context_dtype: Option<Dtype>, run: &mut Run) -> Result<()> {
    let mut outputs = Outputs::for_cached_step(&problem, context_dtype, run)?;
    fill(&problem, &mut outputs, run)
}

/// Computes the outputs, and what the backward needs.
pub fn forward(problem: RewriteRead, context_dtype: Option<Dtype>, run: &mut Run) -> Result<()> {
    let mut outputs = Outputs::new(&problem, context_dtype, run)?;
    fill(&problem, &mut outputs, run)
}

fn fill(problem: &RewriteRead, outputs: &mut Outputs, run: &Run) -> Result<()> {
    let launch = |call: &Call<'_>| cuda::rewrite_read::forward(problem, outputs, call);
    let Some(threads) = run.on_device(&problem.state, launch)? else { return Ok(()) };
    let done = match problem.double() {
        true => cpu::rewrite_read::forward::<f64>(problem, outputs, threads),
        false => cpu::rewrite_read::forward::<f32>(problem, outputs, threads),
    };
    done.map_err(|short| short.in_operator(problem.operator()))
}

// --- backward -------------------------------------------------------------------------------------

arguments! { struct RewriteBackwardArguments {
    grad_new_state: Tensor, state: Tensor, rewrite: Rewrite, stats: Tensor,
} }
operator! { RewriteBackward(RewriteBackwardArguments) = c"rewrite_backward"
        -> ["grad_state", "grad_direction", "grad_value", "grad_gate"],
    |RewriteBackwardArguments { grad_new_state, state, rewrite, stats }, run| {
        let incoming = Incoming { grad_new_state: Some(grad_new_state), ..Incoming::default() };
        let saved = Outputs { stats: Some(stats), ..Outputs::default() };
        backward(RewriteRead::new(state, Some(rewrite), None)?, incoming, saved, 0, None, run)
    }
}

arguments! { struct SavedByRead { new_value: Saved, new_gate: Saved, compressed: Saved, rstd: Saved } }

impl SavedByRead {
    fn with(self, stats: Option<Tensor>) -> Outputs {
        let SavedByRead { new_value, new_gate, compressed, rstd } = self;
        Outputs {
            stats,
            new_value: new_value.0,
            new_gate: new_gate.0,
            compressed: compressed.0,
            rstd: rstd.0,
            ..Outputs::default()
        }
    }
}

arguments! { struct ReadBackwardArguments {
    grad_context: Option<Tensor>, grad_new_value: Option<Tensor>, grad_new_gate: Option<Tensor>,
    state: Tensor, read: Read, saved: SavedByRead, document_starts: Option<Tensor>, wanted: i64,
} }
operator! { ReadBackward(ReadBackwardArguments) = c"read_backward" -> [
        "grad_state", "grad_compress", "grad_norm_weight", "grad_gate_weight", "grad_gate_bias",
        "grad_value_weight", "grad_value_bias"
    ],
    |arguments, run| {
        let ReadBackwardArguments {
            grad_context, grad_new_value, grad_new_gate, state, read, saved, document_starts, wanted,
        } = arguments;
        let incoming = Incoming { grad_new_state: None, grad_context, grad_new_value, grad_new_gate };
        let problem = RewriteRead::new(state, None, Some(read))?.with_documents(document_starts)?;
        backward(problem, incoming, saved.with(None), wanted, None, run)
    }
}

arguments! { struct RewriteReadBackwardArguments {
    incoming: Incoming, state: Tensor, rewrite: Rewrite, read: Read, stats: Tensor, saved: SavedByRead,
    chain: Vec<Tensor>, document_starts: Option<Tensor>, wanted: i64,
} }
operator! { RewriteReadBackward(RewriteReadBackwardArguments) = c"rewrite_read_backward" -> [
        "grad_state", "grad_direction", "grad_value", "grad_gate", "grad_compress", "grad_norm_weight",
        "grad_gate_weight", "grad_gate_bias", "grad_value_weight", "grad_value_bias"
    ],
    |arguments, run| {
        let RewriteReadBackwardArguments {
            incoming, state, rewrite, read, stats, saved, chain, document_starts, wanted,
        } = arguments;
        let problem = RewriteRead::new(state, Some(rewrite), Some(read))?;
        let problem = problem.with_chain(Link::from_tensors(chain)?)?.with_documents(document_starts)?;
        backward(problem, incoming, saved.with(Some(stats)), wanted, None, run)
    }
}

// Compiled graphs know when the gradient of X' is not needed again. Registered for the CPU alone: a GPU stores
// without loading the cache line first, so overwriting would save it no traffic.
arguments! { struct OverwritingBackwardArguments {
    grad_new_state: Overwritten,
    grad_context: Option<Tensor>, grad_new_value: Option<Tensor>, grad_new_gate: Option<Tensor>,
    state: Tensor, rewrite: Rewrite, read: Read, stats: Tensor, saved: SavedByRead, chain: Vec<Tensor>,
    document_starts: Option<Tensor>, wanted: i64,
} }
operator! { OverwritingBackward(OverwritingBackwardArguments) = c"rewrite_read_backward_" -> [
        "grad_direction", "grad_value", "grad_gate", "grad_compress", "grad_norm_weight", "grad_gate_weight",
        "grad_gate_bias", "grad_value_weight", "grad_value_bias"
    ],
    |arguments, run| {
        let OverwritingBackwardArguments {
            grad_new_state, grad_context, grad_new_value, grad_new_gate, state, rewrite, read, stats, saved, chain,
            document_starts, wanted,
        } = arguments;
        let incoming = Incoming { grad_new_state: None, grad_context, grad_new_value, grad_new_gate };
        let problem = RewriteRead::new(state, Some(rewrite), Some(read))?;
        let problem = problem.with_chain(Link::from_tensors(chain)?)?.with_documents(document_starts)?;
        let Overwritten { tensor, copy } = grad_new_state;
        backward(problem, incoming, saved.with(Some(stats)), wanted, Some(tensor), run)?;
        Overwritten::copy_back(copy)
    }
}

/// Allocates the gradients and fills them. `wanted` has a bit for each, the state's first; only parameters heed it.
/// `overwritten` is a gradient of X' that becomes the state's.
pub fn backward(
    problem: RewriteRead,
    incoming: Incoming,
    saved: Outputs,
    wanted: i64,
    overwritten: Option<Tensor>,
    run: &mut Run,
) -> Result<()> {
    saved.check_saved(&problem)?;
    incoming.check(&problem)?;
    let mut gradients = Gradients::new(&problem, wanted, overwritten, run)?;
    if gradients.in_place {
        check_overwritten(&problem, &saved, &incoming, &gradients)?;
    }
    let launch =
        |call: &Call<'_>| cuda::rewrite_read::backward(&problem, &saved, &incoming, &gradients, call);
    let Some(threads) = run.on_device(&problem.state, launch)? else { return Ok(()) };
    let done = match problem.double() {
        true => cpu::rewrite_read::backward::<f64>(&problem, &saved, &incoming, &mut gradients, threads),
        false => cpu::rewrite_read::backward::<f32>(&problem, &saved, &incoming, &mut gradients, threads),
    };
    done.map_err(|short| short.in_operator(problem.operator()))
}

/// Fails if the gradient that is overwritten does not fit, or overlaps a tensor whose rows are read. Parameters need no
/// check: they are copied before the first row is overwritten.
fn check_overwritten(
    problem: &RewriteRead,
    saved: &Outputs,
    incoming: &Incoming,
    gradients: &Gradients,
) -> Result<()> {
    let Some(to) = gradients.state.as_ref() else { return Ok(()) };
    to.expect_shape(&problem.state.shape)?;
    to.expect_beside(&problem.state)?;
    to.expect_dtype(&[problem.state.dtype])?;
    let rewrite = problem.rewrite.as_ref().map(|r| [&r.direction, &r.value, &r.gate]);
    let saved = [&saved.stats, &saved.new_value, &saved.new_gate, &saved.compressed, &saved.rstd];
    let grads = [&incoming.grad_context, &incoming.grad_new_value, &incoming.grad_new_gate];
    let links = problem.chain.iter().flat_map(|link| [&link.direction, &link.value, &link.gate, &link.stats]);
    let rows = saved.into_iter().chain(grads).flatten().chain(links);
    let rows = rows.chain(rewrite.into_iter().flatten()).chain([&problem.state]);
    rows.chain(&problem.document_starts).try_for_each(|row| to.expect_apart(row))
}

// --- expand ---------------------------------------------------------------------------------------

arguments! { struct ExpandArguments {
    x: Tensor, weight: Option<Tensor>, value_channels: i64, document_starts: Option<Tensor>,
} }
operator! { ExpandOperator(ExpandArguments) = c"expand" -> ["state"],
    |ExpandArguments { x, weight, value_channels, document_starts }, run| {
        expand(&Expand::new(x, weight, value_channels)?.with_documents(document_starts)?, run)
    }
}

// A step of a sequence in pieces, for inference.
arguments! { struct CachedExpandArguments {
    x: Tensor, weight: Option<Tensor>, value_channels: i64, before: Option<Tensor>,
    document_starts: Option<Tensor>,
} }
operator! { CachedExpand(CachedExpandArguments) = c"cached_expand" -> ["state", "new_before"],
    |CachedExpandArguments { x, weight, value_channels, before, document_starts }, run| {
        let problem = Expand::new(x, weight, value_channels)?.with_documents(document_starts)?;
        cached_expand(&problem.with_before(before)?, run)
    }
}

/// Computes the state.
pub fn expand(problem: &Expand, run: &mut Run) -> Result<()> {
    let state = run.output("state", &problem.state_shape(), problem.x.dtype, &problem.x)?;
    fill_state(problem, state, None, run)
}

/// Computes the state, and what its tokens leave for the next.
pub fn cached_expand(problem: &Expand, run: &mut Run) -> Result<()> {
    let (shape, x) = (problem.before_shape(), &problem.x);
    let state = run.output("state", &problem.state_shape(), x.dtype, x)?;
    let wanted = shape.is_some();
    let new_before = run.optional_output(wanted, "new_before", &shape.unwrap_or_default(), x.dtype, x)?;
    fill_state(problem, state, new_before, run)
}

fn fill_state(problem: &Expand, mut state: Tensor, mut new_before: Option<Tensor>, run: &Run) -> Result<()> {
    let launch = |call: &Call<'_>| cuda::expand::forward(problem, &state, &new_before, call);
    let Some(threads) = run.on_device(&problem.x, launch)? else { return Ok(()) };
    let done = match problem.x.dtype {
        Dtype::F64 => cpu::expand::forward::<f64>(problem, &mut state, threads)
            .and_then(|()| cpu::expand::leave::<f64>(problem, &mut new_before)),
        _ => cpu::expand::forward::<f32>(problem, &mut state, threads)
            .and_then(|()| cpu::expand::leave::<f32>(problem, &mut new_before)),
    };
    done.map_err(|short| short.in_operator("expand"))
}

arguments! { struct ExpandBackwardArguments {
    grad_state: Tensor, x: Tensor, weight: Option<Tensor>, document_starts: Option<Tensor>, wanted: i64,
} }
operator! { ExpandBackward(ExpandBackwardArguments) = c"expand_backward" -> ["grad_x", "grad_weight"],
    |ExpandBackwardArguments { grad_state, x, weight, document_starts, wanted }, run| {
        let Some(&m) = grad_state.shape.last() else {
            return Err(Error::Argument("`grad_state` must have shape (…, hidden_size, value_channels), got ()".into()));
        };
        let problem = Expand::new(x, weight, m as i64)?.with_documents(document_starts)?;
        expand_backward(&problem, &grad_state, wanted, run)
    }
}

/// Allocates the gradients of x and, if bit 1 of `wanted` is set, of the weight, and fills them.
pub fn expand_backward(problem: &Expand, grad_state: &Tensor, wanted: i64, run: &mut Run) -> Result<()> {
    problem.check_gradient(grad_state)?;
    let mut grad_x = run.output_like("grad_x", &problem.x)?;
    let mut grad_weight = match &problem.weight {
        Some(weight) if wanted >> 1 & 1 == 1 => Some(run.output_like("grad_weight", weight)?),
        _ => run.absent_output(&problem.x)?,
    };
    let launch = |call: &Call<'_>| cuda::expand::backward(problem, grad_state, &grad_x, &grad_weight, call);
    let Some(threads) = run.on_device(&problem.x, launch)? else { return Ok(()) };
    let done = match problem.x.dtype {
        Dtype::F64 => {
            cpu::expand::backward::<f64>(problem, grad_state, &mut grad_x, &mut grad_weight, threads)
        }
        _ => cpu::expand::backward::<f32>(problem, grad_state, &mut grad_x, &mut grad_weight, threads),
    };
    done.map_err(|short| short.in_operator("expand"))
}
