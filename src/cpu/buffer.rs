//! Scratch memory that starts on a cache line: a 64-byte vector that straddles two costs twice.

use std::ops::{Deref, DerefMut};

use super::convert::Accum;

const LINE: usize = 64;

/// A slice of zeros, aligned to a cache line.
pub struct Buffer<A> {
    values: Vec<A>,
    start: usize,
    len: usize,
}

impl<A: Accum> Buffer<A> {
    pub fn zeros(len: usize) -> Buffer<A> {
        let values = vec![A::default(); len + LINE / size_of::<A>()];
        let start = values.as_ptr().align_offset(LINE);
        Buffer { values, start, len }
    }
}

impl<A: Accum> From<Vec<A>> for Buffer<A> {
    fn from(values: Vec<A>) -> Buffer<A> {
        let mut buffer = Buffer::zeros(values.len());
        buffer.copy_from_slice(&values);
        buffer
    }
}

impl<A> Deref for Buffer<A> {
    type Target = [A];

    #[inline(always)]
    fn deref(&self) -> &[A] {
        &self.values[self.start..self.start + self.len]
    }
}

impl<A> DerefMut for Buffer<A> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [A] {
        &mut self.values[self.start..self.start + self.len]
    }
}

impl<'a, A> IntoIterator for &'a Buffer<A> {
    type Item = &'a A;
    type IntoIter = std::slice::Iter<'a, A>;

    #[inline(always)]
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_start_on_a_cache_line() {
        for len in [0, 1, 63, 1000] {
            let mut buffer = Buffer::<f32>::zeros(len);
            assert!(buffer.len() == len && buffer.as_ptr().addr().is_multiple_of(LINE));
            buffer.fill(1.0);
        }
        assert_eq!(*Buffer::from(vec![1.0, 2.0f64]), [1.0, 2.0]);
    }
}
