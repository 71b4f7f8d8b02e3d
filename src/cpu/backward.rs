//! `rewrite`, `read` and `rewrite_read`, backward, one token row at a time.
//!
//! Moved per token: G, X, k and dh in, dX and dk out — (3m + 3)·d elements. X' is rebuilt in cache from
//! X, k, e and β. A read over time keeps a ring of K values of dx, computed K−1 tokens ahead of dX: the
//! tokens after the part need dx alone, so their dh, x and rstd, not their X or G.
//!
//! With G = ∂L/∂X', k̂ = r·k, e = v − p and the read's dx:
//!
//! ```text
//! G  += dx ⊗ w           g   = k̂ᵀG              dX = G − β k̂ gᵀ
//! dv  = β g              dβ  = g·e              dk = r (dk̂ − k̂ · β(g·e − p·g)),  dk̂ = β (G e − X g)
//! ```

use std::ops::Range;

use super::buffer::{Buffer, Result};
use super::convert::Accum;
use super::forward::Outputs;
use super::simd::{Kernel, dispatch, dot, load, round_to, set_scaled_sum, store};
use super::weights::{Sums, Weights, reverse_axes, store_all};
use super::{parallel, split, useful_threads, within_sequences};
use crate::problem::{Boundary, Read, Rewrite, Sizes};
use crate::tensor::{Ahead, RowsMut, Tensor};

/// Incoming gradients of X', h, v and β; `None` is zero.
#[derive(Default)]
pub struct Incoming {
    pub state: Option<Tensor>,
    pub context: Option<Tensor>,
    pub value: Option<Tensor>,
    pub gate: Option<Tensor>,
}

/// Gradients to fill: of the state, of the rewrite's inputs, of the read's parameters.
#[derive(Default)]
pub struct Gradients {
    pub state: Option<Tensor>,
    pub direction: Option<Tensor>,
    pub value: Option<Tensor>,
    pub gate: Option<Tensor>,
    pub compress: Option<Tensor>,
    pub norm_weight: Option<Tensor>,
    pub gate_weight: Option<Tensor>,
    pub gate_bias: Option<Tensor>,
    pub value_weight: Option<Tensor>,
    pub value_bias: Option<Tensor>,
}

/// Runs a boundary backward on `threads` threads; `saved` is what the forward filled.
pub fn backward<A: Accum>(
    boundary: &Boundary,
    saved: &Outputs,
    incoming: &Incoming,
    gradients: &mut Gradients,
    threads: usize,
) -> Result<()> {
    let Sizes { d, m, .. } = boundary.sizes;
    let taps = boundary.read.as_ref().map_or(1, Read::taps);
    let bounds = parallel::partition(boundary.sizes.tokens(), taps);
    let read = boundary.read.as_ref().filter(|_| boundary.sizes.tokens() > 0);
    let weights = read.map(|read| Weights::<A>::new(read, boundary.sizes)).transpose()?;
    let mut sums: Vec<Option<Sums<A>>> = bounds[1..].iter().map(|_| None).collect();
    {
        let mut states = split(&mut gradients.state, d * m, &bounds);
        let mut directions = split(&mut gradients.direction, d, &bounds);
        let mut values = split(&mut gradients.value, m, &bounds);
        let mut gates = split(&mut gradients.gate, 1, &bounds);
        let parts: Vec<Part<'_, A>> = bounds
            .windows(2)
            .zip(&mut sums)
            .map(|(pair, sums)| Part {
                boundary,
                weights: weights.as_ref(),
                saved,
                incoming,
                tokens: pair[0]..pair[1],
                state: states(),
                direction: directions(),
                value: values(),
                gate: gates(),
                sums,
                ahead: Ahead::default(),
            })
            .collect();
        parallel::for_each(parts, useful_threads(boundary.state.len(), threads), dispatch)?;
    }
    store_parameters(boundary, sums.into_iter().flatten(), gradients)
}

