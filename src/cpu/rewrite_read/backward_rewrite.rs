//! The rewrite's half of the backward, row by row: X' recomputed, dX and dk.

use super::forward::{rewrite_in_place, rewrite_row};
use crate::cpu::simd::channels::view;
use crate::cpu::simd::convert::Accum;
use crate::cpu::simd::row::{add_two_scaled, set_scaled_sum, set_three_scaled};
use crate::tensor::{Ahead, Tensor};

/// A token's rewrite: k, v, β, and the r and p that the forward saved.
pub(super) struct Factors<'t, A> {
    pub(super) k: &'t [A],
    pub(super) r: A,
    /// p
    pub(super) readout: &'t [A],
    pub(super) value: &'t [A],
    pub(super) gate: A,
}

impl<'t, A: Accum> Factors<'t, A> {
    /// The factors of one token, from the rewrite's k, v and β and the r and p that its forward saved; `direction` is
    /// scratch.
    #[inline(always)]
    pub(super) fn new(
        [k, v, gate, stats]: [&'t Tensor; 4],
        token: usize,
        m: usize,
        direction: &'t mut [A],
    ) -> Self {
        let stats = stats.rows(1 + m).row(token);
        Factors {
            r: stats[0],
            readout: &stats[1..],
            value: v.rows(m).row(token),
            gate: gate.rows(1).row(token)[0],
            k: view(k.rows(direction.len()), token, 1, direction),
        }
    }

    /// X' = X + k ⊗ scales, as the forward computed it; `scales` is scratch.
    #[inline(always)]
    pub(super) fn rewrite(&self, to: &mut [A], states: &[A], scales: &mut [A], ahead: &mut Ahead) {
        self.fill_scales(scales);
        rewrite_row(to, states, scales, self.k, ahead);
    }

    /// X += k ⊗ scales, to the same bits; `scales` is scratch.
    #[inline(always)]
    pub(super) fn rewrite_in_place(&self, states: &mut [A], scales: &mut [A], ahead: &mut Ahead) {
        self.fill_scales(scales);
        rewrite_in_place(states, scales, self.k, ahead);
    }

    #[inline(always)]
    fn fill_scales(&self, scales: &mut [A]) {
        for ((scale, value), readout) in scales.iter_mut().zip(self.value).zip(self.readout) {
            *scale = self.gate * self.r * (*value - *readout);
        }
    }

    /// dX = G − β k̂ gᵀ
    #[inline(always)]
    pub(super) fn grad_state(&self, to: &mut [A], grads: &[A], along: &[A], ahead: &mut Ahead) {
        let (d, scale) = (self.k.len(), A::default() - self.gate * self.r);
        for ((to, grad), g) in to.chunks_exact_mut(d).zip(grads.chunks_exact(d)).zip(along) {
            set_scaled_sum(to, grad, scale * *g, self.k);
            ahead.step();
        }
    }

    /// dk = β r (G e − X g) + on_k · k
    #[inline(always)]
    pub(super) fn grad_direction(&self, dk: &mut [A], on_k: A, states: &[A], grads: &[A], along: &[A]) {
        let (d, scale) = (self.k.len(), self.gate * self.r);
        for (j, (grad, state)) in grads.chunks_exact(d).zip(states.chunks_exact(d)).enumerate() {
            let on_grad = scale * (self.value[j] - self.readout[j]);
            let on_state = A::default() - scale * along[j];
            match j {
                0 => set_three_scaled(dk, [on_grad, on_state, on_k], [grad, state, self.k]),
                _ => add_two_scaled(dk, [on_grad, on_state], [grad, state]),
            }
        }
    }
}
