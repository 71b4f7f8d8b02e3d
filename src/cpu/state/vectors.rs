//! Rows of 1, 2, 4, 8 or 16 channels in vectors, a group of features at a time.
//!
//! Each loop loads one group after the other, in the order of memory, and fetches the same group of the next token.

#![expect(
    clippy::needless_range_loop,
    reason = "closures of iterators may stay calls without the vectors' instructions"
)]

use fearless_simd::prelude::*;

use super::portable::Portable;
use super::rows::{Finish, Join, Mix, StateRows, Stored, Terms};
use crate::cpu::simd::halves::Narrow;
use crate::cpu::simd::interleaved::Interleaved;
use crate::problem::MOST_REWRITES;
use crate::tensor::prefetch;

pub struct Vectors<S, const M: usize> {
    pub simd: S,
    /// The rows follow each other in memory, token by token, so that the next one can be fetched. If X is in scratch (with a
    /// chain), the fetch is of the memory after it, which does no harm.
    pub follow: bool,
}

impl<S: Interleaved, T: Stored<Accum = f32> + Narrow, const M: usize> StateRows<T> for Vectors<S, M> {
    fn products(&self, k: &[f32], state: &[T], products: &mut [f32]) -> f32 {
        self.simd.vectorize(
            #[inline(always)]
            || self.add_products(k, state, products),
        )
    }

    fn write_read(
        &self,
        state: &[T],
        terms: Terms<'_, f32>,
        to: Option<&mut [T]>,
        mix: Option<&mut Mix<'_, f32>>,
    ) {
        let taps = mix.as_ref().map_or(0, |mix| mix.taps);
        self.simd.vectorize(
            #[inline(always)]
            || match (terms.factors.len() / M, to.is_some(), taps) {
                // A number that is known when this is compiled costs nothing.
                (1, true, 1) => self.write_mix::<T, 1, 1>(state, &terms, to, mix),
                (1, true, 0) => self.write_mix::<T, 1, 0>(state, &terms, to, None),
                (0, false, 1) => self.write_mix::<T, 0, 1>(state, &terms, None, mix),
                (0, false, _) => self.write_mix::<T, 0, ANY>(state, &terms, None, mix),
                _ => self.write_mix::<T, ANY, ANY>(state, &terms, to, mix),
            },
        )
    }

    fn join(&self, join: &mut Join<'_, T, f32>) {
        self.simd.vectorize(
            #[inline(always)]
            || match (parts(join), join.taps) {
                (READ_AND_K, 1) => self.join_taps::<T, READ_AND_K, 1>(join),
                (FINAL_READ_AND_K, 1) => self.join_taps::<T, FINAL_READ_AND_K, 1>(join),
                (READ, 1) => self.join_taps::<T, READ, 1>(join),
                (FINAL_READ, 1) => self.join_taps::<T, FINAL_READ, 1>(join),
                (READ_AND_K, _) => self.join_taps::<T, READ_AND_K, ANY>(join),
                (IDENTITY_AND_K, 0) => self.join_taps::<T, IDENTITY_AND_K, 0>(join),
                (IDENTITY_AND_K, 1) => self.join_taps::<T, IDENTITY_AND_K, 1>(join),
                (EXPANSION, _) => self.join_taps::<T, EXPANSION, ANY>(join),
                (LEARNS, _) => self.join_taps::<T, LEARNS, ANY>(join),
                _ => self.join_taps::<T, UNKNOWN, ANY>(join),
            },
        )
    }

    fn finish(&self, finish: &mut Finish<'_, T, f32>) {
        self.simd.vectorize(
            #[inline(always)]
            || match (finish.terms.factors.len() / M, finish.back.is_empty()) {
                (1, false) => self.finish_terms::<T, 1, true>(finish),
                (_, false) => self.finish_terms::<T, ANY, true>(finish),
                (1, true) => self.finish_terms::<T, 1, false>(finish),
                (_, true) => self.finish_terms::<T, ANY, false>(finish),
            },
        )
    }
}

impl<S: Interleaved, const M: usize> Vectors<S, M> {
    const LANES: usize = S::f32s::LEN;
    /// Elements of a group.
    const GROUP: usize = M * S::f32s::LEN;
    /// Groups with sums of their own: an addition takes longer than its loads, so the next one must not wait for it.
    const APART: usize = if M < SUMS { SUMS / M } else { 1 };

