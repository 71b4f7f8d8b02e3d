//! Devices and specialisations that the tests plan for.

mod chunks;
mod overrides;
mod planned;
mod properties;
mod reasons;
mod tiles;

use super::limits::Limits;
use crate::cuda::kernel::{Compress, Expand, Kernel, ParameterSums, Parts, RewriteRead, Types};
use crate::problem::Erase;
use crate::tensor::Dtype;

const LARGE: Limits = Limits {
    multiprocessors: 132,
    shared_per_block: 227 << 10,
    shared_per_multiprocessor: 228 << 10,
    registers_per_multiprocessor: 65_536,
    threads_per_multiprocessor: 2048,
    blocks_per_multiprocessor: 32,
    cluster: 1,
};
const CLUSTERED: Limits = Limits { cluster: 8, ..LARGE };
const SMALL: Limits = Limits {
    multiprocessors: 30,
    shared_per_block: 99 << 10,
    shared_per_multiprocessor: 100 << 10,
    threads_per_multiprocessor: 1536,
    blocks_per_multiprocessor: 16,
    ..LARGE
};
fn specialisation(kernel: Kernel, d: usize, m: usize, taps: usize, dtype: Dtype) -> RewriteRead {
    let real = if dtype == Dtype::F64 { Dtype::F64 } else { Dtype::F32 };
    let types = Types {
        state: dtype,
        direction: dtype,
        context: dtype,
        compress: real,
        norm: real,
        gate: real,
        gate_bias: real,
        value: real,
        value_bias: real,
    };
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
fn expansion(kernel: Kernel, d: usize, m: usize, taps: usize, dtype: Dtype) -> Expand {
    let real = if dtype == Dtype::F64 { Dtype::F64 } else { Dtype::F32 };
    let (weight, documents, aligned) = ((taps > 1).then_some(real), false, true);
    Expand { kernel, d, m, taps, state: dtype, x: dtype, weight, documents, aligned }
}

/// Sizes, dtypes and devices that reach every branch.
fn every_case() -> impl Iterator<Item = (RewriteRead, Limits)> {
    let sizes = [1, 3, 63, 64, 100, 384, 768, 1000, 1600, 4096, 8192, 10_007, 20_000, 65_536];
    let kernels = [Kernel::Forward, Kernel::Backward, Kernel::Parameters];
    let types = [Dtype::Bf16, Dtype::F32, Dtype::F64];
    sizes.into_iter().flat_map(move |d| {
        kernels.into_iter().flat_map(move |kernel| {
            types.into_iter().flat_map(move |dtype| {
                [(1, 1), (4, 1), (4, 4), (3, 9), (16, 2), (100, 1)].into_iter().flat_map(move |(m, taps)| {
                    [LARGE, SMALL, CLUSTERED]
                        .map(|limits| (specialisation(kernel, d, m, taps, dtype), limits))
                })
            })
        })
    })
}
