//! The operators of the library `ddl`, without their autograd: each takes its arguments, in the order of the schema in
//! python/ddl/ops/declarations.py, and runs. All arguments are taken before the first is judged (see [`Source`]).
//! The outputs reach torch through [`Run`], which owns them; the views that `forward` returns are not needed here.

use super::execute::{self, backward, forward};
use super::run::Run;
use super::source::{Overwritten, Source};
use crate::error::{Error, Result};
use crate::problem::{
    DeltaRule, Erase, Expand, Given, Incoming, Link, RewriteRead, Saved, SavedOverTime, Write,
};
use crate::tensor::Tensor;

// --- forward --------------------------------------------------------------------------------------

pub fn rewrite(from: &mut dyn Source, run: &mut Run) -> Result<()> {
    let (state, write) = (from.tensor("state"), from.write());
    from.finish()?;
    forward(&RewriteRead::new(state, Some(write?), None)?, None, run).map(drop)
}

pub fn read(from: &mut dyn Source, run: &mut Run) -> Result<()> {
    let (state, read) = (from.tensor("state"), from.read());
    let context_dtype = from.optional_dtype("context_dtype");
    let document_starts = from.optional_tensor("document_starts");
    from.finish()?;
    let problem = RewriteRead::new(state, None, Some(read))?.with_documents(document_starts)?;
    forward(&problem, context_dtype, run).map(drop)
}

/// The anchor and the chain are for the backward alone, which gets them as `state` and `chain`.
pub fn rewrite_read(from: &mut dyn Source, run: &mut Run) -> Result<()> {
    let (state, write, read) = (from.tensor("state"), from.write(), from.read());
    let context_dtype = from.optional_dtype("context_dtype");
    let (anchor, chain) = (from.optional_tensor("anchor"), from.optional_tensors("chain"));
    let document_starts = from.optional_tensor("document_starts");
    from.finish()?;
    let links = chain.map_or(0, |chain| chain.len());
    if anchor.is_none() && links > 0 {
        return Err(Error::Argument(format!("`chain` must come with an `anchor`, got {links} tensors")));
    }
    let problem = RewriteRead::new(state, Some(write?), Some(read))?.with_documents(document_starts)?;
    forward(&problem, context_dtype, run).map(drop)
}

// A step of a sequence in pieces, for inference: what is saved for a backward is left out, and what the tokens add to
// the next ones' x takes its place.

pub fn cached_read(from: &mut dyn Source, run: &mut Run) -> Result<()> {
    let state = from.tensor("state");
    cached(state, None, from, run)
}

pub fn cached_rewrite_read(from: &mut dyn Source, run: &mut Run) -> Result<()> {
    let (state, write) = (from.tensor("state"), from.write());
    cached(state, Some(write), from, run)
}

fn cached(state: Tensor, write: Option<Result<Write>>, from: &mut dyn Source, run: &mut Run) -> Result<()> {
    let read = from.read();
    let context_dtype = from.optional_dtype("context_dtype");
    let pending = from.optional_tensor("pending");
    let document_starts = from.optional_tensor("document_starts");
    from.finish()?;
    let problem = RewriteRead::new(state, write.transpose()?, Some(read))?.with_documents(document_starts)?;
    forward(&problem.with_pending(pending)?, context_dtype, run).map(drop)
}

// --- backward -------------------------------------------------------------------------------------

pub fn rewrite_backward(from: &mut dyn Source, run: &mut Run) -> Result<()> {
    let incoming = Incoming { grad_new_state: Some(from.tensor("grad_new_state")), ..Incoming::default() };
    let (state, write) = (from.tensor("state"), from.write());
    let saved = Saved { stats: Some(from.tensor("stats")), ..Saved::default() };
    from.finish()?;
    backward(&RewriteRead::new(state, Some(write?), None)?, &incoming, &saved, 0, None, run).map(drop)
}

pub fn read_backward(from: &mut dyn Source, run: &mut Run) -> Result<()> {
    let incoming = from.gradients_of_read();
    let (state, read, saved) = (from.tensor("state"), from.read(), from.saved_by_read());
    let (document_starts, wanted) = (from.optional_tensor("document_starts"), from.integer("wanted"));
    from.finish()?;
    let problem = RewriteRead::new(state, None, Some(read))?.with_documents(document_starts)?;
    backward(&problem, &incoming, &saved, wanted, None, run).map(drop)
}

pub fn rewrite_read_backward(from: &mut dyn Source, run: &mut Run) -> Result<()> {
    let grad_new_state = from.optional_tensor("grad_new_state");
    backward_of_both(grad_new_state, None, from, run)
}

/// Compiled graphs know when the gradient of X' is not needed again. Registered for the CPU alone: a GPU stores
/// without loading the cache line first, so overwriting would save it no traffic.
pub fn overwriting_backward(from: &mut dyn Source, run: &mut Run) -> Result<()> {
    let Overwritten { tensor, copy } = from.overwritten_tensor("grad_new_state");
    backward_of_both(None, Some(tensor), from, run)?;
    Overwritten::copy_back(copy)
}

