//! Passes of the forward over a slice of a state: rows of as many columns as two vectors have lanes, packed.
//!
//! A slice has a multiple of [`BLOCK`] rows. Those beyond K are zeros, and so is every factor that belongs to them.

use fearless_simd::prelude::*;

use crate::cpu::simd::convert::Accum;
use crate::cpu::simd::interleaved::Interleaved;

/// Rows whose sums over columns are added up together.
pub const BLOCK: usize = 16;

/// A row of a slice, or one number per column.
pub type Row<A, S> = [<A as crate::cpu::simd::lanes::Lanes>::Vector<S>; 2];

/// Rows in memory.
pub type Stored<A> = [<A as crate::cpu::simd::lanes::Lanes>::Chunk; 2];

/// A type of a state's elements.
pub trait Sliced: Accum {
    /// of a vector
    const LANES: usize;

    /// of a slice in the forward
    const COLUMNS: usize = 2 * Self::LANES;

    /// Adds the lanes of each of the vectors.
    fn totals<S: Interleaved>(simd: S, parts: &[Self::Vector<S>; BLOCK]) -> [Self; BLOCK];

    /// Replaces each number by its exponential.
    fn exp(row: &mut [Self]);
}

impl Sliced for f32 {
    const LANES: usize = 16;

    #[inline(always)]
    fn totals<S: Interleaved>(simd: S, parts: &[Self::Vector<S>; BLOCK]) -> [f32; BLOCK] {
        let lanes = S::f32s::LEN;
        let zero = S::f32s::splat(simd, 0.0);
        let mut narrow = [zero; BLOCK];
        for n in 0..BLOCK {
            let part = parts[n].as_slice();
            narrow[n] = S::f32s::from_slice(simd, &part[..lanes]);
            for more in 1..16 / lanes {
                narrow[n] += S::f32s::from_slice(simd, &part[more * lanes..(more + 1) * lanes]);
            }
        }
        let mut sums = [0.0; BLOCK];
        for group in 0..BLOCK / lanes {
            let first = group * lanes;
            let (mut four, mut eight) = ([zero; 4], [zero; 8]);
            let sum = match lanes {
                4 => {
                    four.copy_from_slice(&narrow[first..first + 4]);
                    simd.channel_sums::<4>(four)
                }
                8 => {
                    eight.copy_from_slice(&narrow[first..first + 8]);
                    simd.channel_sums::<8>(eight)
                }
                _ => simd.channel_sums::<16>(narrow),
            };
            sum.store_slice(&mut sums[first..first + lanes]);
        }
        sums
    }

    /// Within an ulp or two: 2ⁿ times a polynomial, for which the compiler finds vectors.
    #[inline(always)]
    fn exp(row: &mut [f32]) {
        const ROUND: f32 = 12_582_912.0; // 1.5 · 2²³: adding it rounds to an integer
        for x in row {
            let bounded = x.clamp(-105.0, 89.0); // beyond, the result is 0 or infinite
            let shifted = bounded * std::f32::consts::LOG2_E + ROUND;
            let n = shifted - ROUND;
            // ln 2 in two parts, of which the first times n is exact
            let r = bounded - n * 0.693_359_4 + n * 2.121_944_4e-4;
            let mut p = 1.987_569_1e-4;
            for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_66, 0.5] {
                p = p * r + c;
            }
            let whole = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
            let half = whole >> 1; // 2ⁿ by halves, because n may be beyond the exponents
            let power = |n: i32| f32::from_bits(((n + 127) << 23) as u32);
            *x = (p * r * r + r + 1.0) * power(half) * power(whole - half);
        }
    }
}

impl Sliced for f64 {
    const LANES: usize = 8;

    #[inline(always)]
    fn totals<S: Interleaved>(_: S, parts: &[Self::Vector<S>; BLOCK]) -> [f64; BLOCK] {
        let mut sums = [0.0; BLOCK];
        for n in 0..BLOCK {
            sums[n] = parts[n].reduce_sum();
        }
        sums
    }

    fn exp(row: &mut [f64]) {
        row.iter_mut().for_each(|x| *x = x.exp());
    }
}

