//! Rows of a CPU tensor.

use super::view::{Dtype, Element, Tensor};

impl Tensor {
    /// Returns the rows of `width` elements, which any thread may load.
    pub fn rows(&self, width: usize) -> Rows<'_> {
        Rows { tensor: self, width, start: 0, end: usize::MAX } // `row` checks the tensor's own end
    }

    /// Splits an output into consecutive groups of rows with one owner each; `bounds` ascend from 0 to all rows.
    pub fn split_rows(&mut self, width: usize, bounds: &[usize]) -> Vec<RowsMut<'_>> {
        let rows = *bounds.last().expect("bounds name at least one group");
        assert!(bounds[0] == 0 && rows * width == self.len(), "bounds cover the tensor");
        assert!(self.is_empty() || self.readable, "only the CPU's own memory is touched here");
        let tensor: &Tensor = self;
        bounds
            .windows(2)
            .map(|pair| {
                assert!(pair[0] <= pair[1], "bounds ascend");
                RowsMut { tensor, width, start: pair[0], end: pair[1] }
            })
            .collect()
    }
}

/// Rows `start..end` of a tensor.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    tensor: &'a Tensor,
    pub width: usize,
    start: usize,
    end: usize,
}

impl<'a> Rows<'a> {
    pub fn dtype(&self) -> Dtype {
        self.tensor.dtype
    }

    /// Returns a row of a tensor whose element type is `T`.
    #[inline(always)]
    pub fn row<T: Element>(&self, row: usize) -> &'a [T] {
        let Rows { tensor, width, start, end } = *self;
        assert!(T::DTYPE == tensor.dtype, "dtype is checked before use");
        assert!(start <= row && row < end, "a partition loads its own rows");
        if width == 0 {
            return &[];
        }
        let first = row * width;
        assert!(first < tensor.len && width <= tensor.len - first, "rows lie inside their tensor");
        assert!(tensor.readable, "only the CPU's own memory is touched here");
        // SAFETY: contiguous and alive for `len` elements of this dtype (the contract in `view`).
        unsafe { std::slice::from_raw_parts(tensor.ptr.cast::<T>().add(first), width) }
    }

    /// Fetches a row that is needed soon; nothing happens past the end.
    #[inline(always)]
    pub fn fetch(&self, row: usize) {
        let bytes = self.width * self.tensor.dtype.size();
        let first = self.tensor.ptr.wrapping_add(row * bytes);
        (0..bytes).step_by(LINE).for_each(|at| prefetch(first.wrapping_add(at)));
    }
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Fetches a cache line that is needed soon.
///
/// Rows are short compared with the latency of memory: the hardware prefetcher has hardly begun when a row ends, and
/// idles during the arithmetic that follows.
#[inline(always)]
pub fn prefetch<T>(line: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a prefetch is a hint; it never faults, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

/// Rows `start..end` of an output, owned by one partition.
pub struct RowsMut<'a> {
    tensor: &'a Tensor,
    pub width: usize,
    start: usize,
    end: usize,
}

impl RowsMut<'_> {
    pub fn dtype(&self) -> Dtype {
        self.tensor.dtype
    }

    /// Returns the same rows, to be loaded before they are stored.
    #[inline(always)]
    pub fn as_rows(&self) -> Rows<'_> {
        let RowsMut { tensor, width, start, end } = *self;
        Rows { tensor, width, start, end }
    }

    #[inline(always)]
    pub fn row<T: Element>(&mut self, row: usize) -> &mut [T] {
        assert!(T::DTYPE == self.tensor.dtype, "dtype is checked before use");
        assert!((self.start..self.end).contains(&row), "a partition stores its own rows");
        // SAFETY: inside the tensor, and `split_rows` gave this row to nobody else.
        unsafe {
            let first = self.tensor.ptr.cast::<T>().add(row * self.width);
            std::slice::from_raw_parts_mut(first, self.width)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::super::view::Device;
    use super::*;

    #[test]
    fn no_row_is_read_that_is_not_the_tensors_own() {
        let mut numbers = [0f32, 1.0, 2.0, 3.0, 4.0, 5.0];
        // SAFETY: six numbers, which outlive the tensor.
        let tensor = unsafe {
            Tensor::new("numbers", vec![3, 2], Dtype::F32, Device::Cpu, numbers.as_mut_ptr().cast())
        };
        // SAFETY: memory that is not there has a null pointer.
        let absent =
            unsafe { Tensor::new("absent", vec![3, 2], Dtype::F32, Device::Cpu, std::ptr::null_mut()) };
        let refused = |read: &dyn Fn() -> usize| catch_unwind(AssertUnwindSafe(read)).is_err();
        assert_eq!(tensor.rows(2).row::<f32>(2), [4.0, 5.0]);
        assert!(tensor.rows(0).row::<f32>(7).is_empty());
        assert!(refused(&|| tensor.rows(2).row::<f32>(3).len()));
        assert!(refused(&|| tensor.rows(4).row::<f32>(1).len()), "half of it lies behind the end");
        assert!(refused(&|| tensor.rows(2).row::<f64>(0).len()));
        assert!(refused(&|| absent.rows(2).row::<f32>(0).len()));
    }
}
