//! The read's half of the backward: dh, dv, dβ → dx, and dx → G and dw.
//!
//! ```text
//! dβl = dβ·β(1 − β/2)     dvl = dv·φ'       dh' = dh + dβl·w_β + W_vᵀdvl (z = h)
//! dx  = rstd·(γ·dh' − mean(γ·dh'·x̂)·x̂) + W_vᵀdvl (z = x)
//! dγ += dh'·x̂             dw_β += dβl·h     dW_v += dvl ⊗ z
//! ```

use super::backward::{Part, Scratch};
use super::convert::Accum;
use super::simd::{add_rows, add_scaled, dot, load, mix};
use super::weights::Weights;
use crate::problem::{Read, Sizes};

impl<A: Accum> Part<'_, A> {
    /// dh, dv, dβ of the read → dx of this token; parameter gradients if the token is this part's own.
    #[inline(always)]
    pub(super) fn read_row(
        &mut self,
        read: &Read,
        weights: &Weights<A>,
        token: usize,
        own: bool,
        scratch: &mut Scratch<A>,
    ) {
        let Sizes { d, .. } = self.boundary.sizes;
        let taps = read.taps();
        self.load_read(weights, token, scratch);
        let dgate = self.logit_grads(read, token, &mut scratch.dvalue);
        let Scratch { x, row, dh, dx, dvalue, .. } = scratch;
        let mut sums = self.sums.as_mut().filter(|_| own);
        let from_x = read.value_from_compressed;
        if let (Some(sums), true) = (&mut sums, from_x) {
            add_outer(&mut sums.value, dvalue, x); // before x becomes x̂
        }
        if let Some(weight) = &weights.gate {
            add_scaled(dh, dgate, weight);
        }
        if let (Some(weight), false) = (&weights.value, from_x) {
            add_rows(dh, dvalue, weight);
        }
        self.ahead.step();
        let rstd = self.saved.rstd.as_ref().map_or(A::from_f64(1.0), |rstd| rstd.rows(1).row(token)[0]);
        x.iter_mut().for_each(|x| *x = *x * rstd);
        if let Some(sums) = &mut sums {
            row.iter_mut().zip(&*x).zip(&weights.norm).for_each(|((h, x), norm)| *h = *x * *norm);
            sums.norm.iter_mut().zip(&*dh).zip(&*x).for_each(|((sum, dh), x)| *sum += *dh * *x);
            sums.gate.iter_mut().zip(&*row).for_each(|(sum, h)| *sum += dgate * *h);
            sums.gate_bias += dgate;
            sums.value_bias.iter_mut().zip(&*dvalue).for_each(|(sum, dvalue)| *sum += *dvalue);
            if !from_x {
                add_outer(&mut sums.value, dvalue, row);
            }
        }
        self.ahead.step();
        let dx = &mut dx[token % taps * d..][..d];
        dh.iter_mut().zip(&weights.norm).for_each(|(dh, norm)| *dh = *dh * *norm);
        if read.norm_eps.is_some() {
            let mean = dot(dh, x) / A::from_f64(d as f64);
            dx.iter_mut().zip(&*dh).zip(&*x).for_each(|((dx, dh), x)| *dx = rstd * (*dh - mean * *x));
        } else {
            dx.copy_from_slice(dh);
        }
        if let (Some(weight), true) = (&weights.value, from_x) {
            add_rows(dx, dvalue, weight);
        }
    }

    /// x, as the forward read it, and dh.
    #[inline(always)]
    fn load_read(&self, weights: &Weights<A>, token: usize, scratch: &mut Scratch<A>) {
        let d = self.boundary.sizes.d;
        let Scratch { state, rewritten, x, dh, .. } = scratch;
        let states = if self.boundary.rewrite.is_some() { rewritten } else { state };
        match (&self.saved.compressed, &weights.compress) {
            (Some(saved), _) => load(saved.rows(d), token, 1, x),
            (None, Some(weight)) => mix(x, false, weight, states),
            (None, None) => x.copy_from_slice(states),
        }
        match &self.incoming.context {
            Some(grad) => load(grad.rows(d), token, 1, dh),
            None => dh.fill(A::default()),
        }
    }

    /// dv, dβ → gradients of the linear maps' outputs: fills `dvalue`, returns the gate's.
    #[inline(always)]
    fn logit_grads(&self, read: &Read, token: usize, dvalue: &mut [A]) -> A {
        let m = self.boundary.sizes.m;
        let one = A::from_f64(1.0);
        dvalue.fill(A::default());
        if let (Some(grad), Some(value)) = (&self.incoming.value, &self.saved.value) {
            dvalue.copy_from_slice(grad.rows(m).row(token));
            if let Some(scale) = read.value_scale {
                let value = value.rows(m).row::<A>(token);
                let slope = |v: A| v * (one - v / A::from_f64(scale));
                dvalue.iter_mut().zip(value).for_each(|(dvalue, v)| *dvalue = *dvalue * slope(*v));
            }
        }
        match (&self.incoming.gate, &self.saved.gate) {
            (Some(grad), Some(gate)) => {
                let gate = gate.rows(1).row::<A>(token)[0];
                grad.rows(1).row::<A>(token)[0] * gate * (one - gate * A::from_f64(0.5))
            }
            _ => A::default(),
        }
    }

    /// G_t += Σ_s dx_{t+s} ⊗ w_s and dw_s += dx_{t+s} ⊗ X'_t, over the `after` tokens that exist.
    #[inline(always)]
    pub(super) fn compress_row(
        &mut self,
        weights: &Weights<A>,
        token: usize,
        after: usize,
        scratch: &mut Scratch<A>,
    ) {
        let Scratch { state, rewritten, grad, dx, .. } = scratch;
        let states = if self.boundary.rewrite.is_some() { rewritten } else { state };
        let d = self.boundary.sizes.d;
        let taps = dx.len() / d;
        let Some(weight) = &weights.compress else {
            return add_scaled(grad, A::from_f64(1.0), dx);
        };
        let Some(sums) = self.sums.as_mut() else { return };
        let size = states.len();
        for tap in 0..after {
            let dx = &dx[(token + tap) % taps * d..][..d];
            let weight = &weight[tap * size..][..size];
            let sum = &mut sums.compress[tap * size..][..size];
            for first in (0..size).step_by(d) {
                self.ahead.step();
                let channel = first..first + d;
                let (weight, states) = (&weight[channel.clone()], &states[channel.clone()]);
                let (grad, sum) = (&mut grad[channel.clone()], &mut sum[channel]);
                for ((((grad, sum), dx), weight), state) in
                    grad.iter_mut().zip(sum).zip(dx).zip(weight).zip(states)
                {
                    *grad += *weight * *dx;
                    *sum += *state * *dx;
                }
            }
        }
    }
}

/// sumsⱼ += scaleⱼ · row
#[inline(always)]
fn add_outer<A: Accum>(sums: &mut [A], scale: &[A], row: &[A]) {
    sums.chunks_exact_mut(row.len()).zip(scale).for_each(|(sum, scale)| add_scaled(sum, *scale, row));
}