#[inline(always)]
pub fn zeros<A: Accum, S: Simd>(simd: S) -> Row<A, S> {
    [A::Vector::<S>::splat(simd, A::default()); 2]
}

/// Loads one number per column.
#[inline(always)]
pub fn load<A: Accum, S: Simd>(simd: S, from: &[A]) -> Row<A, S> {
    let [a, b] = A::chunks(from).0 else { unreachable!("a slice has two vectors of columns") };
    [A::Vector::load_array_ref(simd, a), A::Vector::load_array_ref(simd, b)]
}

#[inline(always)]
pub fn store<A: Accum, S: Simd>(row: Row<A, S>, to: &mut [A]) {
    let [a, b] = A::chunks_mut(to).0 else { unreachable!("a slice has two vectors of columns") };
    row[0].store_array(a);
    row[1].store_array(b);
}

#[inline(always)]
pub fn scaled<A: Accum, S: Simd>(simd: S, scale: A, row: Row<A, S>) -> Row<A, S> {
    let scale = A::Vector::<S>::splat(simd, scale);
    [scale * row[0], scale * row[1]]
}

/// scale · row + to
#[inline(always)]
pub fn added<A: Accum, S: Simd>(simd: S, scale: A, row: Row<A, S>, to: Row<A, S>) -> Row<A, S> {
    let scale = A::Vector::<S>::splat(simd, scale);
    [scale.mul_add(row[0], to[0]), scale.mul_add(row[1], to[1])]
}

/// The rows of a packed slice.
#[inline(always)]
pub fn rows_mut<A: Accum>(slice: &mut [A]) -> &mut [Stored<A>] {
    A::chunks_mut(slice).0.as_chunks_mut().0
}

#[inline(always)]
fn row<A: Accum, S: Simd>(simd: S, stored: &Stored<A>) -> Row<A, S> {
    [A::Vector::load_array_ref(simd, &stored[0]), A::Vector::load_array_ref(simd, &stored[1])]
}

/// kᵀS
#[inline(always)]
pub fn product<A: Accum, S: Simd>(simd: S, s: &[Stored<A>], k: &[A]) -> Row<A, S> {
    let (mut sum, k) = (zeros::<A, S>(simd), &k[..s.len()]);
    for r in 0..s.len() {
        let (k, s) = (A::Vector::<S>::splat(simd, k[r]), row::<A, S>(simd, &s[r]));
        for c in 0..2 {
            sum[c] = k.mul_add(s[c], sum[c]);
        }
    }
    sum
}

/// What a step takes, one number per row.
pub struct Step<'a, A> {
    /// a, unused without DECAYS
    pub decay: &'a [A],
    pub k: &'a [A],
    /// unused without QUERIES
    pub q: &'a [A],
    /// the next step's a ⊙ k
    pub next: &'a [A],
}

/// S ← a S + k wᵀ; returns Sᵀq and, of the next step, kᵀ(a S).
#[inline(always)]
pub fn step<A: Accum, S: Simd, const DECAYS: bool, const QUERIES: bool>(
    simd: S,
    s: &mut [Stored<A>],
    of: &Step<'_, A>,
    w: Row<A, S>,
) -> (Row<A, S>, Row<A, S>) {
    let count = s.len();
    let [decay, k, q, next] = [of.decay, of.k, of.q, of.next].map(|row| &row[..count]);
    let (mut y, mut p) = (zeros::<A, S>(simd), zeros::<A, S>(simd));
    for r in 0..count {
        let mut new = row::<A, S>(simd, &s[r]);
        let [k, next] = [k[r], next[r]].map(|number| A::Vector::<S>::splat(simd, number));
        for c in 0..2 {
            if DECAYS {
                new[c] = A::Vector::<S>::splat(simd, decay[r]) * new[c];
            }
            new[c] = k.mul_add(w[c], new[c]);
            new[c].store_array(&mut s[r][c]);
            if QUERIES {
                y[c] = A::Vector::<S>::splat(simd, q[r]).mul_add(new[c], y[c]);
            }
            p[c] = next.mul_add(new[c], p[c]);
        }
    }
    (y, p)
}

