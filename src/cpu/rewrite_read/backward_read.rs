//! The read's half of the backward: dh, dv, dβ → dx, and dx → G and dw.
//!
//! ```text
//! dβl = dβ·β(1 − β/2)     dvl = dv·φ'       dh' = dh + dβl·w_β + W_vᵀdvl (z = h)
//! dx  = rstd·(γ·dh' − mean(γ·dh'·x̂)·x̂) + W_vᵀdvl (z = x)
//! dγ += dh'·x̂             dw_β += dβl·h     dW_v += dvl ⊗ z
//! ```
//!
//! x̂ = rstd·x and h = γ·x̂, so every sum over tokens is of multiples of x or dh·x. γ, and the terms that
//! dh' adds to dh, are applied after the last token ([`Sums::store`]).

use std::ops::Range;

use fearless_simd::Simd;

use super::weights::{Sums, Weights};
use crate::cpu::buffer::{Buffer, Result};
use crate::cpu::simd::channels::view;
use crate::cpu::simd::convert::Accum;
use crate::cpu::simd::row::{add_product, add_rows, add_scaled, mix, set_product, some_dots};
use crate::problem::{Incoming, Outputs, Read};
use crate::tensor::Ahead;

/// A read, the tensors that its forward saved, and the incoming gradients.
pub(super) struct ReadBackward<'a, A> {
    pub(super) read: &'a Read,
    pub(super) weights: &'a Weights<A>,
    pub(super) saved: &'a Outputs,
    pub(super) incoming: &'a Incoming,
}

/// One token's rows, used if they cannot be worked on in place.
pub(super) struct ReadScratch<A> {
    /// x [d]
    x: Buffer<A>,
    /// the incoming dh, or zeros [d]
    incoming: Buffer<A>,
    /// γ·dh' [d]
    normed: Buffer<A>,
    /// dβl and dvl, if the read computes β and v [n·(1 + m)]
    logits: Buffer<A>,
    /// dx of this token and the K−1 after it [K][d], token t in slot t mod K
    pub(super) dx: Buffer<A>,
}

impl<A: Accum> ReadScratch<A> {
    pub(super) fn new(d: usize, logits: usize, taps: usize) -> Result<ReadScratch<A>> {
        Ok(ReadScratch {
            x: Buffer::zeros(d)?,
            incoming: Buffer::zeros(d)?,
            normed: Buffer::zeros(d)?,
            logits: Buffer::zeros(logits)?,
            dx: Buffer::zeros(taps * d)?,
        })
    }
}

impl<A: Accum> ReadBackward<'_, A> {
    /// Computes a token's dx from its dh, dv and dβ, and adds to the parameter gradients if `sums` is given.
    /// `state` is used only if x was not saved.
    #[inline(always)]
    pub(super) fn row<S: Simd>(
        &self,
        simd: S,
        token: usize,
        state: &[A],
        sums: Option<&mut Sums<A>>,
        scratch: &mut ReadScratch<A>,
    ) {
        let weights = self.weights;
        let ReadScratch { x, incoming, normed, logits, dx } = scratch;
        let d = x.len();
        let x = match (&self.saved.compressed, &weights.compress) {
            (Some(saved), _) => view(saved.rows(d), token, 1, x),
            (None, Some(weight)) => {
                mix(x, false, weight, state);
                x
            }
            (None, None) => state,
        };
        let dh = match &self.incoming.grad_context {
            Some(grad) => view(grad.rows(d), token, 1, incoming),
            None => incoming,
        };
        let rstd = self.saved.rstd.as_ref().map_or(A::from_f64(1.0), |rstd| rstd.rows(1).row(token)[0]);
        let logits = &mut logits[..weights.logits.len() / d];
        self.logit_grads(token, logits);
        let (from_h, from_x) = logits.split_at(weights.logits_of_context(self.read));
        set_product(normed, &weights.norm, dh);
        add_rows(normed, from_h, &weights.logits);
        if let Some(sums) = sums {
            sums.add_token(x, rstd, dh, from_h, from_x);
        }
        let dx = &mut dx[token % self.read.taps() * d..][..d];
        if self.read.norm_eps.is_some() {
            let mean = rstd * some_dots(simd, normed, [x])[0] / A::from_f64(d as f64);
            let on_x = rstd * mean;
            dx.iter_mut()
                .zip(&*normed)
                .zip(x)
                .for_each(|((dx, normed), x)| *dx = rstd * (*normed - on_x * *x));
        } else {
            dx.copy_from_slice(normed);
        }
        add_rows(dx, from_x, &weights.logits[from_h.len() * d..]);
    }

    /// Computes the gradients of the linear maps' outputs from dv and dβ.
    #[inline(always)]
    fn logit_grads(&self, token: usize, logits: &mut [A]) {
        let one = A::from_f64(1.0);
        logits.fill(A::default());
        let (gate_logits, value_logits) = logits.split_at_mut(self.weights.gates);
        let m = value_logits.len();
        if let (Some(grad), Some(value)) = (&self.incoming.grad_new_value, &self.saved.new_value) {
            value_logits.copy_from_slice(grad.rows(m).row(token));
            if let Some(scale) = self.read.value_scale {
                let value = value.rows(m).row::<A>(token);
                let slope = |v: A| v * (one - v / A::from_f64(scale));
                value_logits.iter_mut().zip(value).for_each(|(logit, v)| *logit *= slope(*v));
            }
        }
        if let (Some(grad), Some(gate)) = (&self.incoming.grad_new_gate, &self.saved.new_gate) {
            let gates = gate_logits.len();
            let (grad, gate) = (grad.rows(gates).row::<A>(token), gate.rows(gates).row::<A>(token));
            for ((logit, grad), gate) in gate_logits.iter_mut().zip(grad).zip(gate) {
                *logit = *grad * *gate * (one - *gate * A::from_f64(0.5));
            }
        }
    }

    /// G_t += Σ_s dx_{t+s} ⊗ w_s and dw_s += dx_{t+s} ⊗ X'_t, over the tokens t + s that exist.
    #[inline(always)]
    pub(super) fn compress_row(
        &self,
        tokens: Range<usize>,
        state: &[A],
        sums: &mut Sums<A>,
        dx: &[A],
        grad: &mut [A],
        ahead: &mut Ahead,
    ) {
        let Some(weight) = &self.weights.compress else {
            ahead.step();
            return add_scaled(grad, A::from_f64(1.0), dx);
        };
        let (size, taps) = (state.len(), self.read.taps());
        let d = dx.len() / taps;
        for (tap, token) in tokens.enumerate() {
            let dx = &dx[token % taps * d..][..d];
            let of_tap = tap * size..(tap + 1) * size;
            let (weight, mut sum) = (&weight[of_tap.clone()], sums.compress.get_mut(of_tap));
            for first in (0..size).step_by(d) {
                let channel = first..first + d;
                let (weight, state) = (&weight[channel.clone()], &state[channel.clone()]);
                let grad = &mut grad[channel.clone()];
                match &mut sum {
                    Some(sum) => add_products(grad, &mut sum[channel], dx, weight, state),
                    None => add_product(grad, weight, dx),
                }
                ahead.step();
            }
        }
    }
}

/// grad += weight ⊙ dx and sum += state ⊙ dx
#[inline(always)]
fn add_products<A: Accum>(grad: &mut [A], sum: &mut [A], dx: &[A], weight: &[A], state: &[A]) {
    for ((((grad, sum), dx), weight), state) in grad.iter_mut().zip(sum).zip(dx).zip(weight).zip(state) {
        *grad += *weight * *dx;
        *sum += *state * *dx;
    }
}
