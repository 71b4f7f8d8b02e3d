//! Tests of the planner.

mod measured;
mod overrides;
mod planned;
mod properties;
mod tiles;

use super::limits::Limits;
use crate::cuda::kernel::{Kernel, RewriteRead};
use crate::cuda::plan::samples::{CLUSTERED, LARGE, SMALL, expansion, specialisation};
use crate::tensor::Dtype;

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
