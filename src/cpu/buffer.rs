//! Scratch memory aligned to cache lines, because a 64-byte vector that straddles two lines costs twice.
//!
//! Its size grows with the user's shapes (d·m·K and more), so the allocation may fail. Callers pass the failure
//! on to Python as a `MemoryError`.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

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
    first: NonNull<A>,
    len: usize,
}

// SAFETY: it owns its elements, as a vector does.
unsafe impl<A: Send> Send for Buffer<A> {}
unsafe impl<A: Sync> Sync for Buffer<A> {}

impl<A: Element> Buffer<A> {
    pub fn zeros(len: usize) -> Result<Buffer<A>> {
        let refused = OutOfMemory { bytes: len.saturating_mul(size_of::<A>()) };
        let Some(layout) = layout::<A>(len) else { return Err(refused) };
        if len == 0 {
            return Ok(Buffer { first: NonNull::dangling(), len });
        }
        // SAFETY: the layout is not empty. Zeros are a number of every element type.
        let first = NonNull::new(unsafe { alloc_zeroed(layout) }.cast());
        first.map(|first| Buffer { first, len }).ok_or(refused)
    }
}

fn layout<A>(len: usize) -> Option<Layout> {
    Layout::array::<A>(len).and_then(|layout| layout.align_to(LINE)).ok()
}

impl<A> Drop for Buffer<A> {
    fn drop(&mut self) {
        if let (1.., Some(layout)) = (self.len, layout::<A>(self.len)) {
            // SAFETY: `zeros` allocated with this layout.
            unsafe { dealloc(self.first.as_ptr().cast(), layout) };
        }
    }
}

impl<A> Deref for Buffer<A> {
    type Target = [A];

    #[inline(always)]
    fn deref(&self) -> &[A] {
        // SAFETY: so many elements are allocated, and all are numbers.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.len) }
    }
}

impl<A> DerefMut for Buffer<A> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [A] {
        // SAFETY: as above; the borrow is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.first.as_ptr(), self.len) }
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
            assert!(buffer.len() == len && buffer.iter().all(|number| *number == 0.0));
            assert!(len == 0 || buffer.as_ptr().addr().is_multiple_of(LINE));
            buffer.fill(1.0);
        }
    }

    #[test]
    fn a_refusal_says_how_much_was_asked_for() {
        for (len, bytes) in [(1 << 58, 1 << 61), (usize::MAX, usize::MAX)] {
            assert_eq!(Buffer::<f64>::zeros(len).err().map(|short| short.bytes), Some(bytes));
        }
    }
}
