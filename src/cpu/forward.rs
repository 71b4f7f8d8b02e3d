//! `rewrite`, `read` and `rewrite_read`, forward, one token row at a time.
//!
//! Moved per token: X in, k in, X' out, h out — (2m + 2)·d elements; the row itself is widened into a
//! scratch of m contiguous channels that stays in L1/L2. Saved for the backward: r and p (m + 1
//! numbers) of the rewrite, rstd of the read, and x (d) where the read runs over time.

use std::ops::Range;

use super::buffer::{Buffer, Result};
use super::convert::Accum;
use super::simd::{Kernel, add_scaled, dispatch, dot, load, mix, round_to, store};
use super::weights::Weights;
use super::{parallel, split, useful_threads, within_sequences};
use crate::problem::{Boundary, Read, Rewrite, Sizes};
use crate::tensor::{Ahead, RowsMut, Tensor};

/// What a forward fills; `None` where its half is absent or the number not asked for.
#[derive(Default)]
pub struct Outputs {
    /// X' (…, d, m)
    pub state: Option<Tensor>,
    /// r, p (…, 1 + m)
    pub stats: Option<Tensor>,
    /// h (…, d)
    pub context: Option<Tensor>,
    /// v (…, m)
    pub value: Option<Tensor>,
    /// β (…)
    pub gate: Option<Tensor>,
    /// x (…, d)
    pub compressed: Option<Tensor>,
    /// 1/√(mean x² + ε) (…)
    pub rstd: Option<Tensor>,
}

/// Runs a boundary forward on `threads` threads.
pub fn forward<A: Accum>(boundary: &Boundary, outputs: &mut Outputs, threads: usize) -> Result<()> {
    let Sizes { d, m, .. } = boundary.sizes;
    if boundary.sizes.tokens() == 0 {
        return Ok(()); // before scratch is made for a width that no memory stands behind
    }
    let taps = boundary.read.as_ref().map_or(1, Read::taps);
    let bounds = parallel::partition(boundary.sizes.tokens(), taps);
    let weights = boundary.read.as_ref().map(|read| Weights::<A>::new(read, boundary.sizes)).transpose()?;
    let mut states = split(&mut outputs.state, d * m, &bounds);
    let mut stats = split(&mut outputs.stats, 1 + m, &bounds);
    let mut contexts = split(&mut outputs.context, d, &bounds);
    let mut values = split(&mut outputs.value, m, &bounds);
    let mut gates = split(&mut outputs.gate, 1, &bounds);
    let mut compressed = split(&mut outputs.compressed, d, &bounds);
    let mut rstds = split(&mut outputs.rstd, 1, &bounds);
    let parts: Vec<Part<'_, A>> = bounds
        .windows(2)
        .map(|pair| Part {
            boundary,
            weights: weights.as_ref(),
            tokens: pair[0]..pair[1],
            state: states(),
            stats: stats(),
            context: contexts(),
            value: values(),
            gate: gates(),
            compressed: compressed(),
            rstd: rstds(),
            ahead: Ahead::default(),
        })
        .collect();
    parallel::for_each(parts, useful_threads(boundary.state.len(), threads), dispatch)
}

/// Consecutive tokens and the rows of every output that belong to them.
struct Part<'a, A> {
    boundary: &'a Boundary,
    weights: Option<&'a Weights<A>>,
    tokens: Range<usize>,
    state: Option<RowsMut<'a>>,
    stats: Option<RowsMut<'a>>,
    context: Option<RowsMut<'a>>,
    value: Option<RowsMut<'a>>,
    gate: Option<RowsMut<'a>>,
    compressed: Option<RowsMut<'a>>,
    rstd: Option<RowsMut<'a>>,
    ahead: Ahead,
}

impl<A: Accum> Kernel for Part<'_, A> {
    type Output = Result<()>;
    #[inline(always)]
    fn run(mut self) -> Result<()> {
        let boundary = self.boundary;
        let Sizes { time, d, m, .. } = boundary.sizes;
        let taps = boundary.read.as_ref().map_or(1, Read::taps);
        let mut state = Buffer::<A>::zeros(m * d)?;
        let mut direction = Buffer::<A>::zeros(d)?;
        // Partial sums of x for this token and the K−1 after it; x_t lives in slot t mod K.
        let mut sums = Buffer::<A>::zeros(taps * d)?;
        for (tokens, sequence) in within_sequences(self.tokens.clone(), time.max(1)) {
            // The halo is rewritten again, not stored: its states feed the first reads of this part.
            let halo = (taps - 1).min(tokens.start - sequence.start);
            sums.fill(A::default());
            for token in tokens.start - halo..tokens.end {
                let own = token >= tokens.start;
                let states = boundary.state.rows(m * d);
                self.ahead = self.rows_ahead(token + 1);
                load(states, token, m, &mut state);
                if let Some(rewrite) = &boundary.rewrite {
                    self.rewrite_row(rewrite, token, own, &mut state, &mut direction);
                }
                if let (Some(read), Some(weights)) = (&boundary.read, self.weights) {
                    compress_row(weights, token, taps, &state, &mut sums);
                    if own {
                        let x = &mut sums[token % taps * d..][..d];
                        self.read_row(read, weights, token, x);
                    }
                }
            }
        }
        Ok(())
    }
}

