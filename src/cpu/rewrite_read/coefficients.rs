//! The scalars of one rewrite of a token.
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
    pub(super) readout: A,
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
    pub(super) fn target(&self, value: A, readout: A) -> A {
        self.value * value - self.readout * readout
    }

    /// s t of a channel
    #[inline(always)]
    pub(super) fn factor(&self, value: A, readout: A) -> A {
        self.scale * self.target(value, readout)
    }
}
