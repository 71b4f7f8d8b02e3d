//! What every row kernel is written with: a choice of instruction set, made once, and a handful of loops
//! over contiguous rows that the compiler vectorises.
//!
//! A kernel implements [`Kernel`] with an `#[inline(always)]` body; [`dispatch`] compiles that body
//! three times (AVX-512, AVX2+FMA, whatever the target guarantees) and picks at run time.

use half::{bf16, f16};

use super::convert::{Accum, Convert};
use crate::tensor::{Dtype, Rows, RowsMut};

/// A body of code to run under the best instruction set of this machine.
pub trait Kernel {
    type Output;
    fn run(self) -> Self::Output;
}

// Never inlined: a loop compiled on its own is vectorised the same way wherever it is called from.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
#[inline(never)]
fn avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
#[inline(never)]
fn avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}

/// Instruction sets we compile for, asked of the processor once. `DDL_SIMD=portable` or `=avx2` in the
/// environment lowers the choice, so that every path is tested on one machine.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, PartialEq, PartialOrd)]
enum Level {
    Portable,
    Avx2,
    Avx512,
}

#[cfg(target_arch = "x86_64")]
static LEVEL: std::sync::LazyLock<Level> = std::sync::LazyLock::new(|| {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    let present = match (avx2 && is_x86_feature_detected!("f16c"), avx512) {
        (true, true) => Level::Avx512,
        (true, false) => Level::Avx2,
        _ => Level::Portable,
    };
    let wanted = match std::env::var("DDL_SIMD").as_deref() {
        Ok("portable") => Level::Portable,
        Ok("avx2") => Level::Avx2,
        _ => Level::Avx512,
    };
    if wanted < present { wanted } else { present }
});

/// Runs `kernel` compiled for the widest vectors present.
#[inline]
pub fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    match *LEVEL {
        // SAFETY: `LEVEL` saw every feature the function is compiled for.
        Level::Avx512 => return unsafe { avx512(kernel) },
        // SAFETY: as above.
        Level::Avx2 => return unsafe { avx2(kernel) },
        Level::Portable => {}
    }
    kernel.run()
}

/// Loads a row `(d, m)` as stored into `channels`, `m` contiguous runs of `d`: the maths is then the
/// same contiguous loop for every `m`.
pub fn load<A: Accum>(rows: Rows<'_>, row: usize, m: usize, channels: &mut [A]) {
    match rows.dtype() {
        Dtype::F32 => dispatch(Load { stored: rows.row::<f32>(row), m, channels }),
        Dtype::F64 => dispatch(Load { stored: rows.row::<f64>(row), m, channels }),
        Dtype::Bf16 => dispatch(Load { stored: rows.row::<bf16>(row), m, channels }),
        Dtype::F16 => dispatch(Load { stored: rows.row::<f16>(row), m, channels }),
    }
}

/// Stores `channels` as a row `(d, m)`.
pub fn store<A: Accum>(rows: &mut RowsMut<'_>, row: usize, m: usize, channels: &[A]) {
    match rows.dtype() {
        Dtype::F32 => dispatch(Store { stored: rows.row::<f32>(row), m, channels }),
        Dtype::F64 => dispatch(Store { stored: rows.row::<f64>(row), m, channels }),
        Dtype::Bf16 => dispatch(Store { stored: rows.row::<bf16>(row), m, channels }),
        Dtype::F16 => dispatch(Store { stored: rows.row::<f16>(row), m, channels }),
    }
}

/// Rounds values to `dtype` and back: what a reader of the stored tensor would see.
#[inline(always)]
pub fn round_to<A: Accum>(dtype: Dtype, values: &mut [A]) {
    match dtype {
        Dtype::Bf16 => values.iter_mut().for_each(|value| *value = bf16::narrow(*value).widen()),
        Dtype::F16 => values.iter_mut().for_each(|value| *value = f16::narrow(*value).widen()),
        Dtype::F32 | Dtype::F64 => {}
    }
}