    #[inline(always)]
    fn add_products<T: Stored<Accum = f32> + Narrow>(
        &self,
        k: &[f32],
        state: &[T],
        products: &mut [f32],
    ) -> f32 {
        let d = k.len();
        assert!(state.len() == d * M && products.len() == M);
        let mut sums = Products::<S> { sums: [self.zero(); SUMS], squares: [self.zero(); SUMS] };
        let block = Self::APART * Self::LANES;
        for at in 0..d / block {
            for apart in 0..Self::APART {
                // SAFETY: this group ends before feature d, and all rows are as long as asserted.
                sums = unsafe { self.add_group(sums, apart, at * block + apart * Self::LANES, k, state) };
            }
        }
        if Self::APART > 1 {
            for at in d / block * Self::APART..d / Self::LANES {
                // SAFETY: as above.
                sums = unsafe { self.add_group(sums, 0, at * Self::LANES, k, state) };
            }
        }
        self.add_channels(sums.sums, products);
        let [a, b, c, e] = sums.squares;
        let square = ((a + b) + (c + e)).reduce_sum();
        Self::rest(d).map_or(square, |rest| square + rest.products(k, state, products))
    }

    /// Adds the lanes of partial sums to their channels:
    ///
    /// ```text
    /// M = 4, 8 lanes     each sum      0 1 2 3 0 1 2 3
    /// M = 4, 16 lanes    each sum      0 1 2 3 0 1 2 3 0 1 2 3 0 1 2 3
    /// M = 16, 8 lanes    sums 0 and 2  0 1 2 3 4 5 6 7    sums 1 and 3  8 9 10 11 12 13 14 15
    /// ```
    #[inline(always)]
    fn add_channels(&self, sums: [S::f32s; SUMS], to: &mut [f32]) {
        let patterns = M.div_ceil(Self::LANES);
        let [a, b, c, e] = sums;
        let sums = match patterns {
            1 => [(a + b) + (c + e), self.zero(), self.zero(), self.zero()],
            2 => [a + c, b + e, self.zero(), self.zero()],
            _ => sums,
        };
        for n in 0..patterns {
            let sum = sums[n].as_slice();
            for lane in 0..Self::LANES {
                to[(n * Self::LANES + lane) % M] += sum[lane];
            }
        }
    }

    /// Adds the products of the group that starts with `feature`.
    ///
    /// # Safety
    /// The rows hold that group.
    #[inline(always)]
    unsafe fn add_group<T: Stored<Accum = f32> + Narrow>(
        &self,
        mut to: Products<S>,
        apart: usize,
        feature: usize,
        k: &[f32],
        state: &[T],
    ) -> Products<S> {
        // SAFETY: the caller's.
        unsafe {
            self.fetch_next(k, feature, Self::LANES);
            self.fetch_next(state, feature * M, Self::GROUP);
            let of_k = self.load(k, feature);
            to.squares[apart] = of_k.mul_add(of_k, to.squares[apart]);
            for n in 0..M {
                let sum = (apart * M + n) % SUMS;
                let state = self.load(state, feature * M + n * Self::LANES);
                to.sums[sum] = self.spread(k, feature, n).mul_add(state, to.sums[sum]);
            }
        }
        to
    }

