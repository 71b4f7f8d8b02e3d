//! The small numbers of one of a token's rewrites: what times k is added to X, and what its gradients need.
//!
//! With e = v − p the delta rule adds β r e; with a gate α of its own, or with none, r (β v − α p).

use crate::cpu::simd::convert::Accum;
use crate::problem::Erase;

/// What a rewrite erases.
#[derive(Clone, Copy)]
pub(super) enum Erased<A> {
    /// α = β
    Tied,
    Nothing,
    /// α
    Apart(A),
}

impl<A: Accum> Erased<A> {
    /// Of rewrite `index` of n, whose gates are β [n] and then, if it is a gate of its own, α [n].
    #[inline(always)]
    pub(super) fn new(erase: Erase, gates: &[A], index: usize, rewrites: usize) -> Self {
        match erase {
            Erase::Tied => Erased::Tied,
            Erase::Nothing => Erased::Nothing,
            Erase::Apart => Erased::Apart(gates[rewrites + index]),
        }
    }
}

/// One of a token's rewrites.
pub(super) struct OneRewrite<'t, A> {
    /// v [m]
    pub(super) value: &'t [A],
    /// β
    pub(super) gate: A,
    pub(super) erased: Erased<A>,
    /// r; 1 if k̂ = k
    pub(super) r: A,
    pub(super) normalised: bool,
    /// p [m]
    pub(super) readout: &'t [A],
    /// k·kᵢ with the k of each earlier rewrite
    pub(super) k_products: &'t [A],
}

impl<A: Accum> OneRewrite<'_, A> {
    /// What the target is multiplied with: β r, or r.
    #[inline(always)]
    pub(super) fn scale(&self) -> A {
        match self.erased {
            Erased::Tied => self.gate * self.r,
            Erased::Nothing | Erased::Apart(_) => self.r,
        }
    }

    /// α r
    #[inline(always)]
    pub(super) fn erasure(&self) -> A {
        match self.erased {
            Erased::Tied => self.gate * self.r,
            Erased::Nothing => A::default(),
            Erased::Apart(alpha) => alpha * self.r,
        }
    }

    /// e, or β v − α p, of a channel.
    #[inline(always)]
    fn target(&self, channel: usize) -> A {
        let (value, readout) = (self.value[channel], self.readout[channel]);
        match self.erased {
            Erased::Tied => value - readout,
            Erased::Nothing => self.gate * value,
            Erased::Apart(alpha) => self.gate * value - alpha * readout,
        }
    }

    /// Fills what times k is added to each channel.
    #[inline(always)]
    pub(super) fn fill_factors(&self, factors: &mut [A]) {
        let scale = self.scale();
        for (channel, factor) in factors.iter_mut().enumerate() {
            *factor = scale * self.target(channel);
        }
    }

    /// The target's product with g.
    #[inline(always)]
    pub(super) fn target_along(&self, g: &[A]) -> A {
        g.iter().enumerate().fold(A::default(), |sum, (channel, g)| sum + *g * self.target(channel))
    }

    /// p·g
    #[inline(always)]
    fn readout_along(&self, g: &[A]) -> A {
        g.iter().zip(self.readout).fold(A::default(), |sum, (g, readout)| sum + *g * *readout)
    }

    /// dβ, and dα if it is a gate of its own.
    #[inline(always)]
    pub(super) fn grad_gates(&self, g: &[A]) -> (A, Option<A>) {
        match self.erased {
            Erased::Tied => (self.target_along(g), None),
            Erased::Nothing => (self.value_along(g), None),
            Erased::Apart(_) => (self.value_along(g), Some(A::default() - self.readout_along(g))),
        }
    }

    /// v·g
    #[inline(always)]
    fn value_along(&self, g: &[A]) -> A {
        g.iter().zip(self.value).fold(A::default(), |sum, (g, value)| sum + *g * *value)
    }

    /// −r² k̂ᵀdk̂, the coefficient of k in dk, which needs no other reduction: of the delta rule k̂ᵀdk̂ = β (g·e − p·g), else
    /// g·(β v − α p) − α p·g.
    #[inline(always)]
    pub(super) fn on_k(&self, g: &[A]) -> A {
        if !self.normalised {
            return A::default();
        }
        let along = self.target_along(g);
        let along_k = match self.erased {
            Erased::Tied => self.r * self.gate * (along - self.readout_along(g)),
            Erased::Nothing => self.r * along,
            Erased::Apart(alpha) => self.r * (along - alpha * self.readout_along(g)),
        };
        A::default() - self.r * along_k
    }
}
