//! Memory for a call's outputs.

use half::{bf16, f16};

use crate::error::{Error, Result};
use crate::problem::Allocate;
use crate::tensor::{Device, Dtype, Element, Tensor};

/// The memory of the outputs of one call; its blocks stay where they are until it is dropped.
#[derive(Default)]
pub(super) struct Memory(Vec<Block>);

enum Block {
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl Block {
    fn new(dtype: Dtype, len: usize) -> Result<Block> {
        Ok(match dtype {
            Dtype::F32 => Block::F32(zeros(len)?),
            Dtype::F64 => Block::F64(zeros(len)?),
            Dtype::Bf16 => Block::Bf16(zeros(len)?),
            Dtype::F16 => Block::F16(zeros(len)?),
            Dtype::Bool => unreachable!("no operator returns a mask"),
        })
    }

    fn address(&mut self) -> *mut u8 {
        match self {
            Block::F32(numbers) => numbers.as_mut_ptr().cast(),
            Block::F64(numbers) => numbers.as_mut_ptr().cast(),
            Block::Bf16(numbers) => numbers.as_mut_ptr().cast(),
            Block::F16(numbers) => numbers.as_mut_ptr().cast(),
        }
    }
}

fn zeros<T: Clone + Default>(len: usize) -> Result<Vec<T>> {
    let mut numbers = Vec::new();
    let refused = |_| Error::Allocation { bytes: len.saturating_mul(size_of::<T>()), device: "cpu".into() };
    numbers.try_reserve_exact(len).map_err(refused)?;
    numbers.resize(len, T::default());
    Ok(numbers)
}

impl Allocate for Memory {
    fn output(&mut self, name: &'static str, shape: &[usize], dtype: Dtype, _: &Tensor) -> Result<Tensor> {
        let mut block = Block::new(dtype, shape.iter().product())?;
        // SAFETY: zeros of this dtype, which nobody else has. Whoever keeps the tensor keeps this memory, and a vector
        // that is moved leaves its elements where they are.
        let tensor = unsafe { Tensor::new(name, shape.to_vec(), dtype, Device::Cpu, block.address()) };
        self.0.push(block);
        Ok(tensor)
    }

    fn absent_output(&mut self, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(None)
    }
}

/// Returns the elements of an output; none if it is absent.
pub(super) fn elements<T: Element>(output: &Option<Tensor>) -> &[T] {
    output.as_ref().map_or(&[], |tensor| tensor.rows(tensor.len()).row(0))
}
