//! What every row kernel is written with: a choice of instruction set, made once, and rows as they are
//! worked on: contiguous channels of the accumulation type.
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

/// A row `(d, m)` as channels: in place where it is stored so, else widened into `scratch`.
#[inline(always)]
pub fn view<'a, A: Accum>(rows: Rows<'a>, row: usize, m: usize, scratch: &'a mut [A]) -> &'a [A] {
    match channels(rows, row, m) {
        Some(stored) => stored,
        None => {
            load(rows, row, m, scratch);
            scratch
        }
    }
}

/// A row `(d, m)` that is stored as it is worked on.
#[inline(always)]
pub fn channels<A: Accum>(rows: Rows<'_>, row: usize, m: usize) -> Option<&[A]> {
    (m == 1 && rows.dtype() == A::DTYPE).then(|| rows.row::<A>(row))
}

/// A row `(d, m)` being written: in place where it is stored as it is worked on, else in scratch.
pub struct Target<'a, 'r, A> {
    rows: Option<&'a mut RowsMut<'r>>,
    row: usize,
    m: usize,
    scratch: &'a mut [A],
    in_place: bool,
}

impl<'a, 'r, A: Accum> Target<'a, 'r, A> {
    /// Without `rows`, what is written stays in scratch.
    #[inline(always)]
    pub fn new(rows: Option<&'a mut RowsMut<'r>>, row: usize, m: usize, scratch: &'a mut [A]) -> Self {
        let in_place = rows.as_ref().is_some_and(|rows| m == 1 && rows.dtype() == A::DTYPE);
        Target { rows, row, m, scratch, in_place }
    }

    /// The channels, to be filled.
    #[inline(always)]
    pub fn channels(&mut self) -> &mut [A] {
        match &mut self.rows {
            Some(rows) if self.in_place => rows.row(self.row),
            _ => self.scratch,
        }
    }

    /// Stores the channels where they are not already, and returns them as they were filled, not rounded.
    #[inline(always)]
    pub fn store(self) -> &'a mut [A] {
        match self.rows {
            Some(rows) if self.in_place => return rows.row(self.row),
            Some(rows) => store(rows, self.row, self.m, self.scratch),
            None => {}
        }
        self.scratch
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
