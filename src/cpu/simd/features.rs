//! Loads rows of one number per feature in the accumulation type, and stores them.

use super::convert::{Accum, Convert};
use super::dispatch::{WithSimd, dispatch};
use super::interleaved::Interleaved;
use crate::tensor::{Rows, RowsMut, of_dtype};

/// Widens a row.
pub fn load<A: Accum>(rows: Rows<'_>, row: usize, to: &mut [A]) {
    of_dtype!(rows.dtype(), T => dispatch(Widen { stored: rows.row::<T>(row), to }))
}

/// Rounds numbers to a row's dtype.
pub fn store<A: Accum>(rows: &mut RowsMut<'_>, row: usize, from: &[A]) {
    of_dtype!(rows.dtype(), T => dispatch(Round { stored: rows.row::<T>(row), from }))
}

/// Returns a row in place if it is stored in type `A`, else widened into `scratch`.
#[inline(always)]
pub fn view<'a, A: Accum>(rows: Rows<'a>, row: usize, scratch: &'a mut [A]) -> &'a [A] {
    if rows.dtype() == A::DTYPE {
        return rows.row::<A>(row);
    }
    load(rows, row, scratch);
    scratch
}

/// Returns the memory to fill for a row: the row itself if it is stored in type `A`, else `scratch`. [`store_target`]
/// then stores it.
#[inline(always)]
pub fn target<'a, A: Accum>(rows: &'a mut RowsMut<'_>, row: usize, scratch: &'a mut [A]) -> &'a mut [A] {
    if rows.dtype() == A::DTYPE { rows.row::<A>(row) } else { scratch }
}

/// Stores what a [`target`] was filled with.
#[inline(always)]
pub fn store_target<A: Accum>(rows: &mut RowsMut<'_>, row: usize, scratch: &[A]) {
    if rows.dtype() != A::DTYPE {
        store(rows, row, scratch);
    }
}

struct Widen<'a, T, A> {
    stored: &'a [T],
    to: &'a mut [A],
}

impl<T: Convert, A: Accum> WithSimd for Widen<'_, T, A> {
    type Output = ();
    const AVX512: bool = A::AVX512;
    #[inline(always)]
    fn run<S: Interleaved>(self, _: S) {
        self.to.iter_mut().zip(self.stored).for_each(|(to, from)| *to = from.widen());
    }
}

struct Round<'a, T, A> {
    stored: &'a mut [T],
    from: &'a [A],
}

impl<T: Convert, A: Accum> WithSimd for Round<'_, T, A> {
    type Output = ();
    const AVX512: bool = A::AVX512;
    #[inline(always)]
    fn run<S: Interleaved>(self, _: S) {
        self.stored.iter_mut().zip(self.from).for_each(|(to, from)| *to = T::narrow(*from));
    }
}
