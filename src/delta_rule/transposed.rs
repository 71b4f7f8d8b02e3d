//! Passes of the backward over a slice of a state, with vectors along the keys.
//!
//! A step back sums over columns, for dq and dk, where the forward sums over rows. So here a slice lies in blocks of as many
//! rows as a vector has lanes, and a block column by column: both sums are then sums of whole vectors, and only dw = kᵀdS,
//! one number per column, adds up lanes. Rows beyond K are zeros, and so is every factor that belongs to them.

#![expect(
    clippy::needless_range_loop,
    reason = "closures of iterators may stay calls without the vectors' instructions"
)]

use fearless_simd::prelude::*;

use super::division::WIDEST;
use super::slice::{BLOCK, Sliced};
use crate::cpu::simd::interleaved::Interleaved;
use crate::cpu::simd::lanes::Lanes;

/// Vectors of rows that a pass goes through together, if registers hold as many of their sums and factors.
const GROUP: usize = 2;

type Vectors<A, S> = [<A as Lanes>::Vector<S>; GROUP];

/// Factors of each row in a step back: of this step and of the one before. `multiply` is what dS is multiplied by, if it is.
/// dS is `lag` times what is stored.
pub struct Back<'a, A> {
    pub lag: A,
    pub decay: &'a [A],
    pub multiply: &'a [A],
    pub k: &'a [A],
    pub k_before: &'a [A],
    pub q_before: &'a [A],
}

/// Factors of each column: w = β e, dp = −β dw.
pub struct Columns<'a, A> {
    pub w: &'a [A],
    pub dp: &'a [A],
    pub dy: &'a [A],
    pub dy_before: &'a [A],
}

/// What a step back leaves for each row. dg is ⟨S, dS'⟩ by row.
pub struct Sums<'a, A> {
    pub dq: &'a mut [A],
    pub dk: &'a mut [A],
    pub dg: &'a mut [A],
}

/// Partial sums of dw, a vector of each column.
pub struct Partial<A: Lanes>([A::Chunk; WIDEST]);

impl<A: Sliced> Partial<A> {
    #[inline(always)]
    pub fn zeros() -> Self {
        Partial([A::ZEROS; WIDEST])
    }

    /// Adds up the lanes of each.
    #[inline(always)]
    pub fn totals<S: Interleaved>(&self, simd: S, to: &mut [A]) {
        let zero = A::Vector::<S>::splat(simd, A::default());
        for first in (0..to.len()).step_by(BLOCK) {
            let mut parts = [zero; BLOCK];
            for c in 0..BLOCK {
                parts[c] = A::Vector::load_array_ref(simd, &self.0[first + c]);
            }
            to[first..first + BLOCK].copy_from_slice(&A::totals(simd, &parts));
        }
    }
}

/// Puts a row of a state into a slice of so many columns.
#[inline(always)]
pub fn put<A: Sliced>(slice: &mut [A], width: usize, row: usize, from: &[A]) {
    let first = row / A::LANES * width * A::LANES + row % A::LANES;
    for (to, from) in slice[first..].iter_mut().step_by(A::LANES).zip(from) {
        *to = *from;
    }
}

/// Takes a row of a state out of a slice of so many columns.
#[inline(always)]
pub fn get<A: Sliced>(slice: &[A], width: usize, row: usize, to: &mut [A]) {
    let first = row / A::LANES * width * A::LANES + row % A::LANES;
    for (to, from) in to.iter_mut().zip(slice[first..].iter().step_by(A::LANES)) {
        *to = *from;
    }
}

/// aᵀb of rows of whole vectors
#[inline(always)]
pub fn dot<A: Sliced, S: Simd>(simd: S, a: &[A], b: &[A]) -> A {
    let (a, b) = (A::chunks(a).0, A::chunks(b).0);
    let (b, mut sum) = (&b[..a.len()], A::Vector::<S>::splat(simd, A::default()));
    for n in 0..a.len() {
        sum =
            A::Vector::<S>::load_array_ref(simd, &a[n]).mul_add(A::Vector::load_array_ref(simd, &b[n]), sum);
    }
    sum.reduce_sum()
}

