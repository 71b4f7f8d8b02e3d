//! Operations that `fearless_simd` lacks, for each kind of vectors, against their definitions.

use fearless_simd::prelude::*;
use half::slice::HalfBitsSliceExt;
use half::{bf16, f16};

use super::convert::Convert;
use super::dispatch::{WithSimd, dispatch_all};
use super::halves::Narrow;
use super::interleaved::Interleaved;

const MOST_LANES: usize = 16;

/// a vector of bits of 16, and one of numbers
struct Conversions<'a>(&'a [u16], &'a [f32]);

fn same(ours: f32, theirs: f32) -> bool {
    ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan())
}

impl WithSimd for Conversions<'_> {
    type Output = ();
    fn run<S: Interleaved>(self, simd: S) {
        let lanes = S::f32s::LEN;
        for bits in self.0.chunks_exact(lanes) {
            let (halves, brains) = (simd.load_f16(bits), bf16::load(simd, bits.reinterpret_cast()));
            for (n, &bits) in bits.iter().enumerate() {
                assert!(same(halves.as_slice()[n], f16::from_bits(bits).to_f32()), "{bits:#x}");
                assert!(same(brains.as_slice()[n], bf16::from_bits(bits).to_f32()), "{bits:#x}");
            }
        }
        for numbers in self.1.chunks_exact(lanes) {
            let values = S::f32s::from_slice(simd, numbers);
            let (halves, brains) = (simd.round_f16(values), bf16::round(simd, values));
            let (mut stored_halves, mut stored_brains) = ([0; MOST_LANES], [0; MOST_LANES]);
            simd.store_f16(values, &mut stored_halves[..lanes]);
            bf16::store(simd, brains, stored_brains[..lanes].reinterpret_cast_mut());
            for n in 0..lanes {
                let (half, brain) = (f16::from_f32(numbers[n]).to_f32(), bf16::from_f32(numbers[n]).to_f32());
                assert!(same(<bf16 as Convert>::narrow(numbers[n]).to_f32(), brain), "bf16 {:e}", numbers[n]);
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
    let others = (0..=u32::MAX).step_by(997).chain(edges).chain([0; MOST_LANES]);
    let numbers: Vec<f32> = others.map(f32::from_bits).collect();
    dispatch_all(|| Conversions(&bits, &numbers));
}

struct Channels<'a, const M: usize>(&'a [f32]);

impl<const M: usize> WithSimd for Channels<'_, M> {
    type Output = ();
    fn run<S: Interleaved>(self, simd: S) {
        let lanes = S::f32s::LEN;
        let mut group = [S::f32s::splat(simd, 0.0); M];
        for at in 0..M * lanes {
            let spread = simd.spread::<M>(&self.0[..lanes], at / lanes);
            assert_eq!(spread.as_slice()[at % lanes], self.0[at / M], "{M} {at}");
        }
        let folds = M.div_ceil(lanes);
        for n in 0..M {
            let vector = S::f32s::from_slice(simd, &self.0[n * lanes..][..lanes]);
            group[n / folds] = if n % folds == 0 { vector } else { group[n / folds] + vector };
        }
        let sums = simd.channel_sums(group);
        for feature in 0..lanes {
            let sum: f32 = self.0[feature * M..(feature + 1) * M].iter().sum(); // small integers: exact
            assert_eq!(sums.as_slice()[feature], sum, "{M} {feature}");
        }
    }
}

#[test]
fn each_kind_of_vectors_spreads_and_sums() {
    let numbers: Vec<f32> = (0..256).map(|i| (i * 7919 % 1000) as f32).collect();
    dispatch_all(|| Channels::<1>(&numbers));
    dispatch_all(|| Channels::<2>(&numbers));
    dispatch_all(|| Channels::<4>(&numbers));
    dispatch_all(|| Channels::<8>(&numbers));
    dispatch_all(|| Channels::<16>(&numbers));
}
