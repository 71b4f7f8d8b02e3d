//! Two operations for rows of interleaved channels, which `fearless_simd` lacks: a number of each feature is repeated over
//! its channels, and the channels of each feature are added up.
//!
//! A group is as many features as a vector has lanes, and with M channels M vectors in the order of memory.

use fearless_simd::prelude::*;
use fearless_simd::*;

use super::halves::Halves;

/// Vectors with these operations. M is a power of two.
pub trait Interleaved: Halves {
    /// Loads a group's number of each feature, repeated M times: the part for vector n of the group.
    #[inline(always)]
    fn spread<const M: usize>(self, features: &[f32], n: usize) -> Self::f32s {
        if M >= Self::f32s::LEN {
            return Self::f32s::splat(self, features[n * Self::f32s::LEN / M]);
        }
        let mut part = Self::f32s::from_slice(self, features);
        for step in (0..M.ilog2()).rev() {
            let (low, high) = part.interleave(part);
            part = if n >> step & 1 == 0 { low } else { high };
        }
        part
    }

    /// Adds the channels of each feature of a group. If a feature has more than one vector, the sum of these is in the
    /// place of the first ones: vector n then has feature n.
    #[inline(always)]
    fn channel_sums<const M: usize>(self, mut group: [Self::f32s; M]) -> Self::f32s {
        let mut count = M.min(Self::f32s::LEN);
        while count > 1 {
            count /= 2;
            for at in 0..count {
                let (even, odd) = group[2 * at].deinterleave(group[2 * at + 1]);
                group[at] = even + odd;
            }
        }
        group[0]
    }
}

#[cfg(target_arch = "x86_64")]
impl Interleaved for Sse2 {}
#[cfg(target_arch = "x86_64")]
impl Interleaved for Avx512 {}
#[cfg(target_arch = "aarch64")]
impl Interleaved for Neon {}
#[cfg(not(target_arch = "x86_64"))]
impl Interleaved for Fallback {}

/// The general versions move numbers between the halves of a vector at every step, for 1 to 3 cycles each here; these
/// do so once.
#[cfg(target_arch = "x86_64")]
impl Interleaved for Avx2 {
    #[inline(always)]
    fn spread<const M: usize>(self, features: &[f32], n: usize) -> f32x8<Self> {
        if M == 1 {
            return f32x8::from_slice(self, features);
        }
        if M >= 8 {
            return f32x8::splat(self, features[n * 8 / M]);
        }
        // Four features in either half; what each half repeats of them then stays within it.
        let four = f32x8::block_splat(f32x4::from_slice(self, &features[n * 8 / M / 4 * 4..][..4]));
        match (M, n % 2) {
            (2, _) => avx2::pairs(self, four),
            (_, 0) => avx2::first_two(self, four),
            _ => avx2::last_two(self, four),
        }
    }

