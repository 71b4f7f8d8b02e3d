//! Vectors, for loops that the compiler does not vectorise by itself, sums above all.
//!
//! A vector has 16 lanes of f32 or 8 of f64 on every machine: one register of AVX-512, or several
//! narrower ones.

use fearless_simd::prelude::*;
use fearless_simd::{f32x16, f64x8};

/// A number type that vectors hold.
pub trait Lanes: SimdFloatElement {
    type Vector<S: Simd>: SimdFloat<S, Element = Self, Array = Self::Chunk>;
    /// An array with as many numbers as a vector has lanes.
    type Chunk: Copy + AsMut<[Self]>;
    const ZEROS: Self::Chunk;

    /// Splits a row into chunks and the remainder.
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