    /// X' and x for N rewrites and K taps, or [`ANY`] number. Unless N is `ANY`, X' is stored if N > 0.
    #[inline(always)]
    fn write_mix<T: Stored<Accum = f32> + Narrow, const N: usize, const K: usize>(
        &self,
        state: &[T],
        terms: &Terms<'_, f32>,
        mut to: Option<&mut [T]>,
        mut mix: Option<&mut Mix<'_, f32>>,
    ) {
        let d = state.len() / M;
        let rewrites = if N == ANY { terms.factors.len() / M } else { N };
        let stores = if N == ANY { to.is_some() } else { N > 0 };
        let taps = if K == ANY { mix.as_ref().map_or(0, |mix| mix.taps) } else { K };
        let factors: [_; N] = repeat::<M, N>(terms.factors, 1.0);
        let stored = to.as_deref_mut().unwrap_or_default();
        let (weight, window, ring, first) = match &mut mix {
            Some(mix) => (mix.weight, &mut *mix.window, mix.ring, mix.slot),
            None => (&[][..], &mut [][..], 0, 0),
        };
        assert!(state.len() == d * M && terms.k.len() == rewrites * d && rewrites <= N);
        assert!(!stores || stored.len() == state.len());
        assert!(window.len() == ring * d && weight.len() >= taps * d * M);
        assert!(taps == 0 || first < ring && taps <= ring);
        for at in 0..d / Self::LANES {
            let (feature, element) = (at * Self::LANES, at * Self::GROUP);
            // SAFETY: this group ends before feature d, and all rows are as long as asserted.
            unsafe {
                let (mut rewritten, mut sums) = ([self.zero(); M], [self.zero(); M]);
                if stores {
                    self.fetch_next(stored, element, Self::GROUP);
                }
                if rewrites == 0 {
                    self.fetch_next(state, element, Self::GROUP); // else `products` has
                }
                for n in 0..M {
                    let at = element + n * Self::LANES;
                    let mut new = self.load(state, at);
                    for index in 0..rewrites {
                        let k = self.spread(terms.k, index * d + feature, n);
                        new = k.mul_add(self.factor(&factors[index], n), new);
                    }
                    if rewrites > 0 {
                        new = T::round(self.simd, new);
                    }
                    if stores {
                        self.store(new, stored, at);
                    }
                    rewritten[n] = new;
                    if taps == 1 {
                        self.fold(&mut sums, n, new * self.load(weight, at));
                    }
                }
                let mut slot = first * d;
                for tap in 0..taps {
                    if taps > 1 {
                        for n in 0..M {
                            let weight = self.load(weight, tap * M * d + element + n * Self::LANES);
                            self.fold(&mut sums, n, rewritten[n] * weight);
                        }
                    }
                    let mut x = self.simd.channel_sums::<M>(sums);
                    if tap + 1 < ring {
                        x += self.load(&*window, slot + feature);
                    }
                    self.store(x, window, slot + feature);
                    slot = if slot + d == ring * d { 0 } else { slot + d };
                }
            }
        }
        if let Some(rest) = Self::rest(d) {
            rest.write_read(state, *terms, to, mix);
        }
    }

    /// For `PARTS` that are known when this is compiled, or [`UNKNOWN`], and K taps, or [`ANY`] number.
    #[inline(always)]
    fn join_taps<T: Stored<Accum = f32> + Narrow, const PARTS: u8, const K: usize>(
        &self,
        join: &mut Join<'_, T, f32>,
    ) {
        let parts = if PARTS == UNKNOWN { parts(join) } else { PARTS };
        let [adds, weighs, totals, learns, k_grads] =
            [ADDS, WEIGHS, TOTALS, LEARNS, K_GRADS].map(|part| parts & part != 0);
        let Join { features: d, grad, weight, dx, ring, slot: first, k, state, .. } = *join;
        let (to, grad_weight, k_grad) = (&mut *join.to, &mut *join.grad_weight, &mut *join.k_grad);
        let all = d * M;
        let taps = if K == ANY { join.taps } else { K };
        let (grad, weight) = (grad.unwrap_or_default(), weight.unwrap_or_default());
        assert!((!adds || grad.len() == all) && (!totals || to.len() == all));
        assert!(dx.len() == ring * d && (!weighs || weight.len() >= taps * all));
        assert!(taps == 0 || first < ring && taps <= ring);
        assert!(!learns || grad_weight.len() >= taps * all && state.len() == all);
        assert!(!k_grads || k.len() == d && k_grad.len() == M);
        let mut of_k = [self.zero(); SUMS];
        for at in 0..d / Self::LANES {
            if adds {
                self.fetch_next(grad, at * Self::GROUP, Self::GROUP);
            }
            for n in 0..M {
                let (feature, element) = (at * Self::LANES, at * Self::GROUP + n * Self::LANES);
                // SAFETY: this group ends before feature d, and all rows are as long as asserted.
                unsafe {
                    let mut sum = self.zero();
                    if adds {
                        sum = self.load(grad, element);
                    }
                    let mut slot = first * d;
                    for tap in 0..taps {
                        let dx = self.spread(dx, slot + feature, n);
                        let of_tap = tap * all + element;
                        sum = if weighs { dx.mul_add(self.load(weight, of_tap), sum) } else { sum + dx };
                        if learns {
                            let before = self.load(grad_weight, of_tap);
                            self.store(dx.mul_add(self.load(state, element), before), grad_weight, of_tap);
                        }
                        slot = if slot + d == ring * d { 0 } else { slot + d };
                    }
                    if totals {
                        self.store(sum, to, element);
                    }
                    if k_grads {
                        of_k[n % SUMS] = self.spread(k, feature, n).mul_add(sum, of_k[n % SUMS]);
                    }
                }
            }
            if k_grads && M < SUMS {
                // An addition takes longer than its loads.
                let before = of_k;
                for sum in 0..SUMS {
                    of_k[sum] = before[(sum + M) % SUMS];
                }
            }
        }
        if k_grads {
            self.add_channels(of_k, k_grad);
        }
        if let Some(rest) = Self::rest(d) {
            rest.join(join);
        }
    }