/// Adds the parts in their order, whoever computed them, and stores the parameters' gradients.
fn store_parameters<A: Accum>(
    boundary: &Boundary,
    mut sums: impl Iterator<Item = Sums<A>>,
    to: &mut Gradients,
) -> Result<()> {
    let Some(read) = &boundary.read else { return Ok(()) };
    let Sizes { d, m, .. } = boundary.sizes;
    let no_tokens = || Sums::zeros(read, boundary.sizes);
    let mut total = sums.next().map_or_else(no_tokens, Ok)?;
    sums.for_each(|part| total.add(&part));
    store_all(&mut to.compress, &reverse_axes(&total.compress, [read.taps(), m, d])?);
    store_all(&mut to.norm_weight, &total.norm);
    store_all(&mut to.gate_weight, &total.gate);
    store_all(&mut to.gate_bias, &[total.gate_bias]);
    store_all(&mut to.value_weight, &total.value);
    store_all(&mut to.value_bias, &total.value_bias);
    Ok(())
}

/// Consecutive tokens, the rows of every gradient that belong to them, and their parameter sums.
pub(super) struct Part<'a, A> {
    pub(super) boundary: &'a Boundary,
    pub(super) weights: Option<&'a Weights<A>>,
    pub(super) saved: &'a Outputs,
    pub(super) incoming: &'a Incoming,
    pub(super) tokens: Range<usize>,
    pub(super) state: Option<RowsMut<'a>>,
    pub(super) direction: Option<RowsMut<'a>>,
    pub(super) value: Option<RowsMut<'a>>,
    pub(super) gate: Option<RowsMut<'a>>,
    pub(super) sums: &'a mut Option<Sums<A>>,
    pub(super) ahead: Ahead,
}

/// One token's rows, widened.
pub(super) struct Scratch<A> {
    /// X [m][d]
    pub(super) state: Buffer<A>,
    /// X' [m][d], where there is a rewrite
    pub(super) rewritten: Buffer<A>,
    /// G, then dX [m][d]
    pub(super) grad: Buffer<A>,
    /// k [d]
    pub(super) direction: Buffer<A>,
    /// x, then x̂ [d]
    pub(super) x: Buffer<A>,
    /// h, and later dk̂ [d]
    pub(super) row: Buffer<A>,
    /// dh' [d]
    pub(super) dh: Buffer<A>,
    /// dx of this token and the K−1 after it [K][d], token t in slot t mod K
    pub(super) dx: Buffer<A>,
    /// gradient of the value's linear map [m]
    pub(super) dvalue: Buffer<A>,
}

impl<A: Accum> Scratch<A> {
    fn new(d: usize, m: usize, taps: usize) -> Result<Scratch<A>> {
        let zeros = |rows: usize| Buffer::zeros(rows * d);
        Ok(Scratch {
            state: zeros(m)?,
            rewritten: zeros(m)?,
            grad: zeros(m)?,
            direction: zeros(1)?,
            x: zeros(1)?,
            row: zeros(1)?,
            dh: zeros(1)?,
            dx: zeros(taps)?,
            dvalue: Buffer::zeros(m)?,
        })
    }
}

impl<A: Accum> Kernel for Part<'_, A> {
    type Output = Result<()>;
    #[inline(always)]
    fn run(mut self) -> Result<()> {
        let boundary = self.boundary;
        let Sizes { time, d, m, .. } = boundary.sizes;
        if self.tokens.is_empty() {
            return Ok(()); // before scratch is made for a width that no memory stands behind
        }
        let taps = boundary.read.as_ref().map_or(1, Read::taps);
        // Scratch before the sums that outlive it: the next part's then lies in the same, warm, memory.
        let mut scratch = Scratch::new(d, m, taps)?;
        *self.sums = boundary.read.as_ref().map(|read| Sums::zeros(read, boundary.sizes)).transpose()?;
        for (tokens, sequence) in within_sequences(self.tokens.clone(), time.max(1)) {
            // A read over time gives x_t gradients of h_t … h_{t+K−1}: dx runs K−1 tokens ahead of dX.
            let ahead = taps - 1;
            let mut next = tokens.start;
            for token in tokens.clone() {
                self.load_token(token, &mut scratch);
                if let (Some(read), Some(weights)) = (&boundary.read, self.weights) {
                    while next < sequence.end.min(token + ahead + 1) {
                        self.read_row(read, weights, next, next < tokens.end, &mut scratch);
                        next += 1;
                    }
                    self.compress_row(weights, token, next - token, &mut scratch);
                }
                self.rewrite_row(token, &mut scratch);
            }
        }
        Ok(())
    }
}

