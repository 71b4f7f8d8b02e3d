//! The rows of the forward's next steps, loaded ahead of the pass that takes them.

use std::ops::Range;

use super::division::chunk_tokens;
use super::rows::{Rows, take};
use super::slice::Sliced;
use crate::problem::OverTime;

/// Steps after which a row that is fetched is used.
const AHEAD: usize = 4;

/// A step by its number, its token and which of the token's it is.
#[derive(Clone, Copy, Default)]
pub struct Place {
    pub step: usize,
    pub token: usize,
    pub inner: usize,
}

impl Place {
    pub fn after(self, steps: usize) -> Place {
        let Place { step, token, inner } = self;
        match inner + 1 == steps {
            true => Place { step: step + 1, token: token + 1, inner: 0 },
            false => Place { step: step + 1, token, inner: inner + 1 },
        }
    }
}

/// Steps whose rows are loaded: those of a pass, and the next two, whose products it computes.
pub const KEPT: usize = 4;

/// Rows of [`Loaded`].
pub const ROWS: usize = 2 * KEPT + 6;

/// The rows of the next steps.
pub struct Loaded<'a, A> {
    pub rows: &'a Rows<'a>,
    /// of a token, and of all tokens
    pub steps: usize,
    pub all: usize,
    /// tokens of a chunk
    pub chunk: usize,
    /// the step whose rows are loaded next
    ahead: Place,
    /// rows of so many numbers: those of a step are at its number modulo KEPT
    size: usize,
    k: &'a mut [A],
    /// if every row has its own: of every step, ones in the middle of a token
    pub decay: &'a mut [A],
    /// what a pass multiplies S by
    pub multiply: &'a mut [A],
    /// the first step's k, times the second one's decay
    decayed_k: &'a mut [A],
    pub q: [&'a mut [A]; 2],
    /// k of two steps times the decays from the first one's on, if every row has its own
    next: [&'a mut [A]; 2],
    /// one number of each of the slice's columns
    pub columns: &'a mut [A],
}

impl<'a, A: Sliced> Loaded<'a, A> {
    pub fn new(rows: &'a Rows<'a>, sizes: OverTime, size: usize, mut rest: &'a mut [A]) -> Self {
        let [k, decay] = [(); 2].map(|()| take(&mut rest, KEPT * size));
        let mut row = || take(&mut rest, size);
        Loaded {
            rows,
            steps: sizes.steps,
            all: sizes.time * sizes.steps,
            chunk: chunk_tokens(sizes),
            ahead: Place::default(),
            size,
            k,
            decay,
            multiply: row(),
            decayed_k: row(),
            q: [(); 2].map(|()| row()),
            next: [(); 2].map(|()| row()),
            columns: rest,
        }
    }

    /// Goes to the next step.
    #[inline(always)]
    pub fn advance(&mut self) {
        let Place { step, token, inner } = self.ahead;
        let place = self.range(KEPT);
        self.rows.fetch(step + AHEAD);
        if step < self.all {
            self.rows.k(step, &mut self.k[place.clone()]);
            match inner {
                _ if !self.rows.decays_by_row() => {}
                0 => self.rows.decay(token, &mut self.decay[place]),
                _ => self.decay[place].fill(A::from_f64(1.0)),
            }
        }
        self.ahead = self.ahead.after(self.steps);
    }

    /// Returns where the rows of a step are, the `at`-th of those loaded.
    #[inline(always)]
    pub fn range(&self, at: usize) -> Range<usize> {
        let first = (self.ahead.step + at) % KEPT * self.size;
        first..first + self.size
    }

    #[inline(always)]
    pub fn k(&self, at: usize) -> &[A] {
        &self.k[self.range(at)]
    }

    /// Multiplies the products' rows by decays, if every row has its own.
    #[inline(always)]
    pub fn decay_products(&mut self, first: usize) {
        if self.rows.decays_by_row() {
            let [one, two] = [first, first + 1].map(|at| self.range(at));
            multiply(self.next[0], &self.k[one.clone()], &self.decay[one.clone()]);
            multiply(self.next[1], &self.k[two.clone()], &self.decay[two]);
            multiply_by(self.next[1], &self.decay[one]);
        }
    }

    /// Returns the rows whose products with a state are p of two steps, the `first`-th of those loaded and
    /// the one after it: their k, times every decay between the state and the step.
    #[inline(always)]
    pub fn products(&self, first: usize) -> [&[A]; 2] {
        match self.rows.decays_by_row() {
            true => self.next.each_ref().map(|row| &**row),
            false => [self.k(first), self.k(first + 1)],
        }
    }

    /// Sets what a pass of one or two steps multiplies by, if every row has its own decay.
    #[inline(always)]
    pub fn decay_pass(&mut self, count: usize) {
        let [one, two] = [0, 1].map(|at| self.range(at));
        self.multiply.copy_from_slice(&self.decay[one.clone()]);
        if count == 2 {
            multiply_by(self.multiply, &self.decay[two.clone()]);
            multiply(self.decayed_k, &self.k[one], &self.decay[two]);
        }
    }

    /// The first step's k, times the second one's decay.
    #[inline(always)]
    pub fn decayed_k(&self) -> &[A] {
        if self.rows.decays_by_row() { self.decayed_k } else { self.k(0) }
    }
}

/// to = a ⊙ b
#[inline(always)]
fn multiply<A: Sliced>(to: &mut [A], a: &[A], b: &[A]) {
    for (to, (a, b)) in to.iter_mut().zip(a.iter().zip(b)) {
        *to = *a * *b;
    }
}

/// to ← to ⊙ by
#[inline(always)]
pub fn multiply_by<A: Sliced>(to: &mut [A], by: &[A]) {
    for (to, by) in to.iter_mut().zip(by) {
        *to *= *by;
    }
}