#[inline(always)]
fn group<A: Sliced, S: Simd, const N: usize>(simd: S, row: &[A], at: usize) -> Vectors<A, S> {
    let row = &A::chunks(row).0[at..at + N];
    let mut vectors = [A::Vector::<S>::splat(simd, A::default()); GROUP];
    for n in 0..N {
        vectors[n] = A::Vector::load_array_ref(simd, &row[n]);
    }
    vectors
}

/// A step back. With dS after the step, and S before it:
///
/// ```text
/// dq = a ⊙ (S dy)      dk = dS w + a ⊙ (S dp)      dS' = a ⊙ (dS + k dpᵀ)      dg = ⟨S, dS'⟩ by row
/// dS ← dS' + q_before dy_beforeᵀ, and dw_before = k_beforeᵀ dS
/// ```
///
/// dq lacks k (w·dy), which belongs to the step's own write. dq is left out without QUERIES, dg without DECAYS. Stored are
/// dS, dS', dg and dw_before divided by `lag`. Without MULTIPLIES the factor of dS' is left to the caller, to multiply the lag
/// by; dy_before is divided by the new one.
#[inline(always)]
pub fn back<A: Sliced, S: Interleaved, const QUERIES: bool, const DECAYS: bool, const MULTIPLIES: bool>(
    simd: S,
    s: &[A],
    ds: &mut [A],
    of: &Back<'_, A>,
    columns: &Columns<'_, A>,
    sums: &mut Sums<'_, A>,
    dw: &mut [A],
) {
    let mut partial = Partial::<A>::zeros();
    let vectors = A::chunks(of.k).0.len();
    let together = if S::f32s::LEN >= BLOCK { GROUP } else { 1 };
    let (whole, mut at) = (if together == GROUP { vectors / GROUP * GROUP } else { 0 }, 0);
    while at < whole {
        back_group::<A, S, GROUP, QUERIES, DECAYS, MULTIPLIES>(
            simd,
            at,
            s,
            ds,
            of,
            columns,
            sums,
            &mut partial,
        );
        at += GROUP;
    }
    while at < vectors {
        back_group::<A, S, 1, QUERIES, DECAYS, MULTIPLIES>(simd, at, s, ds, of, columns, sums, &mut partial);
        at += 1;
    }
    partial.totals(simd, dw);
}

#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one loop, with what the pass shares")]
fn back_group<
    A: Sliced,
    S: Interleaved,
    const N: usize,
    const QUERIES: bool,
    const DECAYS: bool,
    const MULTIPLIES: bool,
>(
    simd: S,
    at: usize,
    s: &[A],
    ds: &mut [A],
    of: &Back<'_, A>,
    columns: &Columns<'_, A>,
    sums: &mut Sums<'_, A>,
    partial: &mut Partial<A>,
) {
    let (a, mut k) = (group::<A, S, N>(simd, of.decay, at), group::<A, S, N>(simd, of.k, at));
    let lag = A::Vector::<S>::splat(simd, of.lag);
    for k in &mut k {
        *k /= lag; // not dp: each number of a column is loaded for every vector of rows
    }
    let multiply = group::<A, S, N>(simd, of.multiply, at);
    let k_before = group::<A, S, N>(simd, of.k_before, at);
    let q_before = group::<A, S, N>(simd, of.q_before, at);
    let width = columns.w.len();
    let dp = &columns.dp[..width];
    let (dy, dy_before) = (&columns.dy[..width], &columns.dy_before[..width]);
    let (s, ds) = (A::chunks(s).0, A::chunks_mut(ds).0);
    let (s, ds) = (&s[at * width..(at + N) * width], &mut ds[at * width..(at + N) * width]);
    let partial = &mut partial.0[..width];
    let zero = A::Vector::<S>::splat(simd, A::default());
    let (mut dq, mut of_ds, mut of_s, mut dg) = ([zero; N], [zero; N], [zero; N], [zero; N]);
    for c in 0..width {
        let w = A::Vector::<S>::splat(simd, columns.w[c]);
        let dp = A::Vector::<S>::splat(simd, dp[c]);
        let dy = A::Vector::<S>::splat(simd, dy[c]);
        let dy_before = A::Vector::<S>::splat(simd, dy_before[c]);
        let mut dw = A::Vector::<S>::load_array_ref(simd, &partial[c]);
        for n in 0..N {
            let s = A::Vector::<S>::load_array_ref(simd, &s[n * width + c]);
            let old = A::Vector::<S>::load_array_ref(simd, &ds[n * width + c]);
            if QUERIES {
                dq[n] = s.mul_add(dy, dq[n]);
            }
            of_s[n] = s.mul_add(dp, of_s[n]);
            of_ds[n] = old.mul_add(w, of_ds[n]);
            let mut new = k[n].mul_add(dp, old);
            if MULTIPLIES {
                new = multiply[n] * new;
            }
            if DECAYS {
                dg[n] = s.mul_add(new, dg[n]);
            }
            new = q_before[n].mul_add(dy_before, new);
            new.store_array(&mut ds[n * width + c]);
            dw = k_before[n].mul_add(new, dw);
        }
        dw.store_array(&mut partial[c]);
    }
    for n in 0..N {
        a[n].mul_add(of_s[n], lag * of_ds[n]).store_array(&mut A::chunks_mut(sums.dk).0[at + n]);
        if QUERIES {
            (a[n] * dq[n]).store_array(&mut A::chunks_mut(sums.dq).0[at + n]);
        }
        if DECAYS {
            dg[n].store_array(&mut A::chunks_mut(sums.dg).0[at + n]);
        }
    }
}