    #[inline(always)]
    fn finish_terms<T: Stored<Accum = f32> + Narrow, const N: usize, const ERASES: bool>(
        &self,
        finish: &mut Finish<'_, T, f32>,
    ) {
        let Finish { grad, state, terms, back, on_k, ref mut to, ref mut dk } = *finish;
        let d = state.len() / M;
        let rewrites = if N == ANY { terms.factors.len() / M } else { N };
        assert!(state.len() == d * M && grad.len() == d * M && to.len() == d * M);
        assert!(terms.k.len() == rewrites * d && dk.len() == rewrites * d && rewrites <= N);
        assert!(on_k.len() == rewrites);
        let factors: [_; N] = repeat::<M, N>(terms.factors, 1.0);
        let negative: [_; N] = repeat::<M, N>(back, -1.0);
        for at in 0..d / Self::LANES {
            let (feature, element) = (at * Self::LANES, at * Self::GROUP);
            // SAFETY: this group ends before feature d, and all rows are as long as asserted.
            unsafe {
                self.fetch_next(to, element, Self::GROUP);
                if ERASES {
                    self.fetch_next(state, element, Self::GROUP);
                }
                let mut new = [self.zero(); M];
                for index in 0..rewrites {
                    let mut sums = [self.zero(); M];
                    for n in 0..M {
                        let at = element + n * Self::LANES;
                        let grad = self.load(grad, at);
                        if index == 0 {
                            new[n] = grad;
                        }
                        let mut product = grad * self.factor(&factors[index], n);
                        if ERASES {
                            let back = self.factor(&negative[index], n);
                            new[n] = self.spread(terms.k, index * d + feature, n).mul_add(back, new[n]);
                            product = self.load(state, at).mul_add(back, product);
                        }
                        if index + 1 == rewrites {
                            self.store(T::round(self.simd, new[n]), to, at);
                        }
                        self.fold(&mut sums, n, product);
                    }
                    let at = index * d + feature;
                    let on_k = S::f32s::splat(self.simd, on_k[index]);
                    let sum = on_k.mul_add(self.load(terms.k, at), self.simd.channel_sums::<M>(sums));
                    self.store(sum, dk, at);
                }
            }
        }
        if let Some(rest) = Self::rest(d) {
            rest.finish(finish);
        }
    }

    /// Adds vector n of a group to the sums of its features: if a feature has more than one vector, to the first.
    #[inline(always)]
    fn fold(&self, sums: &mut [S::f32s; M], n: usize, product: S::f32s) {
        let folds = M.div_ceil(Self::LANES);
        sums[n / folds] = if n.is_multiple_of(folds) { product } else { sums[n / folds] + product };
    }

    /// The loop over the features that fill no vector.
    #[inline(always)]
    fn rest(d: usize) -> Option<Portable> {
        let first = d / Self::LANES * Self::LANES;
        (first < d).then_some(Portable { m: M, first })
    }

    #[inline(always)]
    fn zero(&self) -> S::f32s {
        S::f32s::splat(self.simd, 0.0)
    }

    /// The factors of the channels of vector n of a group.
    #[inline(always)]
    fn factor(&self, repeated: &[f32; WIDEST], n: usize) -> S::f32s {
        S::f32s::from_slice(self.simd, &repeated[n * Self::LANES % WIDEST..][..Self::LANES])
    }

    /// Fetches `row[at..at + len]` of the next token.
    #[inline(always)]
    fn fetch_next<T>(&self, row: &[T], at: usize, len: usize) {
        if self.follow {
            let next = row.as_ptr_range().end.wrapping_add(at);
            (0..len * size_of::<T>()).step_by(LINE).for_each(|line| prefetch(next.wrapping_byte_add(line)));
        }
    }