fn backward_of_both(
    grad_new_state: Option<Tensor>,
    overwritten: Option<Tensor>,
    from: &mut dyn Source,
    run: &mut Run,
) -> Result<()> {
    let incoming = Incoming { grad_new_state, ..from.gradients_of_read() };
    let (state, write, read) = (from.tensor("state"), from.write(), from.read());
    let stats = Some(from.tensor("stats"));
    let saved = Saved { stats, ..from.saved_by_read() };
    let chain = from.tensors("chain");
    let (document_starts, wanted) = (from.optional_tensor("document_starts"), from.integer("wanted"));
    from.finish()?;
    let write = write?;
    let links = links(chain, write.eps_k, write.erase)?;
    let problem = RewriteRead::new(state, Some(write), Some(read))?.with_chain(links)?;
    let problem = problem.with_documents(document_starts)?;
    backward(&problem, &incoming, &saved, wanted, overwritten, run).map(drop)
}

/// Groups a chain's tensors, four of each rewrite, all of which have the same ε_k and erase alike.
fn links(chain: Vec<Tensor>, eps_k: f64, erase: Erase) -> Result<Vec<Link>> {
    if !chain.len().is_multiple_of(4) {
        return Err(Error::Argument(format!(
            "`chain` must hold direction, value, gate and stats of each rewrite, got {} tensors",
            chain.len()
        )));
    }
    let (mut links, mut tensors) = (Vec::with_capacity(chain.len() / 4), chain.into_iter());
    while let (Some(direction), Some(value), Some(gate), Some(stats)) =
        (tensors.next(), tensors.next(), tensors.next(), tensors.next())
    {
        links.push(Link { write: Write { direction, value, gate, eps_k, erase }, stats });
    }
    Ok(links)
}

// --- expand ---------------------------------------------------------------------------------------

pub fn expand(from: &mut dyn Source, run: &mut Run) -> Result<()> {
    let (x, weight) = (from.tensor("x"), from.optional_tensor("weight"));
    let value_channels = from.integer("value_channels");
    let document_starts = from.optional_tensor("document_starts");
    from.finish()?;
    let problem = Expand::new(x, weight, value_channels)?.with_documents(document_starts)?;
    execute::expand(&problem, false, run)
}

/// A step of a sequence in pieces, for inference.
pub fn cached_expand(from: &mut dyn Source, run: &mut Run) -> Result<()> {
    let (x, weight) = (from.tensor("x"), from.optional_tensor("weight"));
    let value_channels = from.integer("value_channels");
    let (before, document_starts) = (from.optional_tensor("before"), from.optional_tensor("document_starts"));
    from.finish()?;
    let problem = Expand::new(x, weight, value_channels)?.with_documents(document_starts)?;
    execute::expand(&problem.with_before(before)?, true, run)
}

pub fn expand_backward(from: &mut dyn Source, run: &mut Run) -> Result<()> {
    let (grad_state, x, weight) =
        (from.tensor("grad_state"), from.tensor("x"), from.optional_tensor("weight"));
    let (document_starts, wanted) = (from.optional_tensor("document_starts"), from.integer("wanted"));
    from.finish()?;
    let Some(&m) = grad_state.shape.last() else {
        return Err(Error::Argument(
            "`grad_state` must have shape (…, hidden_size, value_channels), got ()".into(),
        ));
    };
    let problem = Expand::new(x, weight, m as i64)?.with_documents(document_starts)?;
    execute::expand_backward(&problem, &grad_state, wanted, run)
}

// --- over time ------------------------------------------------------------------------------------

pub fn delta_rule(from: &mut dyn Source, run: &mut Run) -> Result<()> {
    let given = Given {
        q: from.tensor("q"),
        k: from.tensor("k"),
        v: from.tensor("v"),
        beta: from.tensor("beta"),
        g: from.optional_tensor("g"),
        scale: from.optional_float("scale"),
        initial_state: from.optional_tensor("initial_state"),
        document_starts: from.optional_tensor("document_starts"),
    };
    let saves = from.boolean("saves");
    from.finish()?;
    execute::delta_rule(&DeltaRule::new(given)?, saves, run)
}

pub fn delta_rule_backward(from: &mut dyn Source, run: &mut Run) -> Result<()> {
    let [grad_y, grad_final_state] = ["grad_y", "grad_final_state"].map(|name| from.optional_tensor(name));
    let [q, k, v, beta] = ["q", "k", "v", "beta"].map(|name| from.tensor(name));
    let (g, scale) = (from.optional_tensor("g"), from.optional_float("scale"));
    let [initial_state, document_starts] =
        ["initial_state", "document_starts"].map(|name| from.optional_tensor(name));
    let [errors, states] = ["errors", "states"].map(|name| from.tensor(name));
    from.finish()?;
    let problem = DeltaRule::new(Given { q, k, v, beta, g, scale, initial_state, document_starts })?;
    execute::delta_rule_backward(&problem, &SavedOverTime { errors, states, grad_y, grad_final_state }, run)
}
