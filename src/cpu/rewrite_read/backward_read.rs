//! The read's half of the backward: dh, dv', dβ' → dx, in the letters of docs/mathematics.md.
//!
//! ```text
//! δ_β = dβ'·β'(1 − β'/2)   δ_v = dv'·φ'      dh' = dh + δ_β·w_β + W_vᵀδ_v (z = h)
//! u = γ·dh'                c = mean(u·x̂)     dx = rstd·(u − c·x̂) + W_vᵀδ_v (z = x)
//! dγ += dh'·x̂              dw_β += δ_β·h     dW_v += δ_v ⊗ z
//! ```
//!
//! x̂ = rstd·x and h = γ·x̂, so every sum over tokens is of multiples of x or dh·x. γ, and the terms that
//! dh' adds to dh, are applied after the last token ([`Sums::store`]).

use fearless_simd::prelude::*;

use super::weights::{Sums, Weights, slot};
use crate::cpu::buffer::{Buffer, Result};
use crate::cpu::simd::convert::Accum;
use crate::cpu::simd::features::view;
use crate::cpu::simd::row::{add_rows, update};
use crate::problem::{Incoming, Read, Saved};

/// A read, the tensors that its forward saved, and the incoming gradients.
pub(super) struct ReadBackward<'a, A> {
    pub(super) read: &'a Read,
    /// K
    pub(super) taps: usize,
    pub(super) weights: &'a Weights<A>,
    pub(super) saved: &'a Saved,
    pub(super) incoming: &'a Incoming,
}

/// One token's rows, used if they cannot be worked on in place.
pub(super) struct ReadScratch<A> {
    /// x [d]
    pub(super) x: Buffer<A>,
    /// the incoming dh, or zeros [d]
    incoming: Buffer<A>,
    /// u [d]
    u: Buffer<A>,
    /// δ_β, δ_α and δ_v, if the read computes β', α' and v'
    grad_logits: Buffer<A>,
    /// dx of this token and the K−1 after it [K][d], token t in slot t mod K
    pub(super) dx: Buffer<A>,
}

impl<A: Accum> ReadScratch<A> {
    pub(super) fn new(d: usize, logits: usize, taps: usize) -> Result<ReadScratch<A>> {
        Ok(ReadScratch {
            x: Buffer::zeros(d)?,
            incoming: Buffer::zeros(d)?,
            u: Buffer::zeros(d)?,
            grad_logits: Buffer::zeros(logits)?,
            dx: Buffer::zeros(taps * d)?,
        })
    }
}

impl<A: Accum> ReadBackward<'_, A> {
    /// Computes a token's dx from its dh, dv' and dβ', and adds to the parameter gradients if `sums` is given.
    /// Unless it was saved, x is `x`, or in scratch.
    #[inline(always)]
    pub(super) fn row<S: Simd>(
        &self,
        simd: S,
        token: usize,
        x: Option<&[A]>,
        sums: Option<&mut Sums<A>>,
        scratch: &mut ReadScratch<A>,
    ) {
        let weights = self.weights;
        let ReadScratch { x: in_scratch, incoming, u, grad_logits, dx } = scratch;
        let d = in_scratch.len();
        let x = match &self.saved.compressed {
            Some(saved) => view(saved.rows(d), token, in_scratch),
            None => x.unwrap_or(in_scratch),
        };
        let dh = match &self.incoming.grad_context {
            Some(grad) => {
                grad.rows(d).fetch(token + 1);
                view(grad.rows(d), token, incoming)
            }
            None => incoming,
        };
        let rstd = self.saved.rstd.as_ref().map_or(A::from_f64(1.0), |rstd| rstd.rows(1).row(token)[0]);
        let grad_logits = &mut grad_logits[..weights.logit_rows];
        self.fill_grad_logits(token, grad_logits);
        let (from_h, from_x) = grad_logits.split_at(weights.logits_of_context(self.read));
        let start = Some([&*weights.norm, dh]);
        let u_x = add_rows(simd, u, start, [from_h, &weights.logit_weights], x);
        let dx = &mut dx[slot(self.taps, token) * d..][..d];
        if self.read.norm_eps.is_some() {
            let c = rstd * u_x / A::from_f64(d as f64);
            let [rstd, on_x] = [rstd, rstd * c].map(|number| A::Vector::<S>::splat(simd, number));
            update(
                simd,
                dx,
                [u, x],
                #[inline(always)]
                |_, [u, x]| rstd * (u - on_x * x),
            );
        } else {
            dx.copy_from_slice(u);
        }
        if !from_x.is_empty() {
            add_rows(simd, dx, None, [from_x, &weights.logit_weights[from_h.len() * d..]], x);
        }
        if let Some(sums) = sums {
            sums.add_token(simd, [x, dh], rstd, grad_logits, weights.logits_of_context(self.read));
        }
    }

    /// Computes δ_β and δ_v, the gradients of the linear maps' outputs, from dv' and dβ'.
    #[inline(always)]
    fn fill_grad_logits(&self, token: usize, grad_logits: &mut [A]) {
        let one = A::from_f64(1.0);
        grad_logits.fill(A::default());
        let (gate_logits, value_logits) = grad_logits.split_at_mut(self.weights.gates);
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
}
