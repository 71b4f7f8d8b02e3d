//! Conversions between float32 and the types of 16 bits, a vector at a time.
//!
//! The general versions are loops over the conversions of [`super::convert`], for which the compiler finds no vectors.

use fearless_simd::prelude::*;
use fearless_simd::*;
use half::f16;

use super::convert::Convert;

/// The bits of a vector of f32.
pub type Bits<S> = <<S as Simd>::f32s as SimdFloat<S>>::Bits;

/// Lanes of the widest vectors.
const WIDEST: usize = 16;

/// Vectors that convert. Slices have as many elements as a vector has lanes, and types of 16 bits are their bits.
pub trait Halves: Simd {
    /// Puts zeros before the bits.
    #[inline(always)]
    fn widen(self, from: &[u16]) -> Bits<Self> {
        let mut wide = [0u32; WIDEST];
        wide.iter_mut().zip(from).for_each(|(to, from)| *to = u32::from(*from));
        Bits::<Self>::from_slice(self, &wide[..Self::f32s::LEN])
    }

    /// Takes the lower half of each number.
    #[inline(always)]
    fn narrow(self, bits: Bits<Self>, to: &mut [u16]) {
        to.iter_mut().zip(bits.as_slice()).for_each(|(to, from)| *to = *from as u16);
    }

    #[inline(always)]
    fn load_f16(self, from: &[u16]) -> Self::f32s {
        let mut wide = [0.0; WIDEST];
        wide.iter_mut().zip(from).for_each(|(to, from)| *to = f16::from_bits(*from).widen());
        Self::f32s::from_slice(self, &wide[..Self::f32s::LEN])
    }

    #[inline(always)]
    fn store_f16(self, values: Self::f32s, to: &mut [u16]) {
        to.iter_mut()
            .zip(values.as_slice())
            .for_each(|(to, from)| *to = <f16 as Convert>::narrow(*from).to_bits());
    }

    #[inline(always)]
    fn round_f16(self, values: Self::f32s) -> Self::f32s {
        let mut bits = [0; WIDEST];
        let bits = &mut bits[..Self::f32s::LEN];
        self.store_f16(values, bits);
        self.load_f16(bits)
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u16]) -> Self::f32s {
        Self::f32s::from_bits(self.widen(from) << 16)
    }

    /// Stores numbers that are rounded.
    #[inline(always)]
    fn store_bf16(self, values: Self::f32s, to: &mut [u16]) {
        self.narrow(values.to_bits() >> 16, to);
    }

    /// Rounds to the nearest even; NaN stays NaN.
    #[inline(always)]
    fn round_bf16(self, values: Self::f32s) -> Self::f32s {
        let bits = values.to_bits();
        let rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff_0000;
        let quiet = (bits | 0x0040_0000) & 0xffff_0000;
        let number = values.simd_eq(values);
        number.select(Self::f32s::from_bits(rounded), Self::f32s::from_bits(quiet))
    }
}

#[cfg(target_arch = "x86_64")]
impl Halves for Sse2 {}
#[cfg(target_arch = "aarch64")]
impl Halves for Neon {}
#[cfg(not(target_arch = "x86_64"))]
impl Halves for Fallback {}

