//! Loads rows as contiguous channels of the accumulation type, and stores them.

use fearless_simd::prelude::*;
use half::{bf16, f16};

use super::convert::{Accum, Convert};
use super::dispatch::{WithSimd, dispatch};
use super::lanes::{merge, part};
use crate::tensor::{Dtype, Rows, RowsMut};

/// Loads a stored row `(d, m)` into `channels`, `m` contiguous runs of `d`, so that the arithmetic is the same
/// contiguous loop for every `m`.
pub fn load<A: Accum>(rows: Rows<'_>, row: usize, m: usize, channels: &mut [A]) {
    match rows.dtype() {
        Dtype::F32 => dispatch(Load { stored: rows.row::<f32>(row), m, channels }),
        Dtype::F64 => dispatch(Load { stored: rows.row::<f64>(row), m, channels }),
        Dtype::Bf16 => dispatch(Load { stored: rows.row::<bf16>(row), m, channels }),
        Dtype::F16 => dispatch(Load { stored: rows.row::<f16>(row), m, channels }),
        Dtype::Bool => unreachable!("a mask is refused where numbers are expected"),
    }
}

/// Stores `channels` as a row `(d, m)`.
pub fn store<A: Accum>(rows: &mut RowsMut<'_>, row: usize, m: usize, channels: &[A]) {
    match rows.dtype() {
        Dtype::F32 => dispatch(Store { stored: rows.row::<f32>(row), m, channels }),
        Dtype::F64 => dispatch(Store { stored: rows.row::<f64>(row), m, channels }),
        Dtype::Bf16 => dispatch(Store { stored: rows.row::<bf16>(row), m, channels }),
        Dtype::F16 => dispatch(Store { stored: rows.row::<f16>(row), m, channels }),
        Dtype::Bool => unreachable!("a mask is refused where numbers are expected"),
    }
}

/// Returns a row `(d, m)` as channels: in place if it is stored as such, else widened into `scratch`.
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

/// Returns a row `(d, m)` in place if it is stored as channels of type `A`.
#[inline(always)]
pub fn channels<A: Accum>(rows: Rows<'_>, row: usize, m: usize) -> Option<&[A]> {
    (m == 1 && rows.dtype() == A::DTYPE).then(|| rows.row::<A>(row))
}

/// A row `(d, m)` to be filled: in place if it is stored as channels of type `A`, else in scratch.
pub struct Target<'a, 'r, A> {
    rows: Option<&'a mut RowsMut<'r>>,
    row: usize,
    m: usize,
    scratch: &'a mut [A],
    in_place: bool,
}

impl<'a, 'r, A: Accum> Target<'a, 'r, A> {
    /// If `rows` is None, the channels stay in scratch.
    #[inline(always)]
    pub fn new(rows: Option<&'a mut RowsMut<'r>>, row: usize, m: usize, scratch: &'a mut [A]) -> Self {
        let in_place = rows.as_ref().is_some_and(|rows| m == 1 && rows.dtype() == A::DTYPE);
        Target { rows, row, m, scratch, in_place }
    }

    /// Returns the channels to fill.
    #[inline(always)]
    pub fn channels(&mut self) -> &mut [A] {
        match &mut self.rows {
            Some(rows) if self.in_place => rows.row(self.row),
            _ => self.scratch,
        }
    }

    /// Stores the channels, unless they were filled in place, and returns them unrounded.
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

/// Rounds values to `dtype` and back, as a reader of the stored tensor would see them.
#[inline(always)]
pub fn round_to<A: Accum>(dtype: Dtype, values: &mut [A]) {
    match dtype {
        Dtype::Bf16 => values.iter_mut().for_each(|value| *value = bf16::narrow(*value).widen()),
        Dtype::F16 => values.iter_mut().for_each(|value| *value = f16::narrow(*value).widen()),
        Dtype::F32 | Dtype::F64 | Dtype::Bool => {}
    }
}

struct Load<'a, T, A> {
    stored: &'a [T],
    m: usize,
    channels: &'a mut [A],
}

impl<T: Convert, A: Accum> WithSimd for Load<'_, T, A> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Load { stored, m, channels } = self;
        match m {
            1 => channels.iter_mut().zip(stored).for_each(|(to, from)| *to = from.widen()),
            2 => deinterleave::<S, T, A, 2>(simd, stored, channels),
            4 => deinterleave::<S, T, A, 4>(simd, stored, channels),
            8 => deinterleave::<S, T, A, 8>(simd, stored, channels),
            _ => deinterleave_from(0, stored, m, channels),
        }
    }
}

struct Store<'a, T, A> {
    stored: &'a mut [T],
    m: usize,
    channels: &'a [A],
}

impl<T: Convert, A: Accum> WithSimd for Store<'_, T, A> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Store { stored, m, channels } = self;
        match m {
            1 => stored.iter_mut().zip(channels).for_each(|(to, from)| *to = T::narrow(*from)),
            2 => interleave::<S, T, A, 2>(simd, channels, stored),
            4 => interleave::<S, T, A, 4>(simd, channels, stored),
            8 => interleave::<S, T, A, 8>(simd, channels, stored),
            _ => interleave_from(0, channels, m, stored),
        }
    }
}

/// Vectors of each channel that are converted in one loop along the row. The compiler would vectorise a shorter loop
/// across the channels, by gathering single numbers.
const VECTORS_PER_BLOCK: usize = 4;

