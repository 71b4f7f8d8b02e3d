//! The scalars of one rewrite of a token, and its vectors over the value channels.
//!
//! A rewrite adds k (s t)ᵀ to X, with the target t = a v − b p. For the delta rule a = b = 1 and s = β r, so that t is the
//! error v − p. If nothing is erased, a = β, b = α = 0 and s = r.

use crate::cpu::simd::convert::Accum;
use crate::problem::Erase;

/// The coefficients of one rewrite.
#[derive(Clone, Copy)]
pub(super) struct Coefficients<A> {
    /// a, of v
    value: A,
    /// b, of p
    readout: A,
    /// s
    pub(super) scale: A,
    /// α r
    pub(super) erasure: A,
}

impl<A: Accum> Coefficients<A> {
    #[inline(always)]
    pub(super) fn new(erase: Erase, beta: A, r: A) -> Self {
        let (zero, one) = (A::default(), A::from_f64(1.0));
        match erase {
            Erase::Tied => Coefficients { value: one, readout: one, scale: beta * r, erasure: beta * r },
            Erase::None => Coefficients { value: beta, readout: zero, scale: r, erasure: zero * r },
        }
    }

    /// t of a channel
    #[inline(always)]
    fn target(&self, value: A, readout: A) -> A {
        self.value * value - self.readout * readout
    }

    /// s t of a channel
    #[inline(always)]
    pub(super) fn factor(&self, value: A, readout: A) -> A {
        self.scale * self.target(value, readout)
    }
}

/// One of a token's rewrites, for its gradients.
pub(super) struct OneRewrite<'t, A> {
    pub(super) of: Coefficients<A>,
    /// v [m]
    pub(super) value: &'t [A],
    /// p [m]
    pub(super) readout: &'t [A],
    /// β
    pub(super) gate: A,
    pub(super) r: A,
}

impl<A: Accum> OneRewrite<'_, A> {
    /// Fills s t.
    #[inline(always)]
    pub(super) fn fill_factors(&self, factors: &mut [A]) {
        for ((factor, value), readout) in factors.iter_mut().zip(self.value).zip(self.readout) {
            *factor = self.of.factor(*value, *readout);
        }
    }

    /// t·g and p·g
    #[inline(always)]
    pub(super) fn target_and_readout_along(&self, g: &[A]) -> [A; 2] {
        let parts = g.iter().zip(self.value).zip(self.readout);
        parts.fold([A::default(); 2], |[target, readout], ((g, value), p)| {
            [target + *g * self.of.target(*value, *p), readout + *g * *p]
        })
    }

    /// v·g
    #[inline(always)]
    pub(super) fn value_along(&self, g: &[A]) -> A {
        g.iter().zip(self.value).fold(A::default(), |sum, (g, value)| sum + *g * *value)
    }

    /// Fills α r g.
    #[inline(always)]
    pub(super) fn fill_back(&self, g: &[A], back: &mut [A]) {
        back.iter_mut().zip(g).for_each(|(back, g)| *back = self.of.erasure * *g);
    }

    /// −r² k̂ᵀdk̂, the coefficient of k in dk, from t·g and p·g: k̂ᵀdk̂ = s/r (t·g − b p·g) needs no further reduction.
    #[inline(always)]
    pub(super) fn on_k(&self, target: A, readout: A) -> A {
        A::default() - self.r * (self.of.scale * (target - self.of.readout * readout))
    }
}
