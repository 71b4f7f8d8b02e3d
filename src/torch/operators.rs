//! The operators of the library `ddl`, without their autograd: each takes its arguments, in the order of the schema in
//! python/ddl/ops/declarations.py, and runs. All arguments are taken before the first is judged (see [`Source`]).
//! The outputs reach torch through the [`Caller`], which owns them; the views that `forward` returns are not needed here.
//!
//! A forward that `saves` returns what its backward needs. One that does not is a step of a sequence in pieces: it
//! takes what earlier tokens left, and returns what these leave for the next.

use super::execute::{self, backward, forward};
use super::run::Caller;
use super::source::{Overwritten, Source};
use crate::error::{Error, Result};
use crate::problem::{DeltaRule, Expand, Given, Incoming, Link, RewriteRead, Saved, SavedOverTime, Write};
use crate::tensor::Tensor;

// --- forward --------------------------------------------------------------------------------------

pub fn rewrite(from: &mut dyn Source, run: &mut dyn Caller) -> Result<()> {
    let (state, write) = (from.tensor("state"), from.write());
    let (eps_k, erase) = (from.float("eps_k"), from.erase());
    let saves = from.boolean("saves");
    from.finish()?;
    let write = Write { eps_k, erase: erase?, ..write };
    let problem = RewriteRead::new(state, Some(write), None)?;
    forward(&problem.that_saves(saves, None)?, None, run).map(drop)
}

pub fn read(from: &mut dyn Source, run: &mut dyn Caller) -> Result<()> {
    let (state, mut read) = (from.tensor("state"), from.read());
    let document_starts = from.optional_tensor("document_starts");
    from.numbers_of(&mut read);
    let context_dtype = from.optional_dtype("context_dtype");
    let (pending, saves) = (from.optional_tensor("pending"), from.boolean("saves"));
    from.finish()?;
    let problem = RewriteRead::new(state, None, Some(read))?.with_documents(document_starts)?;
    forward(&problem.that_saves(saves, pending)?, context_dtype, run).map(drop)
}

/// The anchor and the chain are for the backward alone, which gets them as `state` and `chain`.
pub fn rewrite_read(from: &mut dyn Source, run: &mut dyn Caller) -> Result<()> {
    let (state, write, mut read) = (from.tensor("state"), from.write(), from.read());
    let (document_starts, chain) = (from.optional_tensor("document_starts"), from.optional_tensors("chain"));
    let (eps_k, erase) = (from.float("eps_k"), from.erase());
    from.numbers_of(&mut read);
    let (context_dtype, anchor) = (from.optional_dtype("context_dtype"), from.optional_tensor("anchor"));
    let (pending, saves) = (from.optional_tensor("pending"), from.boolean("saves"));
    from.finish()?;
    let links = chain.map_or(0, |chain| chain.len());
    if anchor.is_none() && links > 0 {
        return Err(Error::Argument(format!("`chain` must come with an `anchor`, got {links} tensors")));
    }
    let write = Write { eps_k, erase: erase?, ..write };
    let problem = RewriteRead::new(state, Some(write), Some(read))?.with_documents(document_starts)?;
    forward(&problem.that_saves(saves, pending)?, context_dtype, run).map(drop)
}

// --- backward -------------------------------------------------------------------------------------

pub fn rewrite_backward(from: &mut dyn Source, run: &mut dyn Caller) -> Result<()> {
    let incoming = Incoming { grad_new_state: Some(from.tensor("grad_new_state")), ..Incoming::default() };
    let (state, write) = (from.tensor("state"), from.write());
    let (eps_k, erase) = (from.float("eps_k"), from.erase());
    let (stats, wanted) = (from.optional_tensor("stats"), from.integer("wanted"));
    from.finish()?;
    let problem = RewriteRead::new(state, Some(Write { eps_k, erase: erase?, ..write }), None)?;
    let saved = with_stats(Saved::default(), stats, &problem)?;
    backward(&problem, &incoming, &saved, wanted, None, run).map(drop)
}

