//! The rule's plans of usual sizes: a change of the rule that changes them is seen here.

use super::{CLUSTERED, LARGE, SMALL, expansion, specialisation};
use crate::cuda::kernel::{Compress, Kernel, RewriteRead};
use crate::cuda::plan::candidates::packet;
use crate::cuda::plan::{Limits, Overrides, Plan, Residency, most_of_a_cluster};
use crate::tensor::Dtype;

#[test]
fn an_expansion_keeps_a_weight_that_fits_in_registers() {
    let plan = |m, taps, dtype| {
        let s = expansion(Kernel::ExpandBackward, 768, m, taps, dtype);
        let plan = Plan::new(&s, &LARGE, &Overrides::default()).unwrap();
        (plan.features, plan.keep_in_registers)
    };
    assert_eq!(plan(4, 4, Dtype::Bf16), (2, true));
    assert_eq!(plan(16, 4, Dtype::Bf16), (1, true), "half as long, to be kept");
    assert_eq!(plan(4, 8, Dtype::F32), (1, true));
    assert_eq!(plan(4, 8, Dtype::F64), (1, true));
    assert_eq!(plan(4, 9, Dtype::F64), (1, false), "numbers of twice the size");
    assert_eq!(plan(4, 64, Dtype::Bf16), (2, false));
    assert_eq!(plan(4, 1, Dtype::Bf16), (2, true));
}

#[test]
fn a_window_and_sums_live_in_registers_then_shared_memory_then_elsewhere() {
    let places = |d, m, taps| {
        let s = specialisation(Kernel::Backward, d, m, taps, Dtype::Bf16);
        let plan = Plan::new(&s, &SMALL, &Overrides::default()).unwrap();
        (plan.window, plan.sums)
    };
    assert_eq!(places(64, 1, 1), (Residency::Registers, Residency::Shared));
    assert_eq!(places(63, 1, 2), (Residency::Registers, Residency::Registers));
    assert_eq!(places(768, 4, 4), (Residency::Registers, Residency::Registers), "two packets a thread");
    assert_eq!(places(768, 2, 4), (Residency::Registers, Residency::Registers));
    assert_eq!(places(4096, 4, 1), (Residency::Registers, Residency::SeparateKernel));
    assert_eq!(places(4096, 4, 4), (Residency::Shared, Residency::SeparateKernel));
    assert_eq!(places(8192, 4, 4), (Residency::Global, Residency::SeparateKernel));
}

#[test]
fn separate_sums_live_in_registers_then_shared_memory_then_global() {
    let plan = |d, m, taps, dtype| {
        let s = specialisation(Kernel::Parameters, d, m, taps, dtype);
        let plan = Plan::new(&s, &LARGE, &Overrides::default()).unwrap();
        (plan.sums, plan.window, plan.threads, plan.features, plan.slices(&s))
    };
    let registers = (Residency::Registers, Residency::Registers);
    assert_eq!(plan(4096, 4, 4, Dtype::Bf16), (registers.0, registers.1, 128, 2, 16));
    assert_eq!(plan(4096, 16, 4, Dtype::Bf16), (registers.0, registers.1, 128, 1, 32), "shorter packets");
    assert_eq!(plan(8192, 8, 1, Dtype::F64), (registers.0, registers.1, 128, 1, 64));
    let shared = (Residency::Shared, Residency::Shared, 128, 1, 8);
    assert_eq!(plan(1000, 4, 64, Dtype::Bf16), shared);
    assert_eq!(plan(1000, 4, 128, Dtype::Bf16).1, Residency::Shared);
    assert_eq!(plan(1000, 4, 512, Dtype::Bf16).0, Residency::Global);
}

#[test]
fn a_token_is_staged_if_that_costs_no_block() {
    let planned = |kernel, d, m| {
        let s = specialisation(kernel, d, m, 1, Dtype::Bf16);
        let plan = Plan::new(&s, &LARGE, &Overrides::default()).unwrap();
        (plan.keep_in_registers, plan.stages, plan.blocks)
    };
    assert_eq!(planned(Kernel::Backward, 768, 4), (true, 1, 4));
    assert_eq!(planned(Kernel::Backward, 2048, 4), (true, 1, 1));
    assert_eq!(planned(Kernel::Backward, 1024, 8), (true, 1, 1));
    assert_eq!(planned(Kernel::Backward, 384, 16), (false, 1, 2), "re-read, with parameters in the cache");
    assert_eq!(planned(Kernel::Backward, 1280, 8), (false, 0, 2), "two blocks rather than a stage");
    assert_eq!(planned(Kernel::Backward, 4096, 4), (false, 1, 2), "the sums in a kernel of their own");
    assert_eq!(planned(Kernel::Forward, 2048, 4), (true, 1, 2));
    assert_eq!(planned(Kernel::Forward, 4096, 4), (true, 1, 1));
    assert_eq!(planned(Kernel::Forward, 4096, 8), (false, 1, 2));

    let odd = specialisation(Kernel::Backward, 2047, 1, 1, Dtype::Bf16);
    assert_eq!(Plan::new(&odd, &LARGE, &Overrides::default()).unwrap().stages, 0, "directions of two bytes");
    let unaligned =
        RewriteRead { aligned: false, ..specialisation(Kernel::Backward, 2048, 4, 1, Dtype::Bf16) };
    assert_eq!(Plan::new(&unaligned, &LARGE, &Overrides::default()).unwrap().stages, 0);
}

