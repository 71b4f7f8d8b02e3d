//! The numbers of the rewrites' half of the backward: the coefficients of X, of G and of every k in each dk.
//!
//! Of several rewrites, the j-th sees Gⱼ = G − Σ kᵢ bᵢᵀ over the later ones, with b = α r g, and Xⱼ = X + Σ kᵢ fᵢᵀ over the
//! earlier ones, with f = r (β v − α p). Neither is formed: the sums add to dkⱼ a multiple of each kᵢ.

use super::coefficients::Coefficients;
use crate::cpu::simd::convert::Accum;
use crate::cpu::simd::features::view;
use crate::cpu::simd::row::add_scaled;
use crate::cpu::state::Terms;
use crate::problem::{Erase, Write, stats_before};
use crate::tensor::Tensor;

/// A token's rewrites: k, v and β of each, and what the forward saved.
pub(super) struct TokenRewrites<'t, A> {
    rewrites: usize,
    d: usize,
    m: usize,
    /// [n][d]
    k: &'t [A],
    /// [n][m]
    values: &'t [A],
    /// β [n]
    gates: &'t [A],
    pub(super) erase: Erase,
    /// r, p and k·kᵢ of each; see [`stats_before`]
    stats: &'t [A],
}

impl<'t, A: Accum> TokenRewrites<'t, A> {
    /// The factors of one token, from the rewrite and what its forward saved; `directions` [n][d] is scratch.
    #[inline(always)]
    pub(super) fn new(
        write: &'t Write,
        stats: &'t Tensor,
        token: usize,
        [rewrites, d, m]: [usize; 3],
        directions: &'t mut [A],
    ) -> Self {
        TokenRewrites {
            rewrites,
            d,
            m,
            k: view(write.direction.rows(rewrites * d), token, directions),
            values: write.value.rows(rewrites * m).row(token),
            gates: write.gate.rows(rewrites).row(token),
            erase: write.erase,
            stats: stats.rows(stats_before(rewrites, m)).row(token),
        }
    }

    #[inline(always)]
    pub(super) fn count(&self) -> usize {
        self.rewrites
    }

    #[inline(always)]
    pub(super) fn one(&self, index: usize) -> OneRewrite<'t, A> {
        let m = self.m;
        let stats = &self.stats[stats_before(index, m)..];
        OneRewrite {
            of: Coefficients::new(self.erase, self.gates[index], stats[0]),
            value: &self.values[index * m..][..m],
            readout: &stats[1..1 + m],
            gate: self.gates[index],
            r: stats[0],
        }
    }

    /// k·k of rewrite `index` and an earlier one.
    #[inline(always)]
    fn k_product(&self, index: usize, earlier: usize) -> A {
        self.stats[stats_before(index, self.m) + 1 + self.m + earlier]
    }

    /// k of rewrite `index`.
    #[inline(always)]
    pub(super) fn direction(&self, index: usize) -> &'t [A] {
        &self.k[index * self.d..][..self.d]
    }

    /// Fills the factors [n][m], and returns what the rewrites add to X, as the forward computed it.
    #[inline(always)]
    pub(super) fn terms<'f>(&self, factors: &'f mut [A]) -> Terms<'f, A>
    where
        't: 'f,
    {
        for (index, factors) in factors.chunks_exact_mut(self.m).enumerate() {
            self.one(index).fill_factors(factors);
        }
        Terms { k: self.k, factors }
    }

    /// kᵀG of rewrite `index` → its g = r kᵀGⱼ, in place; the g of the later rewrites are there [n][m].
    #[inline(always)]
    pub(super) fn complete_g(&self, index: usize, g: &mut [A]) {
        let m = self.m;
        let (k_grad, later) = g[index * m..].split_at_mut(m);
        for after in index + 1..self.count() {
            let scale = A::default() - self.k_product(after, index) * self.one(after).of.erasure;
            add_scaled(k_grad, scale, &later[(after - index - 1) * m..][..m]);
        }
        let r = self.one(index).r;
        for number in k_grad {
            *number = r * *number;
        }
    }

    /// Adds the multiples of the other k to dk of rewrite `index`; `all_g` are those of all rewrites [n][m].
    #[inline(always)]
    pub(super) fn add_others(&self, index: usize, dk: &mut [A], all_g: &[A]) {
        let (one, g) = (self.one(index), &all_g[index * self.m..][..self.m]);
        for other in 0..self.count() {
            if other == index {
                continue;
            }
            let (their, their_g) = (self.one(other), &all_g[other * self.m..][..self.m]);
            let ([shared, _], scale) = if other > index {
                (one.target_and_readout_along(their_g), one.of.scale * their.of.erasure)
            } else {
                (their.target_and_readout_along(g), one.of.erasure * their.of.scale)
            };
            add_scaled(dk, A::default() - scale * shared, self.direction(other));
        }
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