/// to = a S + k wᵀ
#[inline(always)]
pub fn rebuild<A: Sliced, S: Simd, const DECAYS: bool>(
    simd: S,
    s: &[A],
    to: &mut [A],
    [decay, k]: [&[A]; 2],
    w: &[A],
) {
    let (s, to, width) = (A::chunks(s).0, A::chunks_mut(to).0, w.len());
    let (decay, k) = (A::chunks(decay).0, A::chunks(k).0);
    for at in 0..k.len() {
        let (a, k) =
            (A::Vector::<S>::load_array_ref(simd, &decay[at]), A::Vector::load_array_ref(simd, &k[at]));
        let (s, to) = (&s[at * width..][..width], &mut to[at * width..][..width]);
        for c in 0..width {
            let mut new = A::Vector::<S>::load_array_ref(simd, &s[c]);
            if DECAYS {
                new = a * new;
            }
            k.mul_add(A::Vector::splat(simd, w[c]), new).store_array(&mut to[c]);
        }
    }
}

/// dS ← dS + q dyᵀ; dw = kᵀdS.
#[inline(always)]
pub fn open<A: Sliced, S: Interleaved>(simd: S, ds: &mut [A], [q, k]: [&[A]; 2], dy: &[A], dw: &mut [A]) {
    let mut partial = Partial::<A>::zeros();
    let (ds, width) = (A::chunks_mut(ds).0, dy.len());
    let (q, k) = (A::chunks(q).0, A::chunks(k).0);
    for at in 0..k.len() {
        let (q, k) =
            (A::Vector::<S>::load_array_ref(simd, &q[at]), A::Vector::<S>::load_array_ref(simd, &k[at]));
        let (ds, partial) = (&mut ds[at * width..][..width], &mut partial.0[..width]);
        for c in 0..width {
            let old = A::Vector::<S>::load_array_ref(simd, &ds[c]);
            let new = q.mul_add(A::Vector::splat(simd, dy[c]), old);
            new.store_array(&mut ds[c]);
            k.mul_add(new, A::Vector::load_array_ref(simd, &partial[c])).store_array(&mut partial[c]);
        }
    }
    partial.totals(simd, dw);
}

/// to = a ⊙ (S dy)
#[inline(always)]
pub fn query<A: Sliced, S: Simd>(simd: S, s: &[A], decay: &[A], dy: &[A], to: &mut [A]) {
    let (s, decay, width) = (A::chunks(s).0, A::chunks(decay).0, dy.len());
    for (at, to) in A::chunks_mut(to).0.iter_mut().enumerate() {
        let s = &s[at * width..][..width];
        let mut sum = A::Vector::<S>::splat(simd, A::default());
        for c in 0..width {
            sum = A::Vector::<S>::load_array_ref(simd, &s[c]).mul_add(A::Vector::splat(simd, dy[c]), sum);
        }
        (A::Vector::<S>::load_array_ref(simd, &decay[at]) * sum).store_array(to);
    }
}
