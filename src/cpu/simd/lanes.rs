//! Rows a vector at a time: the loops that a compiler does not make of plain ones, sums above all.
//!
//! A vector has 16 lanes of f32 or 8 of f64 on every machine: one register of AVX-512, or several
//! narrower ones.

use fearless_simd::prelude::*;
use fearless_simd::{f32x16, f64x8};

/// A number of which vectors are made.
pub trait Lanes: SimdFloatElement {
    type Vector<S: Simd>: SimdFloat<S, Element = Self, Array = Self::Chunk>;
    /// As many numbers as a vector has.
    type Chunk: Copy + AsRef<[Self]> + AsMut<[Self]>;
    const ZEROS: Self::Chunk;

    /// The chunks of a row, and the rest.
    fn chunks(row: &[Self]) -> (&[Self::Chunk], &[Self]);
    fn chunks_mut(row: &mut [Self]) -> (&mut [Self::Chunk], &mut [Self]);
}

macro_rules! lanes {
    ($number:ty, $vector:ident, $lanes:literal) => {
        impl Lanes for $number {
            type Vector<S: Simd> = $vector<S>;
            type Chunk = [$number; $lanes];
            const ZEROS: [$number; $lanes] = [0.0; $lanes];

            #[inline(always)]
            fn chunks(row: &[$number]) -> (&[[$number; $lanes]], &[$number]) {
                row.as_chunks()
            }
            #[inline(always)]
            fn chunks_mut(row: &mut [$number]) -> (&mut [[$number; $lanes]], &mut [$number]) {
                row.as_chunks_mut()
            }
        }
    };
}
lanes!(f32, f32x16, 16);
lanes!(f64, f64x8, 8);

/// One number each of M channels in turn → the channels, M a power of two: each step moves the even places of
/// all vectors before the odd ones.
#[inline(always)]
pub fn part<S: Simd, V: SimdBase<S>, const M: usize>(vectors: &mut [V; M]) {
    for _ in 0..M.ilog2() {
        let from = *vectors;
        for pair in 0..M / 2 {
            (vectors[pair], vectors[pair + M / 2]) = from[2 * pair].deinterleave(from[2 * pair + 1]);
        }
    }
}

/// The same backwards.
#[inline(always)]
pub fn merge<S: Simd, V: SimdBase<S>, const M: usize>(vectors: &mut [V; M]) {
    for _ in 0..M.ilog2() {
        let from = *vectors;
        for pair in 0..M / 2 {
            (vectors[2 * pair], vectors[2 * pair + 1]) = from[pair].interleave(from[pair + M / 2]);
        }
    }
}