    #[inline(always)]
    fn channel_sums<const M: usize>(self, group: [f32x8<Self>; M]) -> f32x8<Self> {
        match M {
            1 => group[0],
            2 => avx2::sums_of_2(self, group[0], group[1]),
            4 => avx2::sums_of_4(self, group[0], group[1], group[2], group[3]),
            _ => {
                let mut halves = [group[0]; 4];
                for n in 0..4 {
                    halves[n] = avx2::add_halves(self, group[n % M], group[(n + 4) % M]);
                }
                let [a, b, c, e] = halves;
                avx2::sums_of_8(self, a, b, c, e)
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::asm;
    use std::arch::x86_64::*;

    use fearless_simd::prelude::*;
    use fearless_simd::{Avx2, f32x8, kernel};

    kernel!(
        /// a b c d | a b c d → a a b b | c c d d
        #[inline(always)]
        pub fn pairs(avx2: Avx2, four: f32x8<Avx2>) -> f32x8<Avx2> {
            permute(four.into(), _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)).simd_into(avx2)
        }
    );
    kernel!(
        /// a b c d | a b c d → a a a a | b b b b
        #[inline(always)]
        pub fn first_two(avx2: Avx2, four: f32x8<Avx2>) -> f32x8<Avx2> {
            permute(four.into(), _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1)).simd_into(avx2)
        }
    );
    kernel!(
        /// a b c d | a b c d → c c c c | d d d d
        #[inline(always)]
        pub fn last_two(avx2: Avx2, four: f32x8<Avx2>) -> f32x8<Avx2> {
            permute(four.into(), _mm256_setr_epi32(2, 2, 2, 2, 3, 3, 3, 3)).simd_into(avx2)
        }
    );

    /// Permutes the numbers of each half. As an intrinsic with a known order it would become other instructions: two moves
    /// for one, or a horizontal addition, which take twice the time.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn permute(values: __m256, order: __m256i) -> __m256 {
        let permuted;
        // SAFETY: an instruction of AVX that works on registers alone.
        unsafe {
            asm!(
                "vpermilps {permuted}, {values}, {order}",
                permuted = lateout(ymm_reg) permuted,
                values = in(ymm_reg) values,
                order = in(ymm_reg) order,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        permuted
    }

    kernel!(
        /// Both halves of a added | both halves of b added.
        #[inline(always)]
        pub fn add_halves(avx2: Avx2, a: f32x8<Avx2>, b: f32x8<Avx2>) -> f32x8<Avx2> {
            let (a, b) = (a.into(), b.into());
            let crossed = _mm256_permute2f128_ps::<0x21>(a, b);
            _mm256_add_ps(_mm256_blend_ps::<0xf0>(a, b), crossed).simd_into(avx2)
        }
    );
    kernel!(
        /// Two channels of 8 features.
        #[inline(always)]
        pub fn sums_of_2(avx2: Avx2, a: f32x8<Avx2>, b: f32x8<Avx2>) -> f32x8<Avx2> {
            let (a, b) = (a.into(), b.into());
            let sums = _mm256_add_ps(_mm256_shuffle_ps::<0x88>(a, b), _mm256_shuffle_ps::<0xdd>(a, b));
            let ordered = _mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(sums));
            _mm256_castpd_ps(ordered).simd_into(avx2)
        }
    );
    kernel!(
        /// Four channels of 8 features.
        #[inline(always)]
        pub fn sums_of_4(
            avx2: Avx2,
            a: f32x8<Avx2>,
            b: f32x8<Avx2>,
            c: f32x8<Avx2>,
            e: f32x8<Avx2>,
        ) -> f32x8<Avx2> {
            let order = _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7);
            _mm256_permutevar8x32_ps(within_halves(a.into(), b.into(), c.into(), e.into()), order)
                .simd_into(avx2)
        }
    );
    kernel!(
        /// Four partial sums of 8 features, of which a vector has one in each half.
        #[inline(always)]
        pub fn sums_of_8(
            avx2: Avx2,
            a: f32x8<Avx2>,
            b: f32x8<Avx2>,
            c: f32x8<Avx2>,
            e: f32x8<Avx2>,
        ) -> f32x8<Avx2> {
            let sums = within_halves(a.into(), b.into(), c.into(), e.into());
            _mm256_permute_ps::<0b11_01_10_00>(sums).simd_into(avx2)
        }
    );

    /// The sums of each half of four vectors, in the order a c b e of either half. Blends take a third of the time of
    /// other moves.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn within_halves(a: __m256, b: __m256, c: __m256, e: __m256) -> __m256 {
        let two = _mm256_add_ps(_mm256_blend_ps::<0xcc>(a, b), _mm256_shuffle_ps::<0x4e>(a, b));
        let other = _mm256_add_ps(_mm256_blend_ps::<0xcc>(c, e), _mm256_shuffle_ps::<0x4e>(c, e));
        let swapped = permute(_mm256_blend_ps::<0xaa>(other, two), _mm256_setr_epi32(1, 0, 3, 2, 1, 0, 3, 2));
        _mm256_add_ps(_mm256_blend_ps::<0xaa>(two, other), swapped)
    }
}
