//! What the backward keeps of every slice while it goes through the chunks.

use super::division::{Unit, WIDEST, chunk_tokens, padded, width};
use super::rows::Rows;
use super::slice::Sliced;
use super::transposed::put;
use crate::cpu::buffer::{Buffer, Result};
use crate::problem::{DeltaRule, SavedOverTime};

/// What a slice keeps from chunk to chunk.
pub struct Slice<A> {
    pub unit: Unit,
    /// dS of the last step before the chunks that are done, without that step's own query
    pub ds: Buffer<A>,
    /// times which dS is what is stored
    pub lag: A,
    /// the chunk's part of the gradients
    pub partial: Partial<A>,
}

impl<A: Sliced> Slice<A> {
    pub fn new(problem: &DeltaRule, unit: Unit, saved: &SavedOverTime) -> Result<Slice<A>> {
        let width = width::<A>(problem.sizes);
        let mut ds = Buffer::zeros(width * padded(problem.sizes))?;
        if let Some(grad) = &saved.grad_final_state {
            let mut row = [A::default(); WIDEST];
            for at in 0..problem.sizes.key {
                Rows::new(problem, &unit).state(grad, [0, 1], at, &mut row[..width]);
                put(&mut ds, width, at, &row[..width]);
            }
        }
        Ok(Slice { unit, ds, lag: A::from_f64(1.0), partial: Partial::new(problem)? })
    }
}

/// One slice's part of a chunk's gradients.
pub struct Partial<A> {
    /// a row of `padded` numbers for each token and query
    pub dq: Buffer<A>,
    /// a row of `padded` numbers for each step
    pub dk: Buffer<A>,
    /// a row of a slice's columns for each step
    pub dv: Buffer<A>,
    /// of each step
    pub dbeta: Buffer<A>,
    /// a row of `decays` numbers for each token
    pub dg: Buffer<A>,
    /// a row of `padded` numbers that a walk uses
    pub sums: Buffer<A>,
    /// `padded` if every key feature has a decay of its own, else 1
    pub decays: usize,
}

impl<A: Sliced> Partial<A> {
    pub fn new(problem: &DeltaRule) -> Result<Partial<A>> {
        let (sizes, rows, tokens) = (problem.sizes, padded(problem.sizes), chunk_tokens(problem.sizes));
        let by_row = problem.g.as_ref().is_some_and(|g| g.shape.len() == 4);
        let (steps, decays) = (tokens * sizes.steps, if by_row { rows } else { 1 });
        Ok(Partial {
            dq: Buffer::zeros(tokens * sizes.queries_of_a_state() * rows)?,
            dk: Buffer::zeros(steps * rows)?,
            dv: Buffer::zeros(steps * width::<A>(sizes))?,
            dbeta: Buffer::zeros(steps)?,
            dg: Buffer::zeros(tokens * decays)?,
            sums: Buffer::zeros(rows)?,
            decays,
        })
    }
}