impl<A: Accum> Part<'_, A> {
    /// What the next token will load and store.
    #[inline(always)]
    fn rows_ahead(&self, token: usize) -> Ahead {
        let Sizes { d, m, .. } = self.boundary.sizes;
        let direction = self.boundary.rewrite.as_ref().map(|rewrite| rewrite.direction.rows(d).span(token));
        let stored = [&self.state, &self.context, &self.compressed];
        let [state, context, compressed] = stored.map(|rows| rows.as_ref().map(|rows| rows.span(token)));
        let spans =
            [Some(self.boundary.state.rows(m * d).span(token)), direction, state, context, compressed, None];
        Ahead::new(spans.map(Option::unwrap_or_default), 3 * m + 2)
    }

    /// X ← X + β k̂ (v − k̂ᵀX)ᵀ, rounded as stored.
    #[inline(always)]
    fn rewrite_row(&mut self, rewrite: &Rewrite, token: usize, own: bool, state: &mut [A], k: &mut [A]) {
        let Sizes { d, m, .. } = self.boundary.sizes;
        load(rewrite.direction.rows(d), token, 1, k);
        let value = rewrite.value.rows(m).row::<A>(token);
        let gate = rewrite.gate.rows(1).row::<A>(token)[0];
        let r = inverse_norm(dot(k, k), rewrite.eps_k);
        for (j, channel) in state.chunks_exact_mut(d).enumerate() {
            let readout = r * dot(k, channel);
            self.ahead.step();
            if let Some(stats) = self.stats.as_mut().filter(|_| own) {
                stats.row::<A>(token)[1 + j] = readout;
            }
            let scale = gate * r * (value[j] - readout);
            if scale != A::default() {
                add_scaled(channel, scale, k); // skipped at β = 0: X comes back bit for bit, −0 too
            }
            self.ahead.step();
        }
        if let Some(stats) = self.stats.as_mut().filter(|_| own) {
            stats.row::<A>(token)[0] = r;
        }
        if let Some(stored) = self.state.as_mut().filter(|_| own) {
            store(stored, token, m, state);
        }
        round_to(self.boundary.state.dtype, state);
    }

    /// x → h, v, β of this token.
    #[inline(always)]
    fn read_row(&mut self, read: &Read, weights: &Weights<A>, token: usize, x: &mut [A]) {
        let d = x.len();
        if let Some(saved) = &mut self.compressed {
            store(saved, token, 1, x);
            round_to(saved.dtype(), x); // the backward sees the stored x: let the forward see it too
        }
        self.ahead.step();
        let rstd = match read.norm_eps {
            Some(eps) => inverse_norm_mean(dot(x, x), d, eps),
            None => A::from_f64(1.0),
        };
        if let Some(stored) = &mut self.rstd {
            stored.row::<A>(token)[0] = rstd;
        }
        if let Some(stored) = &mut self.gate {
            let logit = rstd * dot(&weights.gate_folded, x) + weights.gate_bias;
            stored.row::<A>(token)[0] = A::from_f64(2.0) * sigmoid(logit);
        }
        if let Some(stored) = &mut self.value {
            let scale = if read.value_from_compressed { A::from_f64(1.0) } else { rstd };
            for (j, value) in stored.row::<A>(token).iter_mut().enumerate() {
                let linear =
                    scale * dot(&weights.value_folded[j * d..(j + 1) * d], x) + weights.value_bias[j];
                *value = match read.value_scale {
                    Some(scale) => A::from_f64(scale) * sigmoid(linear),
                    None => linear,
                };
            }
        }
        if let Some(stored) = &mut self.context {
            x.iter_mut().zip(&weights.norm).for_each(|(x, norm)| *x = *x * rstd * *norm);
            store(stored, token, 1, x);
        }
    }
}

/// Adds X_t's share to x_t … x_{t+K−1}; slot (t + K − 1) mod K begins here.
#[inline(always)]
fn compress_row<A: Accum>(weights: &Weights<A>, token: usize, taps: usize, state: &[A], sums: &mut [A]) {
    let Some(weight) = &weights.compress else {
        return sums.copy_from_slice(state);
    };
    let d = sums.len() / taps;
    for (tap, weight) in weight.chunks_exact(state.len()).enumerate() {
        let slot = (token + tap) % taps;
        mix(&mut sums[slot * d..][..d], tap + 1 < taps, weight, state);
    }
}

/// r = 1/√(|k|² + ε_k²)
#[inline(always)]
pub fn inverse_norm<A: Accum>(square: A, eps: f64) -> A {
    A::from_f64(1.0) / (square + A::from_f64(eps * eps)).sqrt()
}

/// rstd = 1/√(|x|²/d + ε)
#[inline(always)]
fn inverse_norm_mean<A: Accum>(square: A, d: usize, eps: f64) -> A {
    A::from_f64(1.0) / (square / A::from_f64(d as f64) + A::from_f64(eps)).sqrt()
}

#[inline(always)]
fn sigmoid<A: Accum>(logit: A) -> A {
    A::from_f64(1.0 / (1.0 + (-logit.to_f64()).exp()))
}
