//! The operators of the library `ddl`, without their autograd: each takes its arguments by their names in
//! python/ddl/ops/declarations.py, and runs.
//! The outputs reach torch through the [`Caller`], which owns them; the views that `forward` returns are not needed here.
//!
//! A forward that `saves` returns what its backward needs. One that does not is a step of a sequence in pieces: it
//! takes what earlier tokens left, and returns what these leave for the next.

use super::source::Source;
use crate::error::{Error, Result};
use crate::execute::{self, Caller};
use crate::problem::{
    DeltaRule, Erase, Expand, Given, Incoming, Link, Read, RewriteRead, Saved, SavedOverTime, Write,
    joined_len, parts_of,
};
use crate::records;
use crate::tensor::Tensor;

// --- rewrite, read and rewrite_read ---------------------------------------------------------------

pub fn rewrite(from: &mut dyn Source, run: &mut dyn Caller) -> Result<()> {
    forward(Some(write(from)?), None, from, run)
}

pub fn read(from: &mut dyn Source, run: &mut dyn Caller) -> Result<()> {
    forward(None, Some(read_of(from)?), from, run)
}

pub fn rewrite_read(from: &mut dyn Source, run: &mut dyn Caller) -> Result<()> {
    forward(Some(write(from)?), Some(read_of(from)?), from, run)
}

pub fn rewrite_backward(from: &mut dyn Source, run: &mut dyn Caller) -> Result<()> {
    backward(Some(write(from)?), None, false, from, run)
}

pub fn read_backward(from: &mut dyn Source, run: &mut dyn Caller) -> Result<()> {
    backward(None, Some(read_of(from)?), false, from, run)
}

pub fn rewrite_read_backward(from: &mut dyn Source, run: &mut dyn Caller) -> Result<()> {
    backward(Some(write(from)?), Some(read_of(from)?), false, from, run)
}

/// Compiled graphs know when the gradient of X' is not needed again. Registered for the CPU alone: a GPU stores
/// without loading the cache line first, so overwriting would save it no traffic.
pub fn overwriting_backward(from: &mut dyn Source, run: &mut dyn Caller) -> Result<()> {
    backward(Some(write(from)?), Some(read_of(from)?), true, from, run)
}

/// The anchor and the chain are for the backward alone, which gets them as `state` and `chain`.
fn forward(
    write: Option<Write>,
    read: Option<Read>,
    from: &mut dyn Source,
    run: &mut dyn Caller,
) -> Result<()> {
    let links = from.optional::<Vec<Tensor>>("chain")?.map_or(0, |chain| chain.len());
    if links > 0 && from.optional::<Tensor>("anchor")?.is_none() {
        return Err(Error::Argument(format!("`chain` must come with an `anchor`, got {links} tensors")));
    }
    let problem = RewriteRead::new(from.tensor("state")?, write, read)?
        .with_documents(from.optional("document_starts")?)?
        .that_saves(from.number("saves")?, from.optional("pending")?)?;
    execute::forward(&problem, from.optional("context_dtype")?, run).map(drop)
}

fn backward(
    write: Option<Write>,
    read: Option<Read>,
    overwrites: bool,
    from: &mut dyn Source,
    run: &mut dyn Caller,
) -> Result<()> {
    let mut incoming: Incoming =
        records::Incoming::<()>::default().try_map(&mut |name, _: &()| from.optional(name))?;
    let overwritten = incoming.grad_new_state.take_if(|_| overwrites);
    let problem = RewriteRead::new(from.tensor("state")?, write, read)?;
    let chain = links(from.optional("chain")?.unwrap_or_default(), &problem)?;
    let problem = problem.with_chain(chain)?.with_documents(from.optional("document_starts")?)?;
    let saved = saved(from, &problem)?;
    execute::backward(&problem, &incoming, &saved, from.number("wanted")?, overwritten, run).map(drop)
}

fn write(from: &mut dyn Source) -> Result<Write> {
    let erase = match from.number("erase")? {
        0 => Erase::Tied,
        1 => Erase::None,
        other => return Err(Error::Argument(format!("`erase` must be 0 or 1, got {other}"))),
    };
    let eps_k = from.number("eps_k")?;
    records::Write { direction: (), value: (), gate: (), eps_k, erase }
        .try_map(&mut |name, _: &()| from.tensor(name))
}

fn read_of(from: &mut dyn Source) -> Result<Read> {
    let numbers = records::Read::<()> {
        norm_eps: from.optional("norm_eps")?,
        value_scale: from.optional("value_scale")?,
        value_from_compressed: from.number("value_from_compressed")?,
        ..Default::default()
    };
    numbers.try_map(&mut |name, _: &()| from.optional(name))
}

/// Takes what the forward saved; its `stats` hold several statistics.
fn saved(from: &mut dyn Source, problem: &RewriteRead) -> Result<Saved> {
    let (new_value, new_gate) = (from.optional("new_value")?, from.optional("new_gate")?);
    let saved = Saved { new_value, new_gate, compressed: from.optional("compressed")?, ..Saved::default() };
    let Some(joined) = from.optional::<Tensor>("stats")? else { return Ok(saved) };
    let statistics = problem.statistics();
    joined.expect_shape(&[joined_len(&statistics)])?;
    let [stats, rstd] = parts_of(&joined, statistics);
    Ok(Saved { stats, rstd, ..saved })
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
    let (problem, before) = (expansion(from)?, from.optional("before")?);
    let saves: bool = from.number("saves")?;
    if saves && before.is_some() {
        return Err(Error::Argument("`before` must be None in a call that saves, got a tensor".into()));
    }
    if saves || (before.is_none() && problem.leaves_nothing()) {
        return execute::expand(&problem, false, run).map(drop);
    }
    execute::expand(&problem.with_before(before)?, true, run).map(drop)
}

pub fn expand_backward(from: &mut dyn Source, run: &mut dyn Caller) -> Result<()> {
    let (problem, grad_state) = (expansion(from)?, from.tensor("grad_state")?);
    execute::expand_backward(&problem, &grad_state, from.number("wanted")?, run).map(drop)
}

fn expansion(from: &mut dyn Source) -> Result<Expand> {
    Expand::new(from.tensor("x")?, from.optional("weight")?, from.number("value_channels")?)?
        .with_documents(from.optional("document_starts")?)
}

// --- over time ------------------------------------------------------------------------------------

pub fn delta_rule(from: &mut dyn Source, run: &mut dyn Caller) -> Result<()> {
    execute::delta_rule(&over_time(from)?, from.number("saves")?, run)
}

pub fn delta_rule_backward(from: &mut dyn Source, run: &mut dyn Caller) -> Result<()> {
    let (Some(errors), Some(states)) = (from.optional("errors")?, from.optional("states")?) else {
        return Err(Error::Argument("`errors` and `states` must be what the forward saved, got None".into()));
    };
    let (grad_y, grad_final_state) = (from.optional("grad_y")?, from.optional("grad_final_state")?);
    let saved = SavedOverTime { errors, states, grad_y, grad_final_state };
    execute::delta_rule_backward(&over_time(from)?, &saved, from.number("wanted")?, run)
}

fn over_time(from: &mut dyn Source) -> Result<DeltaRule> {
    DeltaRule::new(Given {
        q: from.tensor("q")?,
        k: from.tensor("k")?,
        v: from.tensor("v")?,
        beta: from.tensor("beta")?,
        g: from.optional("g")?,
        initial_state: from.optional("initial_state")?,
        document_starts: from.optional("document_starts")?,
        scale: from.optional("scale")?,
    })
}
