//! Conversions between float32 and the types of 16 bits, a vector at a time.
//!
//! The general versions are loops over the conversions of [`super::convert`], for which the compiler finds no vectors.

use fearless_simd::prelude::*;
use fearless_simd::*;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

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
}

#[cfg(target_arch = "x86_64")]
impl Halves for Sse2 {}
#[cfg(target_arch = "aarch64")]
impl Halves for Neon {}
#[cfg(not(target_arch = "x86_64"))]
impl Halves for Fallback {}

/// The conversions that the processor has, by its names.
#[cfg(target_arch = "x86_64")]
macro_rules! in_hardware {
    (
        $level:ident, $module:ident, [$half:ident, $bits:ident, $floats:ident],
        $widen:path, $narrow:path, $load_f16:path, $to_f16:ident
    ) => {
        mod $module {
            use std::arch::x86_64::*;

            use fearless_simd::prelude::*;
            use fearless_simd::{kernel, $bits, $floats, $half, $level};

            kernel!(
                #[inline(always)]
                pub fn widen(simd: $level, from: $half<$level>) -> $bits<$level> {
                    $widen(from.into()).simd_into(simd)
                }
            );
            kernel!(
                #[inline(always)]
                pub fn narrow(simd: $level, bits: $bits<$level>) -> $half<$level> {
                    $narrow(bits.into()).simd_into(simd)
                }
            );
            kernel!(
                #[inline(always)]
                pub fn load_f16(simd: $level, from: $half<$level>) -> $floats<$level> {
                    $load_f16(from.into()).simd_into(simd)
                }
            );
            kernel!(
                #[inline(always)]
                pub fn to_f16(simd: $level, values: $floats<$level>) -> $half<$level> {
                    $to_f16::<_MM_FROUND_TO_NEAREST_INT>(values.into()).simd_into(simd)
                }
            );
        }

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
in_hardware! {
    Avx2, avx2, [u16x8, u32x8, f32x8],
    _mm256_cvtepu16_epi32, super::lower_halves, _mm256_cvtph_ps, _mm256_cvtps_ph
}
#[cfg(target_arch = "x86_64")]
in_hardware! {
    Avx512, avx512, [u16x16, u32x16, f32x16],
    _mm512_cvtepu16_epi32, _mm512_cvtepi32_epi16, _mm512_cvtph_ps, _mm512_cvtps_ph
}

/// The lower half of each number; the upper one is 0.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[inline]
fn lower_halves(bits: std::arch::x86_64::__m256i) -> std::arch::x86_64::__m128i {
    use std::arch::x86_64::*;
    // saturates, but the upper halves are 0
    _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256::<1>(bits))
}

/// A [`Convert`] whose accumulation type is f32, a vector at a time. Slices have as many elements as a vector has lanes.
pub trait Narrow: Convert {
    fn load<S: Halves>(simd: S, from: &[Self]) -> S::f32s;
    fn round<S: Halves>(simd: S, values: S::f32s) -> S::f32s;
    /// Stores numbers that are rounded.
    fn store<S: Halves>(simd: S, values: S::f32s, to: &mut [Self]);
}

impl Narrow for f32 {
    #[inline(always)]
    fn load<S: Halves>(simd: S, from: &[f32]) -> S::f32s {
        S::f32s::from_slice(simd, from)
    }
    #[inline(always)]
    fn round<S: Halves>(_: S, values: S::f32s) -> S::f32s {
        values
    }
    #[inline(always)]
    fn store<S: Halves>(_: S, values: S::f32s, to: &mut [f32]) {
        values.store_slice(to);
    }
}

impl Narrow for bf16 {
    #[inline(always)]
    fn load<S: Halves>(simd: S, from: &[bf16]) -> S::f32s {
        S::f32s::from_bits(simd.widen(from.reinterpret_cast()) << 16)
    }
    /// To the nearest even; NaN stays NaN.
    #[inline(always)]
    fn round<S: Halves>(_: S, values: S::f32s) -> S::f32s {
        let bits = values.to_bits();
        let rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff_0000;
        let quiet = (bits | 0x0040_0000) & 0xffff_0000;
        let number = values.simd_eq(values);
        number.select(S::f32s::from_bits(rounded), S::f32s::from_bits(quiet))
    }
    #[inline(always)]
    fn store<S: Halves>(simd: S, values: S::f32s, to: &mut [bf16]) {
        simd.narrow(values.to_bits() >> 16, to.reinterpret_cast_mut());
    }
}

impl Narrow for f16 {
    #[inline(always)]
    fn load<S: Halves>(simd: S, from: &[f16]) -> S::f32s {
        simd.load_f16(from.reinterpret_cast())
    }
    #[inline(always)]
    fn round<S: Halves>(simd: S, values: S::f32s) -> S::f32s {
        simd.round_f16(values)
    }
    #[inline(always)]
    fn store<S: Halves>(simd: S, values: S::f32s, to: &mut [f16]) {
        simd.store_f16(values, to.reinterpret_cast_mut());
    }
}