/// What two steps take, one number per row. a is the decay of each, if every row has its own.
pub struct Pair<'a, A> {
    /// a₁ ⊙ a₂, unused without DECAYS
    pub decay: &'a [A],
    /// a₂ ⊙ k₁ and k₂
    pub k: [&'a [A]; 2],
    /// a₁ ⊙ q₁, unused without FIRST, and q₂, unused without SECOND
    pub q: [&'a [A]; 2],
    /// of the next two steps: a₃ ⊙ k₃ and a₃ ⊙ a₄ ⊙ k₄
    pub next: [&'a [A]; 2],
}

/// Sums of two steps: Sᵀ(a₁ ⊙ q₁) before them, Sᵀq₂ after them and the next two's products with S.
pub type Sums<A, S> = [Row<A, S>; 4];

/// S ← a₁ a₂ S + a₂ k₁ w₁ᵀ + k₂ w₂ᵀ, with queries to the first step or the second. A function of its own:
/// within a larger one the sums would not stay in registers.
#[inline(never)]
pub fn steps<A: Accum, S: Interleaved, const DECAYS: bool, const FIRST: bool, const SECOND: bool>(
    simd: S,
    s: &mut [Stored<A>],
    of: &Pair<'_, A>,
    w: &[Row<A, S>; 2],
    sums: &mut Sums<A, S>,
) {
    simd.vectorize(
        #[inline(always)]
        || match S::f32s::LEN {
            16 => pass::<A, S, 2, DECAYS, FIRST, SECOND>(simd, s, 0, of, w, sums),
            _ => {
                pass::<A, S, 1, DECAYS, FIRST, SECOND>(simd, s, 0, of, w, sums);
                pass::<A, S, 1, DECAYS, FIRST, SECOND>(simd, s, 1, of, w, sums);
            }
        },
    );
}

/// Does so with N vectors of every row, from the `at`-th on: as many as there are registers for.
#[inline(always)]
fn pass<A: Accum, S: Simd, const N: usize, const DECAYS: bool, const FIRST: bool, const SECOND: bool>(
    simd: S,
    s: &mut [Stored<A>],
    at: usize,
    of: &Pair<'_, A>,
    w: &[Row<A, S>; 2],
    sums: &mut Sums<A, S>,
) {
    let count = s.len();
    let (decay, zero) = (&of.decay[..count], A::Vector::<S>::splat(simd, A::default()));
    let [k, q, next] = [of.k, of.q, of.next].map(|rows| rows.map(|row| &row[..count]));
    let splat = |number: A| A::Vector::<S>::splat(simd, number);
    let (mut total, mut of_w) = ([[zero; N]; 4], [[zero; N]; 2]);
    for i in 0..2 {
        of_w[i].copy_from_slice(&w[i][at..at + N]);
    }
    for r in 0..count {
        let mut new = [zero; N];
        for n in 0..N {
            new[n] = A::Vector::load_array_ref(simd, &s[r][at + n]);
        }
        if FIRST {
            add(splat(q[0][r]), &new, &mut total[0]);
        }
        if DECAYS {
            let decay = splat(decay[r]);
            for new in &mut new {
                *new = decay * *new;
            }
        }
        for i in 0..2 {
            add(splat(k[i][r]), &of_w[i], &mut new);
        }
        for n in 0..N {
            new[n].store_array(&mut s[r][at + n]);
        }
        if SECOND {
            add(splat(q[1][r]), &new, &mut total[1]);
        }
        for i in 0..2 {
            add(splat(next[i][r]), &new, &mut total[2 + i]);
        }
    }
    for (sum, total) in sums.iter_mut().zip(total) {
        sum[at..at + N].copy_from_slice(&total);
    }
}

/// to ← to + number · vectors
#[inline(always)]
fn add<V: SimdFloat<S>, S: Simd, const N: usize>(number: V, vectors: &[V; N], to: &mut [V; N]) {
    for n in 0..N {
        to[n] = number.mul_add(vectors[n], to[n]);
    }
}
