//! The numbers of the rewrites' half of the backward: the coefficients of X, of G and of every k in each dk.
//!
//! Of several rewrites, the j-th sees Gⱼ = G − Σ kᵢ bᵢᵀ over the later ones, with b = β r g, and Xⱼ = X + Σ kᵢ fᵢᵀ over the
//! earlier ones, with f = β r e. Neither is formed: the sums add to dkⱼ a multiple of each kᵢ.

use crate::cpu::simd::convert::Accum;
use crate::cpu::simd::features::view;
use crate::cpu::simd::row::add_scaled;
use crate::cpu::state::Terms;
use crate::problem::{Write, stats_before};
use crate::tensor::Tensor;

/// A token's rewrites: k, v and β of each, and what the forward saved.
pub(super) struct TokenRewrites<'t, A> {
    d: usize,
    m: usize,
    /// [n][d]
    k: &'t [A],
    /// [n][m]
    values: &'t [A],
    /// [n]
    gates: &'t [A],
    /// r, p and k·kᵢ of each; see [`stats_before`]
    stats: &'t [A],
}

/// One of a token's rewrites.
pub(super) struct OneRewrite<'t, A> {
    pub(super) k: &'t [A],
    value: &'t [A],
    pub(super) gate: A,
    r: A,
    /// p
    readout: &'t [A],
    /// k·kᵢ with the k of each earlier rewrite
    k_products: &'t [A],
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
            d,
            m,
            k: view(write.direction.rows(rewrites * d), token, directions),
            values: write.value.rows(rewrites * m).row(token),
            gates: write.gate.rows(rewrites).row(token),
            stats: stats.rows(stats_before(rewrites, m)).row(token),
        }
    }

    #[inline(always)]
    pub(super) fn count(&self) -> usize {
        self.gates.len()
    }

    #[inline(always)]
    pub(super) fn one(&self, index: usize) -> OneRewrite<'t, A> {
        let (d, m) = (self.d, self.m);
        let stats = &self.stats[stats_before(index, m)..];
        OneRewrite {
            k: &self.k[index * d..][..d],
            value: &self.values[index * m..][..m],
            gate: self.gates[index],
            r: stats[0],
            readout: &stats[1..1 + m],
            k_products: &stats[1 + m..][..index],
        }
    }

    /// Fills β r e [n][m], and returns what the rewrites add to X, as the forward computed it.
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
            let other = self.one(after);
            let scale = A::default() - other.k_products[index] * other.scale();
            add_scaled(k_grad, scale, &later[(after - index - 1) * m..][..m]);
        }
        let r = self.one(index).r;
        for number in k_grad {
            *number = r * *number;
        }
    }

    /// Fills β r g [n][m].
    #[inline(always)]
    pub(super) fn fill_back(&self, g: &[A], back: &mut [A]) {
        let rows = back.chunks_exact_mut(self.m).zip(g.chunks_exact(self.m));
        for (index, (back, g)) in rows.enumerate() {
            let scale = self.one(index).scale();
            back.iter_mut().zip(g).for_each(|(back, g)| *back = scale * *g);
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
            let shared = if other > index { one.error_along(their_g) } else { their.error_along(g) };
            add_scaled(dk, A::default() - one.scale() * their.scale() * shared, their.k);
        }
    }
}

impl<A: Accum> OneRewrite<'_, A> {
    /// β r
    #[inline(always)]
    fn scale(&self) -> A {
        self.gate * self.r
    }

    #[inline(always)]
    fn fill_factors(&self, factors: &mut [A]) {
        for ((factor, value), readout) in factors.iter_mut().zip(self.value).zip(self.readout) {
            *factor = self.scale() * (*value - *readout);
        }
    }

    /// g·e
    #[inline(always)]
    pub(super) fn error_along(&self, g: &[A]) -> A {
        let errors = g.iter().zip(self.value).zip(self.readout);
        errors.fold(A::default(), |sum, ((g, value), readout)| sum + *g * (*value - *readout))
    }

    /// −r² k̂ᵀdk̂, the coefficient of k in dk, from g·e; k̂ᵀdk̂ = β (g·e − p·g) needs no further sum.
    #[inline(always)]
    pub(super) fn on_k(&self, g: &[A], g_e: A) -> A {
        let g_p = g.iter().zip(self.readout).fold(A::default(), |sum, (g, readout)| sum + *g * *readout);
        A::default() - self.r * (self.r * self.gate * (g_e - g_p))
    }
}