#[test]
fn a_kernel_that_spills_has_more_registers_next() {
    let s = specialisation(Kernel::Forward, 768, 4, 1, Dtype::Bf16);
    let first = Plan::new(&s, &LARGE, &Overrides::default()).unwrap();
    assert_eq!((first.threads, first.stages, first.blocks), (64, 1, 8));
    let second = first.after_spill(&s, &LARGE).unwrap();
    assert_eq!(second, Plan { blocks: 6, ..first });
    let s = RewriteRead { aligned: false, ..s };
    let first = Plan::new(&s, &LARGE, &Overrides::default()).unwrap();
    assert_eq!((first.stages, first.load_ahead), (0, 1), "packets of two bytes are not copied ahead");
    assert_eq!(first.after_spill(&s, &LARGE), Some(Plan { load_ahead: 0, ..first }));
    let alone = RewriteRead { rewrite: true, compress: Compress::None, ..s };
    assert_eq!(Plan::new(&alone, &LARGE, &Overrides::default()).unwrap().load_ahead, 0, "one sum");
}

#[test]
fn blocks_stay_within_those_of_a_multiprocessor() {
    let blocks = |limits: &Limits| {
        let s = specialisation(Kernel::Forward, 64, 1, 1, Dtype::Bf16);
        Plan::new(&s, limits, &Overrides::default()).unwrap().blocks
    };
    assert_eq!(blocks(&LARGE), 32);
    assert_eq!(blocks(&SMALL), 16);
}

#[test]
fn a_block_that_is_alone_on_its_multiprocessor_has_more_threads() {
    let threads = |d, m| {
        let s = specialisation(Kernel::Backward, d, m, 1, Dtype::Bf16);
        let plan = Plan::new(&s, &LARGE, &Overrides::default()).unwrap();
        assert!(!plan.keep_in_registers);
        (plan.threads, plan.blocks)
    };
    assert_eq!(threads(384, 16), (96, 2));
    assert_eq!(threads(1280, 8), (256, 2));
    assert_eq!(threads(4096, 4), (256, 2));
    let s = specialisation(Kernel::Backward, 4096, 4, 1, Dtype::Bf16);
    let next = Plan::new(&s, &LARGE, &Overrides::default()).unwrap().after_spill(&s, &LARGE).unwrap();
    assert_eq!((next.threads, next.blocks), (256, 1));
    assert_eq!(next.after_spill(&s, &LARGE), None);
}

#[test]
fn a_forward_reads_its_state_once_if_registers_can_keep_it() {
    let keeps = |d, m| {
        let s = specialisation(Kernel::Forward, d, m, 1, Dtype::Bf16);
        Plan::new(&s, &LARGE, &Overrides::default()).unwrap().keep_in_registers
    };
    for (m, widest) in [(1, 16_384), (2, 8192), (4, 4096), (8, 2048)] {
        assert!(keeps(384, m) && keeps(widest, m) && !keeps(2 * widest, m), "{m}");
    }
}

#[test]
fn packets_are_sixteen_bytes_if_they_can_be() {
    let features = |d, m, dtype| packet(&specialisation(Kernel::Forward, d, m, 1, dtype), d, 16);
    assert_eq!(features(768, 1, Dtype::Bf16), 8);
    assert_eq!(features(768, 4, Dtype::Bf16), 2);
    assert_eq!(features(768, 4, Dtype::F32), 1);
    assert_eq!(features(768, 8, Dtype::Bf16), 2, "a direction of two bytes would be loaded alone");
    assert_eq!(features(100, 1, Dtype::Bf16), 4);
    assert_eq!(features(63, 1, Dtype::Bf16), 1);
}

#[test]
fn clusters_need_an_architecture_and_a_compiler() {
    assert_eq!(most_of_a_cluster(90, (12, 1)), 8);
    assert_eq!(most_of_a_cluster(120, (13, 0)), 8);
    assert_eq!(most_of_a_cluster(89, (13, 0)), 1);
    assert_eq!(most_of_a_cluster(90, (12, 0)), 1);
    assert_eq!(most_of_a_cluster(90, (11, 8)), 1);
}

#[test]
fn a_token_that_is_too_much_for_a_block_is_given_to_a_cluster() {
    let planned = |kernel, d, m, taps, limits| {
        let s = specialisation(kernel, d, m, taps, Dtype::Bf16);
        let plan = Plan::new(&s, limits, &Overrides::default()).unwrap();
        (plan.cluster, plan.blocks)
    };
    for d in [384, 768, 1024] {
        for taps in [1, 4] {
            assert_eq!(planned(Kernel::Forward, d, 4, taps, &CLUSTERED).0, 1, "{d}");
            assert_eq!(planned(Kernel::Backward, d, 4, taps, &CLUSTERED).0, 1, "{d}");
        }
    }
    assert_eq!(planned(Kernel::Forward, 4096, 4, 1, &CLUSTERED), (1, 3), "as timed");
    assert_eq!(planned(Kernel::Forward, 4096, 4, 4, &CLUSTERED), (1, 1), "as measured");
    assert_eq!(planned(Kernel::Backward, 4096, 4, 1, &CLUSTERED), (4, 3));
    assert_eq!(planned(Kernel::Backward, 4096, 4, 4, &CLUSTERED), (8, 2), "sums in registers");
    assert_eq!(planned(Kernel::Backward, 8192, 4, 4, &CLUSTERED), (8, 2), "sums in shared memory");
    assert_eq!(planned(Kernel::Backward, 8192, 8, 4, &CLUSTERED), (8, 1), "parameters from L2");
    for kernel in [Kernel::Forward, Kernel::Backward] {
        assert_eq!(planned(kernel, 8192, 4, 4, &LARGE).0, 1);
        assert_eq!(planned(kernel, 8191, 4, 4, &CLUSTERED).0, 1, "no slices");
    }
}