pub fn read_backward(from: &mut dyn Source, run: &mut dyn Caller) -> Result<()> {
    let incoming = from.gradients_of_read();
    let (state, mut read) = (from.tensor("state"), from.read());
    let document_starts = from.optional_tensor("document_starts");
    from.numbers_of(&mut read);
    let (saved, stats) = from.saved();
    let wanted = from.integer("wanted");
    from.finish()?;
    let problem = RewriteRead::new(state, None, Some(read))?.with_documents(document_starts)?;
    let saved = with_stats(saved, stats, &problem)?;
    backward(&problem, &incoming, &saved, wanted, None, run).map(drop)
}

pub fn rewrite_read_backward(from: &mut dyn Source, run: &mut dyn Caller) -> Result<()> {
    let grad_new_state = from.optional_tensor("grad_new_state");
    backward_of_both(grad_new_state, None, from, run)
}

/// Compiled graphs know when the gradient of X' is not needed again. Registered for the CPU alone: a GPU stores
/// without loading the cache line first, so overwriting would save it no traffic.
pub fn overwriting_backward(from: &mut dyn Source, run: &mut dyn Caller) -> Result<()> {
    let Overwritten { tensor, copy } = from.overwritten_tensor("grad_new_state");
    backward_of_both(None, Some(tensor), from, run)?;
    Overwritten::copy_back(copy)
}

fn backward_of_both(
    grad_new_state: Option<Tensor>,
    overwritten: Option<Tensor>,
    from: &mut dyn Source,
    run: &mut dyn Caller,
) -> Result<()> {
    let incoming = Incoming { grad_new_state, ..from.gradients_of_read() };
    let (state, write, mut read) = (from.tensor("state"), from.write(), from.read());
    let (document_starts, chain) = (from.optional_tensor("document_starts"), from.optional_tensors("chain"));
    let (eps_k, erase) = (from.float("eps_k"), from.erase());
    from.numbers_of(&mut read);
    let (saved, stats) = from.saved();
    let wanted = from.integer("wanted");
    from.finish()?;
    let write = Write { eps_k, erase: erase?, ..write };
    let problem = RewriteRead::new(state, Some(write), Some(read))?;
    let links = links(chain.unwrap_or_default(), &problem)?;
    let problem = problem.with_chain(links)?.with_documents(document_starts)?;
    let saved = with_stats(saved, stats, &problem)?;
    backward(&problem, &incoming, &saved, wanted, overwritten, run).map(drop)
}

/// Adds the statistics of the rewrite and of the read, which the forward returned one after the other.
fn with_stats(saved: Saved, stats: Option<Tensor>, problem: &RewriteRead) -> Result<Saved> {
    let Some(joined) = stats else { return Ok(saved) };
    let shapes = problem.output_shapes();
    let len = |shape: &Option<Vec<usize>>| shape.as_ref().map_or(0, |shape| shape.iter().product());
    let (of_rewrite, of_read): (usize, usize) = (len(&shapes.stats), len(&shapes.rstd));
    joined.expect_shape(&[of_rewrite + of_read])?;
    let part = |name, first, shape: Option<Vec<usize>>| shape.map(|shape| joined.part(name, first, shape));
    let stats = part("stats", 0, shapes.stats);
    Ok(Saved { stats, rstd: part("stats", of_rewrite, shapes.rstd), ..saved })
}

