//! The operators as the dispatcher calls them: each decodes its arguments and makes its call.
//!
//! A declaration lists the arguments in the order of the schema in python/ddl/ops/declarations.py.

use super::calls::{backward, cached, cached_expand, expand, expand_backward, forward};
use super::run::Run;
use super::stack::{Argument, Overwritten, Saved, Source, arguments};
use crate::error::{Error, Result};
use crate::problem::{Expand, Incoming, Link, Outputs, Read, Rewrite, RewriteRead};
use crate::tensor::{Dtype, Tensor};

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
        let problem = problem.with_chain(links(chain)?)?.with_documents(document_starts)?;
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
        let problem = problem.with_chain(links(chain)?)?.with_documents(document_starts)?;
        let Overwritten { tensor, copy } = grad_new_state;
        backward(problem, incoming, saved.with(Some(stats)), wanted, Some(tensor), run)?;
        Overwritten::copy_back(copy)
    }
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

/// Groups a list of tensors, four of each rewrite.
fn links(tensors: Vec<Tensor>) -> Result<Vec<Link>> {
    if !tensors.len().is_multiple_of(4) {
        return Err(Error::Argument(format!(
            "`chain` must hold direction, value, gate and stats of each rewrite, got {} tensors",
            tensors.len()
        )));
    }
    let (mut links, mut tensors) = (Vec::with_capacity(tensors.len() / 4), tensors.into_iter());
    while let (Some(direction), Some(value), Some(gate), Some(stats)) =
        (tensors.next(), tensors.next(), tensors.next(), tensors.next())
    {
        links.push(Link { direction, value, gate, stats });
    }
    Ok(links)
}