    /// Loads a vector.
    ///
    /// # Safety
    /// For this and the next two: the row goes on for as many elements from `at` on.
    #[inline(always)]
    unsafe fn load<T: Narrow>(&self, row: &[T], at: usize) -> S::f32s {
        // SAFETY: the caller's.
        T::load(self.simd, unsafe { part(row, at, Self::LANES) })
    }

    /// Stores a vector of rounded numbers.
    #[inline(always)]
    unsafe fn store<T: Narrow>(&self, values: S::f32s, row: &mut [T], at: usize) {
        debug_assert!(at + Self::LANES <= row.len());
        // SAFETY: the caller's.
        T::store(self.simd, values, unsafe { row.get_unchecked_mut(at..at + Self::LANES) });
    }

    /// Loads a vector of features and repeats each over its channels: the part for vector n of the group.
    #[inline(always)]
    unsafe fn spread(&self, row: &[f32], at: usize, n: usize) -> S::f32s {
        // SAFETY: the caller's.
        self.simd.spread::<M>(unsafe { part(row, at, Self::LANES) }, n)
    }
}

/// `row[at..at + len]`, without a check: in a loop over groups, checks are as many instructions as the arithmetic.
///
/// # Safety
/// The row is long enough.
#[inline(always)]
unsafe fn part<T>(row: &[T], at: usize, len: usize) -> &[T] {
    debug_assert!(at + len <= row.len());
    // SAFETY: the caller's.
    unsafe { row.get_unchecked(at..at + len) }
}

/// Sums of one row, in SUMS parts.
struct Products<S: Simd> {
    sums: [S::f32s; SUMS],
    squares: [S::f32s; SUMS],
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Partial sums of one sum: see [`Vectors::APART`].
const SUMS: usize = 4;

/// The most channels, and the most lanes of a vector.
const WIDEST: usize = 16;

/// Repeats the factors of each rewrite over the channels of a group, times `scale`.
#[inline(always)]
fn repeat<const M: usize, const N: usize>(factors: &[f32], scale: f32) -> [[f32; WIDEST]; N] {
    let mut repeated = [[0.0; WIDEST]; N];
    for (repeated, factors) in repeated.iter_mut().zip(factors.chunks_exact(M)) {
        for channel in 0..WIDEST {
            repeated[channel] = scale * factors[channel % M];
        }
    }
    repeated
}

/// Parts of a [`Join`]: inputs that are there, and outputs that are wanted. Alone, `LEARNS` is an expansion's backward.
const ADDS: u8 = 1;
const WEIGHS: u8 = 2;
const TOTALS: u8 = 4;
const LEARNS: u8 = 8;
const K_GRADS: u8 = 16;
/// A read with its weight, after several rewrites, whose kᵀG are computed later.
const READ: u8 = ADDS | WEIGHS | TOTALS | LEARNS;
/// The same without an incoming gradient of X': the last read of a stream, or a read alone.
const FINAL_READ: u8 = WEIGHS | TOTALS | LEARNS;
/// Both after one rewrite.
const READ_AND_K: u8 = READ | K_GRADS;
const FINAL_READ_AND_K: u8 = FINAL_READ | K_GRADS;
/// A rewrite with a read of m = 1, which has no weight, or (0 taps) without a read.
const IDENTITY_AND_K: u8 = ADDS | TOTALS | K_GRADS;
/// An expansion with a weight.
const EXPANSION: u8 = WEIGHS | TOTALS;
/// In place of parts that are known when this is compiled: those that the [`Join`] has.
const UNKNOWN: u8 = u8::MAX;

#[inline(always)]
fn parts<T>(join: &Join<'_, T, f32>) -> u8 {
    let has = |there: bool, part: u8| if there { part } else { 0 };
    has(join.grad.is_some(), ADDS)
        | has(join.weight.is_some(), WEIGHS)
        | has(!join.to.is_empty(), TOTALS)
        | has(!join.grad_weight.is_empty(), LEARNS)
        | has(!join.k.is_empty(), K_GRADS)
}

/// In place of a number that is known when this is compiled: any number of rewrites, for which it is also the length of
/// their arrays, or of taps, for which it is no bound.
const ANY: usize = MOST_REWRITES;
