//! Blocks of an output: some heads and columns of every row, for operators whose tasks divide heads.

use std::ops::Range;

use super::view::{Dtype, Element, Tensor};

/// The part of an output (outer, rows, heads, width) that one task stores: all rows of one `outer`, and of these some
/// heads and some columns.
pub struct Block<'a> {
    tensor: &'a Tensor,
    /// of the tensor: rows of an `outer`, heads of a row, columns of a head
    axes: [usize; 3],
    outer: usize,
    heads: Range<usize>,
    columns: Range<usize>,
}

impl Tensor {
    /// Splits an output (outer, rows, heads, width) into blocks of so many heads and at most so many columns, with one
    /// owner each, in the order outer, heads, columns.
    pub fn split_blocks(&mut self, shape: [usize; 4], heads: usize, columns: usize) -> Vec<Block<'_>> {
        let [outer, rows, all, width] = shape;
        assert!(outer * rows * all * width == self.len(), "blocks cover the tensor");
        assert!(heads > 0 && all.is_multiple_of(heads) && columns > 0, "blocks do not overlap");
        assert!(self.is_empty() || self.readable, "only the CPU's own memory is touched here");
        let tensor: &Tensor = self;
        let mut blocks = Vec::with_capacity(outer * (all / heads) * width.div_ceil(columns));
        for outer in 0..outer {
            for head in (0..all).step_by(heads) {
                for column in (0..width).step_by(columns) {
                    let (heads, columns) = (head..head + heads, column..width.min(column + columns));
                    blocks.push(Block { tensor, axes: [rows, all, width], outer, heads, columns });
                }
            }
        }
        blocks
    }
}

impl Block<'_> {
    pub fn dtype(&self) -> Dtype {
        self.tensor.dtype
    }

    /// Returns the block's columns of a row and of one of the block's heads, counted from its first.
    #[inline(always)]
    pub fn row<T: Element>(&mut self, row: usize, head: usize) -> &mut [T] {
        let [rows, all, width] = self.axes;
        assert!(T::DTYPE == self.tensor.dtype, "dtype is checked before use");
        assert!(row < rows && head < self.heads.len(), "a task stores its own block");
        let first = ((self.outer * rows + row) * all + self.heads.start + head) * width + self.columns.start;
        // SAFETY: inside the tensor, whose length `split_blocks` compared, and it gave these elements to nobody else.
        unsafe {
            let first = self.tensor.ptr.cast::<T>().add(first);
            std::slice::from_raw_parts_mut(first, self.columns.len())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::super::view::Device;
    use super::*;

    #[test]
    fn every_element_has_one_owner() {
        let mut numbers = [0f32; 2 * 3 * 4 * 5];
        // SAFETY: so many numbers, which outlive the tensor.
        let mut tensor = unsafe {
            Tensor::new("numbers", vec![2, 3, 4, 5], Dtype::F32, Device::Cpu, numbers.as_mut_ptr().cast())
        };
        let mut blocks = tensor.split_blocks([2, 3, 4, 5], 2, 3);
        assert_eq!(blocks.len(), 2 * 2 * 2);
        for (at, block) in blocks.iter_mut().enumerate() {
            for (row, head) in (0..3).flat_map(|row| [(row, 0), (row, 1)]) {
                let part = block.row::<f32>(row, head);
                assert_eq!(part.len(), if at % 2 == 0 { 3 } else { 2 });
                part.iter_mut().for_each(|number| *number += (at + 1) as f32);
            }
            let refused = |row, head, block: &mut Block<'_>| {
                catch_unwind(AssertUnwindSafe(|| block.row::<f32>(row, head).len())).is_err()
            };
            assert!(refused(3, 0, block) && refused(0, 2, block));
            assert!(catch_unwind(AssertUnwindSafe(|| block.row::<f64>(0, 0).len())).is_err());
        }
        drop(blocks);
        let owner = |index: usize| {
            let (outer, head, column) = (index / 60, index / 5 % 4, index % 5);
            (outer * 4 + head / 2 * 2 + column / 3 + 1) as f32
        };
        assert!(numbers.iter().enumerate().all(|(index, number)| *number == owner(index)));
    }
}
