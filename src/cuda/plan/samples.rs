//! Devices and specialisations for tests.

use super::Limits;
use crate::cuda::kernel::{Compress, Expand, Kernel, ParameterSums, Parts, RewriteRead, Types};
use crate::problem::Erase;
use crate::tensor::Dtype;

pub const LARGE: Limits = Limits {
    multiprocessors: 132,
    shared_per_block: 227 << 10,
    shared_per_multiprocessor: 228 << 10,
    registers_per_multiprocessor: 65_536,
    threads_per_multiprocessor: 2048,
    blocks_per_multiprocessor: 32,
    cluster: 1,
};
pub const CLUSTERED: Limits = Limits { cluster: 8, ..LARGE };
pub const SMALL: Limits = Limits {
    multiprocessors: 30,
    shared_per_block: 99 << 10,
    shared_per_multiprocessor: 100 << 10,
    threads_per_multiprocessor: 1536,
    blocks_per_multiprocessor: 16,
    ..LARGE
};

pub fn specialisation(kernel: Kernel, d: usize, m: usize, taps: usize, dtype: Dtype) -> RewriteRead {
    let real = if dtype == Dtype::F64 { Dtype::F64 } else { Dtype::F32 };
    let types = Types { state: dtype, direction: dtype, context: dtype, ..Types::all(real) };
    let compress = if taps > 1 { Compress::Token } else { Compress::Channel };
    let parts = Parts { norm: true, norm_weight: true, gate: true, value: true, ..Parts::default() };
    let summed = kernel != Kernel::Forward;
    let sums = ParameterSums { compress: summed, norm: summed, gate: summed, value: summed };
    let (rewrite, chain, cached, documents, aligned) = (true, false, false, false, true);
    RewriteRead {
        kernel,
        d,
        m,
        taps,
        types,
        rewrite,
        rewrites: 1,
        erase: Erase::default(),
        next: 1,
        compress,
        parts,
        sums,
        chain,
        cached,
        documents,
        aligned,
    }
}

/// A convolution, or a repetition if there is one tap.
pub fn expansion(kernel: Kernel, d: usize, m: usize, taps: usize, dtype: Dtype) -> Expand {
    let real = if dtype == Dtype::F64 { Dtype::F64 } else { Dtype::F32 };
    let (weight, documents, aligned) = ((taps > 1).then_some(real), false, true);
    Expand { kernel, d, m, taps, state: dtype, x: dtype, weight, documents, aligned }
}
