//! The accumulation types, and the conversion of stored elements to them and back.
//!
//! Conversions are bit operations without branches, so that loops over them vectorise. Those of the `half` crate
//! vectorise for SSE2 alone.

use half::{bf16, f16};

use super::lanes::Lanes;
use crate::tensor::{Dtype, Element};

/// The accumulation type: f64 for float64 tensors, f32 for all others.
pub trait Accum: Element + Lanes {
    /// whether code in this type is compiled for AVX-512, too
    const AVX512: bool;
    fn from_f32(value: f32) -> Self;
    fn from_f64(value: f64) -> Self;
    fn to_f32(self) -> f32;
    fn to_f64(self) -> f64;
    fn sqrt(self) -> Self;
}

macro_rules! accum {
    ($number:ty, $avx512:literal) => {
        impl Accum for $number {
            const AVX512: bool = $avx512;
            #[inline(always)]
            fn from_f32(value: f32) -> $number {
                value as $number
            }
            #[inline(always)]
            fn from_f64(value: f64) -> $number {
                value as $number
            }
            #[inline(always)]
            fn to_f32(self) -> f32 {
                self as f32
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                self as f64
            }
            #[inline(always)]
            fn sqrt(self) -> $number {
                <$number>::sqrt(self)
            }
        }
    };
}
accum!(f32, true);
accum!(f64, false);

/// An element that converts to the accumulation type and back.
pub trait Convert: Element {
    fn widen<A: Accum>(self) -> A;
    fn narrow<A: Accum>(value: A) -> Self;
}

impl Convert for f32 {
    #[inline(always)]
    fn widen<A: Accum>(self) -> A {
        A::from_f32(self)
    }
    #[inline(always)]
    fn narrow<A: Accum>(value: A) -> f32 {
        value.to_f32()
    }
}

impl Convert for f64 {
    #[inline(always)]
    fn widen<A: Accum>(self) -> A {
        A::from_f64(self)
    }
    #[inline(always)]
    fn narrow<A: Accum>(value: A) -> f64 {
        value.to_f64()
    }
}

impl Convert for bf16 {
    #[inline(always)]
    fn widen<A: Accum>(self) -> A {
        A::from_f32(f32::from_bits((self.to_bits() as u32) << 16))
    }
    /// Rounds to nearest even; NaN stays NaN.
    #[inline(always)]
    fn narrow<A: Accum>(value: A) -> bf16 {
        let value = value.to_f32();
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet = (bits >> 16) | 0x40;
        bf16::from_bits(if value.is_nan() { quiet } else { rounded } as u16)
    }
}

impl Convert for f16 {
    #[inline(always)]
    fn widen<A: Accum>(self) -> A {
        A::from_f32(f16_to_f32(self.to_bits() as u32))
    }
    #[inline(always)]
    fn narrow<A: Accum>(value: A) -> f16 {
        f16::from_bits(f32_to_f16(value.to_f32()))
    }
}

/// Rounds values to `dtype` and back, as a reader of the stored tensor would see them.
#[inline(always)]
pub fn round_to<A: Accum>(dtype: Dtype, values: &mut [A]) {
    match dtype {
        Dtype::Bf16 => values.iter_mut().for_each(|value| *value = bf16::narrow(*value).widen()),
        Dtype::F16 => values.iter_mut().for_each(|value| *value = f16::narrow(*value).widen()),
        Dtype::F32 | Dtype::F64 | Dtype::Bool => {}
    }
}

/// Shifts exponent and mantissa up by 13 bits and corrects the bias by one exact multiplication, which also
/// normalises subnormals. Only infinity and NaN need their exponent set.
#[inline(always)]
fn f16_to_f32(bits: u32) -> f32 {
    let sign = (bits & 0x8000) << 16;
    let magnitude = (bits & 0x7fff) << 13;
    let scaled = f32::from_bits(magnitude) * f32::from_bits(0x7780_0000); // × 2^112
    let special = magnitude | 0x7f80_0000;
    let magnitude = if magnitude >= 0x0f80_0000 { special } else { scaled.to_bits() };
    f32::from_bits(magnitude | sign)
}

/// Rounds to nearest even: in the mantissa bits for normal results, by the addition of 0.5 for
/// subnormal ones (whose last place is 2^-24, the last place of 0.5 in f32).
#[inline(always)]
fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_sub(0x3800_0000).wrapping_add(0xfff + odd) >> 13;
    let overflow = if magnitude > 0x7f80_0000 { 0x7e00 } else { 0x7c00 };
    let finite = if magnitude < 0x3880_0000 { subnormal } else { normal };
    let half = if magnitude >= 0x477f_f000 { overflow } else { finite };
    (half | ((bits >> 16) & 0x8000)) as u16
}