#[cfg(target_arch = "x86_64")]
macro_rules! in_hardware {
    ($level:ident, $module:ident, $half:ident) => {
        impl Halves for $level {
            #[inline(always)]
            fn widen(self, from: &[u16]) -> Bits<Self> {
                $module::widen(self, $half::from_slice(self, from))
            }
            #[inline(always)]
            fn narrow(self, bits: Bits<Self>, to: &mut [u16]) {
                $module::narrow(self, bits).store_slice(to);
            }
            #[inline(always)]
            fn load_f16(self, from: &[u16]) -> Self::f32s {
                $module::load_f16(self, $half::from_slice(self, from))
            }
            #[inline(always)]
            fn store_f16(self, values: Self::f32s, to: &mut [u16]) {
                $module::to_f16(self, values).store_slice(to);
            }
            #[inline(always)]
            fn round_f16(self, values: Self::f32s) -> Self::f32s {
                $module::load_f16(self, $module::to_f16(self, values))
            }
        }
    };
}
#[cfg(target_arch = "x86_64")]
in_hardware!(Avx2, avx2, u16x8);
#[cfg(target_arch = "x86_64")]
in_hardware!(Avx512, avx512, u16x16);

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use fearless_simd::prelude::*;
    use fearless_simd::{Avx2, f32x8, kernel, u16x8, u32x8};

    kernel!(
        #[inline(always)]
        pub fn widen(avx2: Avx2, from: u16x8<Avx2>) -> u32x8<Avx2> {
            _mm256_cvtepu16_epi32(from.into()).simd_into(avx2)
        }
    );
    kernel!(
        #[inline(always)]
        pub fn narrow(avx2: Avx2, bits: u32x8<Avx2>) -> u16x8<Avx2> {
            let bits = bits.into();
            let (low, high) = (_mm256_castsi256_si128(bits), _mm256_extracti128_si256::<1>(bits));
            _mm_packus_epi32(low, high).simd_into(avx2) // saturates, but the upper halves are 0
        }
    );
    kernel!(
        #[inline(always)]
        pub fn load_f16(avx2: Avx2, from: u16x8<Avx2>) -> f32x8<Avx2> {
            _mm256_cvtph_ps(from.into()).simd_into(avx2)
        }
    );
    kernel!(
        #[inline(always)]
        pub fn to_f16(avx2: Avx2, values: f32x8<Avx2>) -> u16x8<Avx2> {
            _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values.into()).simd_into(avx2)
        }
    );
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use fearless_simd::prelude::*;
    use fearless_simd::{Avx512, f32x16, kernel, u16x16, u32x16};

    kernel!(
        #[inline(always)]
        pub fn widen(avx512: Avx512, from: u16x16<Avx512>) -> u32x16<Avx512> {
            _mm512_cvtepu16_epi32(from.into()).simd_into(avx512)
        }
    );
    kernel!(
        #[inline(always)]
        pub fn narrow(avx512: Avx512, bits: u32x16<Avx512>) -> u16x16<Avx512> {
            _mm512_cvtepi32_epi16(bits.into()).simd_into(avx512)
        }
    );
    kernel!(
        #[inline(always)]
        pub fn load_f16(avx512: Avx512, from: u16x16<Avx512>) -> f32x16<Avx512> {
            _mm512_cvtph_ps(from.into()).simd_into(avx512)
        }
    );
    kernel!(
        #[inline(always)]
        pub fn to_f16(avx512: Avx512, values: f32x16<Avx512>) -> u16x16<Avx512> {
            _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values.into()).simd_into(avx512)
        }
    );
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::cpu::simd::dispatch::{WithSimd, dispatch_all};
    use crate::cpu::simd::interleaved::Interleaved;

    /// a vector of bits of 16, and one of numbers
    struct Both<'a>(&'a [u16], &'a [f32]);

    fn same(ours: f32, theirs: f32) -> bool {
        ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan())
    }

    impl WithSimd for Both<'_> {
        type Output = ();
        fn run<S: Interleaved>(self, simd: S) {
            let lanes = S::f32s::LEN;
            for bits in self.0.chunks_exact(lanes) {
                let (halves, brains) = (simd.load_f16(bits), simd.load_bf16(bits));
                for n in 0..lanes {
                    assert!(same(halves.as_slice()[n], f16::from_bits(bits[n]).to_f32()), "{:#x}", bits[n]);
                    assert!(same(brains.as_slice()[n], bf16::from_bits(bits[n]).to_f32()), "{:#x}", bits[n]);
                }
            }
            for numbers in self.1.chunks_exact(lanes) {
                let values = S::f32s::from_slice(simd, numbers);
                let (halves, brains) = (simd.round_f16(values), simd.round_bf16(values));
                let (mut stored_halves, mut stored_brains) = ([0; WIDEST], [0; WIDEST]);
                simd.store_f16(values, &mut stored_halves[..lanes]);
                simd.store_bf16(brains, &mut stored_brains[..lanes]);
                for n in 0..lanes {
                    let (half, brain) =
                        (f16::from_f32(numbers[n]).to_f32(), bf16::from_f32(numbers[n]).to_f32());
                    assert!(same(halves.as_slice()[n], half), "f16 {:e}", numbers[n]);
                    assert!(same(f16::from_bits(stored_halves[n]).to_f32(), half), "f16 {:e}", numbers[n]);
                    assert!(same(brains.as_slice()[n], brain), "bf16 {:e}", numbers[n]);
                    assert!(same(bf16::from_bits(stored_brains[n]).to_f32(), brain), "bf16 {:e}", numbers[n]);
                }
            }
        }
    }

    #[test]
    fn each_kind_of_vectors_converts_as_the_half_crate_does() {
        let bits: Vec<u16> = (0..=u16::MAX).collect();
        let edges = [
            0x477f_efff,
            0x477f_f000,
            0x3880_0000,
            0x387f_ffff,
            0x3300_0000,
            0x3300_0001,
            0x7f80_0001,
            0xffff_ffff,
        ];
        let others = (0..=u32::MAX).step_by(9973).chain(edges).chain([0; WIDEST]);
        let numbers: Vec<f32> = others.map(f32::from_bits).collect();
        dispatch_all(|| Both(&bits, &numbers));
    }
}