struct Load<'a, T, A> {
    stored: &'a [T],
    m: usize,
    channels: &'a mut [A],
}

impl<T: Convert, A: Accum> Kernel for Load<'_, T, A> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Load { stored, m, channels } = self;
        let d = channels.len() / m;
        match m {
            1 => channels.iter_mut().zip(stored).for_each(|(to, from)| *to = from.widen()),
            2 => deinterleave::<T, A, 2>(stored, channels, d),
            4 => deinterleave::<T, A, 4>(stored, channels, d),
            8 => deinterleave::<T, A, 8>(stored, channels, d),
            _ => {
                for (j, channel) in channels.chunks_exact_mut(d).enumerate() {
                    channel
                        .iter_mut()
                        .zip(stored.chunks_exact(m))
                        .for_each(|(to, from)| *to = from[j].widen());
                }
            }
        }
    }
}

struct Store<'a, T, A> {
    stored: &'a mut [T],
    m: usize,
    channels: &'a [A],
}

impl<T: Convert, A: Accum> Kernel for Store<'_, T, A> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Store { stored, m, channels } = self;
        let d = channels.len() / m;
        match m {
            1 => stored.iter_mut().zip(channels).for_each(|(to, from)| *to = T::narrow(*from)),
            2 => interleave::<T, A, 2>(channels, stored, d),
            4 => interleave::<T, A, 4>(channels, stored, d),
            8 => interleave::<T, A, 8>(channels, stored, d),
            _ => {
                for (j, channel) in channels.chunks_exact(d).enumerate() {
                    stored.chunks_exact_mut(m).zip(channel).for_each(|(to, from)| to[j] = T::narrow(*from));
                }
            }
        }
    }
}

#[inline(always)]
fn deinterleave<T: Convert, A: Accum, const M: usize>(stored: &[T], channels: &mut [A], d: usize) {
    let mut channel = channels.chunks_exact_mut(d);
    let channel: [&mut [A]; M] = std::array::from_fn(|_| &mut channel.next().expect("m channels")[..d]);
    let stored = &stored.as_chunks::<M>().0[..d];
    for (i, from) in stored.iter().enumerate() {
        for j in 0..M {
            channel[j][i] = from[j].widen();
        }
    }
}

#[inline(always)]
fn interleave<T: Convert, A: Accum, const M: usize>(channels: &[A], stored: &mut [T], d: usize) {
    let channel: [&[A]; M] = std::array::from_fn(|j| &channels[j * d..][..d]);
    let stored = &mut stored.as_chunks_mut::<M>().0[..d];
    for (i, to) in stored.iter_mut().enumerate() {
        for j in 0..M {
            to[j] = T::narrow(channel[j][i]);
        }
    }
}

/// Lanes of a running sum: two AVX-512 vectors of f32, enough to hide the latency of an addition.
const LANES: usize = 32;

/// Σ aᵢ bᵢ
pub fn dot<A: Accum>(a: &[A], b: &[A]) -> A {
    dispatch(Dot { a, b })
}

struct Dot<'a, A> {
    a: &'a [A],
    b: &'a [A],
}

impl<A: Accum> Kernel for Dot<'_, A> {
    type Output = A;
    #[inline(always)]
    fn run(self) -> A {
        let mut sums = [A::default(); LANES];
        let (a_body, a_tail) = self.a.as_chunks::<LANES>();
        let (b_body, b_tail) = self.b.as_chunks::<LANES>();
        for (a, b) in a_body.iter().zip(b_body) {
            for lane in 0..LANES {
                sums[lane] += a[lane] * b[lane];
            }
        }
        let mut tail = A::default();
        for (a, b) in a_tail.iter().zip(b_tail) {
            tail += *a * *b;
        }
        total(sums) + tail
    }
}

