//! Scratch memory aligned to cache lines, because a 64-byte vector that straddles two lines costs twice.
//!
//! Its size grows with the user's shapes (d·m·K and more), so the allocation may fail. Callers pass the failure
//! on to Python as a `MemoryError`.

use std::ops::{Deref, DerefMut};

use crate::error::Error;
use crate::tensor::Element;

const LINE: usize = 64;

/// An allocation of this many bytes failed.
#[derive(Debug)]
pub struct OutOfMemory {
    pub bytes: usize,
}

impl OutOfMemory {
    /// Converts to the error that callers of `operator` see.
    pub fn in_operator(self, operator: &'static str) -> Error {
        Error::Memory { operator, bytes: self.bytes }
    }
}

pub type Result<T> = std::result::Result<T, OutOfMemory>;

/// A slice of zeros, aligned to a cache line.
pub struct Buffer<A> {
    values: Vec<A>,
    start: usize,
    len: usize,
}

impl<A: Element> Buffer<A> {
    pub fn zeros(len: usize) -> Result<Buffer<A>> {
        let padded = len.saturating_add(LINE / size_of::<A>());
        let refused = |_| OutOfMemory { bytes: padded.saturating_mul(size_of::<A>()) };
        let mut values = Vec::new();
        values.try_reserve_exact(padded).map_err(refused)?;
        values.resize(padded, A::default());
        let start = values.as_ptr().align_offset(LINE);
        Ok(Buffer { values, start, len })
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
            let mut buffer = Buffer::<f32>::zeros(len).unwrap();
            assert!(buffer.len() == len && buffer.as_ptr().addr().is_multiple_of(LINE));
            buffer.fill(1.0);
        }
    }

    #[test]
    fn a_refusal_says_how_much_was_asked_for() {
        for (len, bytes) in [(1 << 58, (1 << 61) + 64), (usize::MAX, usize::MAX)] {
            assert_eq!(Buffer::<f64>::zeros(len).err().map(|short| short.bytes), Some(bytes));
        }
    }
}