/// Sorts the numbers of a row by channel, M vectors at a time.
#[inline(always)]
fn deinterleave<S: Simd, T: Convert, A: Accum, const M: usize>(simd: S, stored: &[T], channels: &mut [A]) {
    let d = channels.len() / M;
    let lanes = A::Vector::<S>::LEN;
    let mut channel = channels.chunks_exact_mut(d);
    let mut to: [&mut [A::Chunk]; M] =
        std::array::from_fn(|_| A::chunks_mut(channel.next().expect("m channels")).0);
    if T::DTYPE == A::DTYPE {
        for (at, from) in stored[..M * d].chunks_exact(M * lanes).enumerate() {
            let mut chunks = [A::ZEROS; M];
            for (chunk, from) in chunks.iter_mut().zip(from.chunks_exact(lanes)) {
                chunk.as_mut().iter_mut().zip(from).for_each(|(to, from)| *to = from.widen());
            }
            deinterleave_chunks::<S, A, M>(simd, &chunks, &mut to, at);
        }
    } else {
        let mut wide = [[A::ZEROS; M]; VECTORS_PER_BLOCK];
        for (first, from) in stored[..M * d].chunks(VECTORS_PER_BLOCK * M * lanes).enumerate() {
            let row = A::row_mut(wide.as_flattened_mut());
            row.iter_mut().zip(from).for_each(|(to, from)| *to = from.widen());
            for (at, chunks) in wide[..from.len() / (M * lanes)].iter().enumerate() {
                deinterleave_chunks::<S, A, M>(simd, chunks, &mut to, first * VECTORS_PER_BLOCK + at);
            }
        }
    }
    deinterleave_from(d / lanes * lanes, stored, M, channels);
}

/// Sorts M chunks by channel, and stores them at `at`.
#[inline(always)]
fn deinterleave_chunks<S: Simd, A: Accum, const M: usize>(
    simd: S,
    chunks: &[A::Chunk; M],
    to: &mut [&mut [A::Chunk]; M],
    at: usize,
) {
    let mut vectors = [A::Vector::<S>::splat(simd, A::default()); M];
    for j in 0..M {
        vectors[j] = A::Vector::load_array_ref(simd, &chunks[j]);
    }
    part(&mut vectors);
    for j in 0..M {
        vectors[j].store_array(&mut to[j][at]);
    }
}

/// Loads the features from `first` on, one by one.
#[inline(always)]
fn deinterleave_from<T: Convert, A: Accum>(first: usize, stored: &[T], m: usize, channels: &mut [A]) {
    for (j, channel) in channels.chunks_exact_mut(channels.len() / m).enumerate() {
        let from = stored.chunks_exact(m).skip(first);
        channel[first..].iter_mut().zip(from).for_each(|(to, from)| *to = from[j].widen());
    }
}

/// Stores channels as a row, M vectors at a time: the inverse of [`deinterleave`].
#[inline(always)]
fn interleave<S: Simd, T: Convert, A: Accum, const M: usize>(simd: S, channels: &[A], stored: &mut [T]) {
    let d = channels.len() / M;
    let lanes = A::Vector::<S>::LEN;
    let from: [&[A::Chunk]; M] = std::array::from_fn(|j| A::chunks(&channels[j * d..][..d]).0);
    if T::DTYPE == A::DTYPE {
        for (at, to) in stored[..M * d].chunks_exact_mut(M * lanes).enumerate() {
            let mut chunks = [A::ZEROS; M];
            interleave_chunks::<S, A, M>(simd, &from, at, &mut chunks);
            for (chunk, to) in chunks.iter().zip(to.chunks_exact_mut(lanes)) {
                to.iter_mut().zip(chunk.as_ref()).for_each(|(to, from)| *to = T::narrow(*from));
            }
        }
    } else {
        let mut wide = [[A::ZEROS; M]; VECTORS_PER_BLOCK];
        for (first, to) in stored[..M * d].chunks_mut(VECTORS_PER_BLOCK * M * lanes).enumerate() {
            let together = to.len() / (M * lanes);
            for (at, chunks) in wide[..together].iter_mut().enumerate() {
                interleave_chunks::<S, A, M>(simd, &from, first * VECTORS_PER_BLOCK + at, chunks);
            }
            let row = A::row(wide[..together].as_flattened());
            to.iter_mut().zip(row).for_each(|(to, from)| *to = T::narrow(*from));
        }
    }
    interleave_from(d / lanes * lanes, channels, M, stored);
}

/// Interleaves the chunks of M channels at `at`.
#[inline(always)]
fn interleave_chunks<S: Simd, A: Accum, const M: usize>(
    simd: S,
    from: &[&[A::Chunk]; M],
    at: usize,
    chunks: &mut [A::Chunk; M],
) {
    let mut vectors = [A::Vector::<S>::splat(simd, A::default()); M];
    for j in 0..M {
        vectors[j] = A::Vector::load_array_ref(simd, &from[j][at]);
    }
    merge(&mut vectors);
    for j in 0..M {
        vectors[j].store_array(&mut chunks[j]);
    }
}

#[inline(always)]
fn interleave_from<T: Convert, A: Accum>(first: usize, channels: &[A], m: usize, stored: &mut [T]) {
    for (j, channel) in channels.chunks_exact(channels.len() / m).enumerate() {
        let to = stored.chunks_exact_mut(m).skip(first);
        to.zip(&channel[first..]).for_each(|(to, from)| to[j] = T::narrow(*from));
    }
}