/// Groups a chain's tensors, four of each rewrite, all of which have the ε_k of the problem's and erase alike.
fn links(chain: Vec<Tensor>, problem: &RewriteRead) -> Result<Vec<Link>> {
    if !chain.len().is_multiple_of(4) {
        return Err(Error::Argument(format!(
            "`chain` must hold direction, value, gate and stats of each rewrite, got {} tensors",
            chain.len()
        )));
    }
    let Some(Write { eps_k, erase, .. }) = problem.rewrite else { return Ok(Vec::new()) };
    let shape = problem.batch_and(&[problem.rewrites.stats(problem.sizes.m)]);
    let len = shape.iter().product();
    let (mut links, mut tensors) = (Vec::with_capacity(chain.len() / 4), chain.into_iter());
    while let (Some(direction), Some(value), Some(gate), Some(stats)) =
        (tensors.next(), tensors.next(), tensors.next(), tensors.next())
    {
        // Those of a read may follow.
        if stats.shape.len() != 1 || ![len, len + problem.sizes.tokens()].contains(&stats.len()) {
            stats.expect_shape(&[len])?;
        }
        let stats = stats.part("chain", 0, shape.clone());
        links.push(Link { write: Write { direction, value, gate, eps_k, erase }, stats });
    }
    Ok(links)
}

// --- expand ---------------------------------------------------------------------------------------

pub fn expand(from: &mut dyn Source, run: &mut dyn Caller) -> Result<()> {
    let (x, weight) = (from.tensor("x"), from.optional_tensor("weight"));
    let document_starts = from.optional_tensor("document_starts");
    let value_channels = from.integer("value_channels");
    let (before, saves) = (from.optional_tensor("before"), from.boolean("saves"));
    from.finish()?;
    let problem = Expand::new(x, weight, value_channels)?.with_documents(document_starts)?;
    if saves && before.is_some() {
        return Err(Error::Argument("`before` must be None in a call that saves, got a tensor".into()));
    }
    if saves || (before.is_none() && problem.leaves_nothing()) {
        return execute::expand(&problem, false, run);
    }
    execute::expand(&problem.with_before(before)?, true, run)
}

pub fn expand_backward(from: &mut dyn Source, run: &mut dyn Caller) -> Result<()> {
    let (grad_state, x, weight) =
        (from.tensor("grad_state"), from.tensor("x"), from.optional_tensor("weight"));
    let document_starts = from.optional_tensor("document_starts");
    let (value_channels, wanted) = (from.integer("value_channels"), from.integer("wanted"));
    from.finish()?;
    let problem = Expand::new(x, weight, value_channels)?.with_documents(document_starts)?;
    execute::expand_backward(&problem, &grad_state, wanted, run)
}

// --- over time ------------------------------------------------------------------------------------

pub fn delta_rule(from: &mut dyn Source, run: &mut dyn Caller) -> Result<()> {
    let given = Given {
        q: from.tensor("q"),
        k: from.tensor("k"),
        v: from.tensor("v"),
        beta: from.tensor("beta"),
        g: from.optional_tensor("g"),
        initial_state: from.optional_tensor("initial_state"),
        document_starts: from.optional_tensor("document_starts"),
        scale: from.optional_float("scale"),
    };
    let saves = from.boolean("saves");
    from.finish()?;
    execute::delta_rule(&DeltaRule::new(given)?, saves, run)
}

pub fn delta_rule_backward(from: &mut dyn Source, run: &mut dyn Caller) -> Result<()> {
    let [grad_y, grad_final_state] = ["grad_y", "grad_final_state"].map(|name| from.optional_tensor(name));
    let [q, k, v, beta] = ["q", "k", "v", "beta"].map(|name| from.tensor(name));
    let [g, initial_state, document_starts] =
        ["g", "initial_state", "document_starts"].map(|name| from.optional_tensor(name));
    let scale = from.optional_float("scale");
    let [errors, states] = ["errors", "states"].map(|name| from.optional_tensor(name));
    let wanted = from.integer("wanted");
    from.finish()?;
    let (Some(errors), Some(states)) = (errors, states) else {
        return Err(Error::Argument("`errors` and `states` must be what the forward saved, got None".into()));
    };
    let problem = DeltaRule::new(Given { q, k, v, beta, g, scale, initial_state, document_starts })?;
    let saved = SavedOverTime { errors, states, grad_y, grad_final_state };
    execute::delta_rule_backward(&problem, &saved, wanted, run)
}