impl<'a, A: Accum> Part<'a, A> {
    /// X, k and G of an own token, and X' rebuilt as the forward stored it.
    #[inline(always)]
    fn load_token(&mut self, token: usize, scratch: &mut Scratch<A>) {
        let Sizes { d, m, .. } = self.boundary.sizes;
        self.ahead = self.rows_ahead(token + 1);
        load(self.boundary.state.rows(d * m), token, m, &mut scratch.state);
        match &self.incoming.state {
            Some(grad) => load(grad.rows(d * m), token, m, &mut scratch.grad),
            None => scratch.grad.fill(A::default()),
        }
        let Some(rewrite) = &self.boundary.rewrite else { return };
        load(rewrite.direction.rows(d), token, 1, &mut scratch.direction);
        if self.boundary.read.is_none() {
            return;
        }
        let (r, readout, value, gate) = self.rewrite_scalars(rewrite, token);
        let Scratch { state, rewritten, direction, .. } = scratch;
        for (j, channel) in rewritten.chunks_exact_mut(d).enumerate() {
            let scale = gate * r * (value[j] - readout[j]);
            set_scaled_sum(channel, &state[j * d..(j + 1) * d], scale, direction);
            self.ahead.step();
        }
        round_to(self.boundary.state.dtype, &mut scratch.rewritten);
    }

    /// What the next token will load and store.
    #[inline(always)]
    fn rows_ahead(&self, token: usize) -> Ahead {
        let Sizes { d, m, .. } = self.boundary.sizes;
        let spans = [
            Some(self.boundary.state.rows(d * m).span(token)),
            self.incoming.state.as_ref().map(|grad| grad.rows(d * m).span(token)),
            self.incoming.context.as_ref().map(|grad| grad.rows(d).span(token)),
            self.boundary.rewrite.as_ref().map(|rewrite| rewrite.direction.rows(d).span(token)),
            self.state.as_ref().map(|rows| rows.span(token)),
            self.direction.as_ref().map(|rows| rows.span(token)),
        ];
        Ahead::new(spans.map(Option::unwrap_or_default), 5 * m + 4)
    }

    /// (r, p, v, β) of a token.
    #[inline(always)]
    fn rewrite_scalars(&self, rewrite: &'a Rewrite, token: usize) -> (A, &'a [A], &'a [A], A) {
        let m = self.boundary.sizes.m;
        let stats: &[A] = self.saved.stats.as_ref().map_or(&[], |stats| stats.rows(1 + m).row(token));
        let value = rewrite.value.rows(m).row::<A>(token);
        (stats[0], &stats[1..], value, rewrite.gate.rows(1).row::<A>(token)[0])
    }

    /// G → dX, dk, dv, dβ of this token.
    #[inline(always)]
    fn rewrite_row(&mut self, token: usize, scratch: &mut Scratch<A>) {
        let Sizes { d, m, .. } = self.boundary.sizes;
        let Scratch { state, grad, direction: k, row: dk, .. } = scratch;
        if let Some(rewrite) = &self.boundary.rewrite {
            let (r, readout, value, gate) = self.rewrite_scalars(rewrite, token);
            let (mut g_e, mut g_p) = (A::default(), A::default());
            dk.fill(A::default());
            for j in 0..m {
                let (state, grad) = (&state[j * d..(j + 1) * d], &mut grad[j * d..(j + 1) * d]);
                let g = r * dot(k, grad);
                self.ahead.step();
                let error = value[j] - readout[j];
                g_e += g * error;
                g_p += g * readout[j];
                if let Some(dvalue) = &mut self.value {
                    dvalue.row::<A>(token)[j] = gate * g;
                }
                let scale = gate * r * g;
                self.ahead.step();
                for (((dk, grad), state), k) in dk.iter_mut().zip(grad).zip(state).zip(&*k) {
                    *dk += *grad * error - *state * g;
                    *grad = *grad - scale * *k;
                }
            }
            if let Some(dgate) = &mut self.gate {
                dgate.row::<A>(token)[0] = g_e;
            }
            if let Some(stored) = &mut self.direction {
                let along = r * gate * (g_e - g_p); // k̂ᵀdk̂, without another reduction
                dk.iter_mut().zip(&*k).for_each(|(dk, k)| *dk = r * (gate * *dk - along * *k));
                store(stored, token, 1, dk);
            }
        }
        if let Some(stored) = &mut self.state {
            store(stored, token, m, grad);
        }
    }
}
