//! The arithmetic for each type of elements.

use half::{bf16, f16};

use super::portable::Portable;
use super::rows::{StateRows, Stored};
use super::vectors::Vectors;
use crate::cpu::simd::halves::Narrow;
use crate::cpu::simd::interleaved::Interleaved;

impl Stored for f64 {
    type Accum = f64;
    #[inline(always)]
    fn widen_row<'a>(row: &'a [f64], _: &mut [f64]) -> Option<&'a [f64]> {
        Some(row)
    }
    fn arithmetic<S: Interleaved>(_: S, m: usize, _: bool) -> Box<dyn StateRows<f64>> {
        Box::new(Portable { m, first: 0 })
    }
}

impl Stored for f32 {
    type Accum = f32;
    #[inline(always)]
    fn widen_row<'a>(row: &'a [f32], _: &mut [f32]) -> Option<&'a [f32]> {
        Some(row)
    }
    fn arithmetic<S: Interleaved>(simd: S, m: usize, follow: bool) -> Box<dyn StateRows<f32>> {
        in_float32(simd, m, follow)
    }
}

macro_rules! in_half_precision {
    ($half:ty) => {
        impl Stored for $half {
            type Accum = f32;
            fn arithmetic<S: Interleaved>(simd: S, m: usize, follow: bool) -> Box<dyn StateRows<$half>> {
                in_float32(simd, m, follow)
            }
        }
    };
}
in_half_precision!(bf16);
in_half_precision!(f16);

fn in_float32<S: Interleaved, T: Stored<Accum = f32> + Narrow>(
    simd: S,
    m: usize,
    follow: bool,
) -> Box<dyn StateRows<T>> {
    match m {
        1 => Box::new(Vectors::<S, 1> { simd, follow }),
        2 => Box::new(Vectors::<S, 2> { simd, follow }),
        4 => Box::new(Vectors::<S, 4> { simd, follow }),
        8 => Box::new(Vectors::<S, 8> { simd, follow }),
        16 => Box::new(Vectors::<S, 16> { simd, follow }),
        _ => Box::new(Portable { m, first: 0 }),
    }
}