/// The sum of the lanes, eight at a time and then as a tree. The black box sends the lanes through memory
/// once: seen whole, the tree persuades LLVM to keep the loop above in two-lane vectors (8× slower).
#[inline(always)]
fn total<A: Accum>(lanes: [A; LANES]) -> A {
    let lanes = std::hint::black_box(lanes);
    let mut sums = [A::default(); 8];
    for chunk in lanes.as_chunks::<8>().0 {
        for lane in 0..8 {
            sums[lane] += chunk[lane];
        }
    }
    let [a, b, c, d, e, f, g, h] = sums;
    ((a + e) + (b + f)) + ((c + g) + (d + h))
}

/// to += scale · from
#[inline(always)]
pub fn add_scaled<A: Accum>(to: &mut [A], scale: A, from: &[A]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += scale * *from);
}

/// to = from + scale · row
#[inline(always)]
pub fn set_scaled_sum<A: Accum>(to: &mut [A], from: &[A], scale: A, row: &[A]) {
    to.iter_mut().zip(from).zip(row).for_each(|((to, from), row)| *to = *from + scale * *row);
}

/// to += Σⱼ scaleⱼ · rowⱼ, four rows a pass.
#[inline(always)]
pub fn add_rows<A: Accum>(to: &mut [A], scale: &[A], rows: &[A]) {
    let d = to.len();
    let (four, rest) = scale.as_chunks::<4>();
    for (at, [a, b, c, e]) in four.iter().enumerate() {
        let row: [&[A]; 4] = std::array::from_fn(|j| &rows[(4 * at + j) * d..][..d]);
        for i in 0..d {
            to[i] += (*a * row[0][i] + *b * row[1][i]) + (*c * row[2][i] + *e * row[3][i]);
        }
    }
    for (scale, row) in rest.iter().zip(rows[4 * four.len() * d..].chunks_exact(d)) {
        add_scaled(to, *scale, row);
    }
}

/// to += a ⊙ b
#[inline(always)]
pub fn add_product<A: Accum>(to: &mut [A], a: &[A], b: &[A]) {
    to.iter_mut().zip(a).zip(b).for_each(|((to, a), b)| *to += *a * *b);
}

/// to = (or +=, if `add`) Σⱼ weightⱼ ⊙ channelⱼ, four channels a pass.
#[inline(always)]
pub fn mix<A: Accum>(to: &mut [A], add: bool, weight: &[A], channels: &[A]) {
    let d = to.len();
    if !add {
        to.fill(A::default());
    }
    let mut first = 0;
    while first + 4 * d <= channels.len() {
        let w: [&[A]; 4] = std::array::from_fn(|j| &weight[first + j * d..][..d]);
        let x: [&[A]; 4] = std::array::from_fn(|j| &channels[first + j * d..][..d]);
        for i in 0..d {
            to[i] += (w[0][i] * x[0][i] + w[1][i] * x[1][i]) + (w[2][i] * x[2][i] + w[3][i] * x[3][i]);
        }
        first += 4 * d;
    }
    for (w, x) in weight[first..].chunks_exact(d).zip(channels[first..].chunks_exact(d)) {
        add_product(to, w, x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dot_and_mix_agree_with_their_definitions() {
        for d in [1, 31, 32, 63, 100] {
            for m in [1, 3, 4, 6] {
                let a: Vec<f64> = (0..d * m).map(|i| (i as f64).sin()).collect();
                let b: Vec<f64> = (0..d * m).map(|i| (i as f64 * 0.7).cos()).collect();
                let expected: f64 = a.iter().zip(&b).map(|(a, b)| a * b).sum();
                assert!((dot(&a, &b) - expected).abs() < 1e-12);
                let mut to = vec![1.0; d];
                mix(&mut to, true, &a, &b);
                for i in 0..d {
                    let expected: f64 = 1.0 + (0..m).map(|j| a[j * d + i] * b[j * d + i]).sum::<f64>();
                    assert!((to[i] - expected).abs() < 1e-12);
                }
            }
        }
    }
}
