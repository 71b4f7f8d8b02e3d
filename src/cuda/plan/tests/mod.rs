use super::candidates::{candidates, packet};
use super::chunk::{chunk, expand_blocks, expand_chunk};
use super::fits::MOST_STATIC;
use super::footprint::static_shared;
use super::limits::{Limits, RESERVED, most_of_a_cluster};
use super::overrides::{Overrides, Residency};
use super::plan::Plan;
use crate::cuda::kernel::{Compress, Kernel, Parts, Specialisation, Types};
use crate::tensor::Dtype;

const LARGE: Limits = Limits {
    multiprocessors: 132,
    shared_per_block: 227 << 10,
    shared_per_multiprocessor: 228 << 10,
    registers_per_multiprocessor: 65_536,
    threads_per_multiprocessor: 2048,
    cluster: 1,
};
const CLUSTERED: Limits = Limits { cluster: 8, ..LARGE };
const SMALL: Limits = Limits {
    multiprocessors: 30,
    shared_per_block: 99 << 10,
    shared_per_multiprocessor: 100 << 10,
    threads_per_multiprocessor: 1536,
    ..LARGE
};
const FREE: Overrides = Overrides {
    cluster: None,
    threads: None,
    features: None,
    keep_in_registers: None,
    window: None,
    sums: None,
    separate_sums: None,
    stages: None,
    blocks: None,
    chunk: None,
};

fn specialisation(kernel: Kernel, d: usize, m: usize, taps: usize, dtype: Dtype) -> Specialisation {
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
    Specialisation { kernel, d, m, taps, types, rewrite: true, compress, parts, aligned: true }
}

/// Sizes, dtypes and devices that reach every branch.
fn every_case() -> impl Iterator<Item = (Specialisation, Limits)> {
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

#[test]
fn a_plan_keeps_to_the_kernels_and_the_devices_limits() {
    for (s, limits) in every_case() {
        let plan = Plan::new(&s, &limits, &FREE).unwrap();
        let about = format!("{s:?}: {plan:?}");
        assert!(plan.threads.is_multiple_of(32) && (32..=1024).contains(&plan.threads), "{about}");
        assert!(plan.cluster <= limits.cluster, "{about}");
        assert!(s.d.is_multiple_of(plan.cluster * plan.features), "{about}");
        assert!((1..=32).contains(&plan.blocks), "{about}");
        let fixed = static_shared(&s, plan.cluster * plan.threads);
        assert!(fixed <= MOST_STATIC, "{about}");
        assert!(plan.shared + fixed + RESERVED <= limits.shared_per_block, "{about}");
        assert!(plan.threads * plan.blocks <= limits.threads_per_multiprocessor, "{about}");
    }
}

#[test]
fn a_plan_is_relaxed_to_an_end_within_the_limits() {
    for (s, limits) in every_case() {
        let mut plan = Plan::new(&s, &limits, &FREE).unwrap();
        let mut steps = 0;
        while let Some(next) = plan.after_spill(&s, &limits) {
            assert_ne!(next, plan);
            let shared = next.shared + static_shared(&s, next.cluster * next.threads) + RESERVED;
            assert!(shared <= limits.shared_per_block);
            let together = next.stages == 0 || next.blocks * shared <= limits.shared_per_multiprocessor;
            assert!(together, "{s:?}: {next:?}");
            plan = next;
            steps += 1;
            assert!(steps <= 64, "{s:?}");
        }
    }
}

#[test]
fn an_expansion_is_relaxed_to_shorter_packets_of_its_own() {
    for (m, taps) in [(1, 8), (4, 4), (8, 4), (16, 4), (4, 512)] {
        let s = specialisation(Kernel::ExpandBackward, 768, m, taps, Dtype::Bf16);
        let mut plan = Plan::new(&s, &LARGE, &FREE).unwrap();
        while let Some(next) = plan.after_spill(&s, &LARGE) {
            assert_eq!(next.features, plan.features / 2);
            assert_eq!((next.shared, next.blocks, next.window), (0, 1, Residency::Registers));
            assert_eq!(next.threads, (768 / next.features).min(128));
            plan = next;
        }
        assert_eq!(plan.features, 1);
    }
    let s = specialisation(Kernel::Reduce, 768, 4, 4, Dtype::F32);
    assert_eq!(Plan::new(&s, &LARGE, &FREE).unwrap().after_spill(&s, &LARGE), None);
}

#[test]
fn an_expansion_holds_what_fits_in_registers() {
    let plan = |m, taps, dtype| {
        let s = specialisation(Kernel::ExpandBackward, 768, m, taps, dtype);
        let plan = Plan::new(&s, &LARGE, &FREE).unwrap();
        (plan.features, plan.keep_in_registers)
    };
    assert_eq!(plan(4, 4, Dtype::Bf16), (2, true));
    assert_eq!(plan(16, 4, Dtype::Bf16), (1, true), "half as long, to be held");
    assert_eq!(plan(4, 8, Dtype::F32), (1, true));
    assert_eq!(plan(4, 8, Dtype::F64), (1, true));
    assert_eq!(plan(4, 9, Dtype::F64), (1, false), "numbers of twice the size");
    assert_eq!(plan(4, 64, Dtype::Bf16), (2, false));
    assert_eq!(plan(4, 1, Dtype::Bf16), (2, true));
}

#[test]
fn numbers_live_in_registers_then_shared_memory_then_elsewhere() {
    let places = |d, m, taps| {
        let s = specialisation(Kernel::Backward, d, m, taps, Dtype::Bf16);
        let plan = Plan::new(&s, &SMALL, &FREE).unwrap();
        (plan.window, plan.sums)
    };
    assert_eq!(places(64, 1, 1), (Residency::Registers, Residency::Shared));
    assert_eq!(places(63, 1, 2), (Residency::Registers, Residency::Registers));
    assert_eq!(places(768, 4, 4), (Residency::Registers, Residency::Registers), "two packets a thread");
    assert_eq!(places(768, 2, 4), (Residency::Shared, Residency::Shared));
    assert_eq!(places(4096, 4, 1), (Residency::Registers, Residency::SeparateKernel));
    assert_eq!(places(4096, 4, 4), (Residency::Global, Residency::SeparateKernel));
}

#[test]
fn sums_apart_live_in_registers_then_shared_memory_then_global() {
    let plan = |d, m, taps, dtype| {
        let s = specialisation(Kernel::Parameters, d, m, taps, dtype);
        let plan = Plan::new(&s, &LARGE, &FREE).unwrap();
        (plan.sums, plan.window, plan.threads, plan.features, plan.slices(&s))
    };
    let registers = (Residency::Registers, Residency::Registers);
    assert_eq!(plan(4096, 4, 4, Dtype::Bf16), (registers.0, registers.1, 128, 2, 16));
    assert_eq!(plan(4096, 16, 4, Dtype::Bf16), (registers.0, registers.1, 128, 1, 32), "shorter packets");
    assert_eq!(plan(8192, 8, 1, Dtype::F64), (registers.0, registers.1, 128, 1, 64));
    assert_eq!(plan(1000, 4, 64, Dtype::Bf16), (Residency::Shared, Residency::Shared, 128, 1, 8));
    assert_eq!(
        plan(1000, 4, 128, Dtype::Bf16),
        (Residency::Shared, Residency::Shared, 64, 1, 16),
        "fewer threads"
    );
    assert_eq!(plan(1000, 4, 512, Dtype::Bf16).0, Residency::Global);
}

#[test]
fn rows_travel_ahead_where_few_blocks_share_a_multiprocessor() {
    let planned = |kernel, d, m| {
        let s = specialisation(kernel, d, m, 1, Dtype::Bf16);
        let plan = Plan::new(&s, &LARGE, &FREE).unwrap();
        (plan.keep_in_registers, plan.stages, plan.blocks)
    };
    assert_eq!(planned(Kernel::Backward, 768, 4), (true, 0, 4), "enough blocks");
    assert_eq!(planned(Kernel::Backward, 2048, 4), (true, 1, 1));
    assert_eq!(planned(Kernel::Backward, 1024, 8), (true, 1, 1));
    assert_eq!(planned(Kernel::Backward, 384, 16), (false, 2, 2), "to be taken twice");
    assert_eq!(planned(Kernel::Backward, 1280, 8), (false, 2, 1));
    assert_eq!(planned(Kernel::Backward, 4096, 4), (false, 0, 1), "no room beside the sums");
    assert_eq!(planned(Kernel::Forward, 2048, 4), (true, 0, 2), "held, and loaded ahead");
    assert_eq!(planned(Kernel::Forward, 4096, 4), (true, 1, 1));
    assert_eq!(planned(Kernel::Forward, 4096, 8), (false, 1, 2), "two blocks rather than two stages");

    let odd = specialisation(Kernel::Backward, 2047, 1, 1, Dtype::Bf16);
    assert_eq!(Plan::new(&odd, &LARGE, &FREE).unwrap().stages, 0, "directions of two bytes");
    let unaligned =
        Specialisation { aligned: false, ..specialisation(Kernel::Backward, 2048, 4, 1, Dtype::Bf16) };
    assert_eq!(Plan::new(&unaligned, &LARGE, &FREE).unwrap().stages, 0);
}

#[test]
fn a_block_that_is_alone_on_its_multiprocessor_has_more_threads() {
    let threads = |d, m| {
        let s = specialisation(Kernel::Backward, d, m, 1, Dtype::Bf16);
        let plan = Plan::new(&s, &LARGE, &FREE).unwrap();
        assert!(!plan.keep_in_registers);
        (plan.threads, plan.blocks)
    };
    assert_eq!(threads(384, 16), (96, 2));
    assert_eq!(threads(1280, 8), (512, 1));
    assert_eq!(threads(4096, 4), (512, 1));
    let s = specialisation(Kernel::Backward, 4096, 4, 1, Dtype::Bf16);
    let relaxed = Plan::new(&s, &LARGE, &FREE).unwrap().after_spill(&s, &LARGE).unwrap();
    assert_eq!((relaxed.threads, relaxed.blocks), (256, 1));
    assert_eq!(relaxed.after_spill(&s, &LARGE), None);
}

#[test]
fn a_forward_reads_its_state_once_where_registers_can_hold_it() {
    let hold = |d, m| {
        let s = specialisation(Kernel::Forward, d, m, 1, Dtype::Bf16);
        Plan::new(&s, &LARGE, &FREE).unwrap().keep_in_registers
    };
    for (m, widest) in [(1, 16_384), (2, 8192), (4, 4096), (8, 2048)] {
        assert!(hold(384, m) && hold(widest, m) && !hold(2 * widest, m), "{m}");
    }
}

#[test]
fn packets_are_sixteen_bytes_where_they_can_be() {
    let features = |d, m, dtype| packet(&specialisation(Kernel::Forward, d, m, 1, dtype), d);
    assert_eq!(features(768, 1, Dtype::Bf16), 8);
    assert_eq!(features(768, 4, Dtype::Bf16), 2);
    assert_eq!(features(768, 4, Dtype::F32), 1);
    assert_eq!(features(768, 8, Dtype::Bf16), 2, "a direction of two bytes would be loaded alone");
    assert_eq!(features(100, 1, Dtype::Bf16), 4);
    assert_eq!(features(63, 1, Dtype::Bf16), 1);
}

#[test]
fn too_many_value_channels_are_refused() {
    let s = specialisation(Kernel::Backward, 8, 7000, 1, Dtype::F32);
    let refused = Plan::new(&s, &LARGE, &FREE).unwrap_err().to_string();
    assert!(refused.starts_with("`state` must have fewer value channels to be worked on by a GPU, got 7000"));
}

#[test]
fn chunks_cover_the_tokens_in_one_wave() {
    for tokens in [1, 7, 131, 132, 133, 4096, 100_000] {
        for (kernel, d) in [(Kernel::Forward, 768), (Kernel::Backward, 4096), (Kernel::Parameters, 4096)] {
            let s = specialisation(kernel, d, 4, 1, Dtype::Bf16);
            let plan = Plan::new(&s, &CLUSTERED, &FREE).unwrap();
            let chunk = chunk(&s, &plan, plan.wave(&CLUSTERED), &CLUSTERED, &FREE, tokens);
            let blocks = tokens.div_ceil(chunk) * plan.slices(&s);
            assert!(chunk >= 1 && blocks <= CLUSTERED.multiprocessors * plan.blocks, "{d}: {blocks}");
        }
    }
}

#[test]
fn chunks_leave_out_what_clusters_have_no_room_for() {
    let s = specialisation(Kernel::Backward, 4096, 4, 1, Dtype::Bf16);
    let plan = Plan::new(&s, &CLUSTERED, &FREE).unwrap();
    assert_eq!((plan.cluster, plan.wave(&CLUSTERED)), (4, 396));
    let chunk = |wave| chunk(&s, &plan, wave, &CLUSTERED, &FREE, 9900);
    assert_eq!(chunk(396), 100);
    assert_eq!(chunk(360), 110);
    assert_eq!(chunk(4), 9900);
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
        let plan = Plan::new(&s, limits, &FREE).unwrap();
        (plan.cluster, plan.blocks)
    };
    for d in [384, 768, 1024] {
        for taps in [1, 4] {
            assert_eq!(planned(Kernel::Forward, d, 4, taps, &CLUSTERED).0, 1, "{d}");
            assert_eq!(planned(Kernel::Backward, d, 4, taps, &CLUSTERED).0, 1, "{d}");
        }
    }
    assert_eq!(planned(Kernel::Forward, 4096, 4, 1, &CLUSTERED), (1, 1), "parameters in the cache");
    assert_eq!(planned(Kernel::Forward, 4096, 4, 4, &CLUSTERED), (4, 2), "two blocks' slices of them");
    assert_eq!(planned(Kernel::Backward, 4096, 4, 1, &CLUSTERED), (4, 3));
    assert_eq!(planned(Kernel::Backward, 4096, 4, 4, &CLUSTERED), (8, 2), "sums in registers");
    assert_eq!(planned(Kernel::Backward, 8192, 4, 4, &CLUSTERED), (8, 1), "not two of eight, but one");
    assert_eq!(planned(Kernel::Backward, 8192, 8, 4, &CLUSTERED).0, 1, "too much for any cluster");
    for kernel in [Kernel::Forward, Kernel::Backward] {
        assert_eq!(planned(kernel, 8192, 4, 4, &LARGE).0, 1);
        assert_eq!(planned(kernel, 8191, 4, 4, &CLUSTERED).0, 1, "no slices");
    }
}

#[test]
fn a_token_reads_halo_stays_small_while_there_is_work_for_all() {
    let s = specialisation(Kernel::Forward, 768, 4, 4, Dtype::Bf16);
    let plan = Plan::new(&s, &CLUSTERED, &FREE).unwrap();
    let chunk = |tokens| chunk(&s, &plan, plan.wave(&CLUSTERED), &LARGE, &FREE, tokens);
    assert_eq!(chunk(132 * 40), 30);
    assert_eq!(chunk(132 * 8), 8);
}

#[test]
fn an_expansions_chunks_fit_a_grid() {
    let mut s = specialisation(Kernel::ExpandBackward, 768, 4, 4, Dtype::Bf16);
    for (sequences, time) in [(1, 1), (1, 10_000_000), (64, 1024), (65_535, 7), (1_000_000, 1)] {
        for compress in [Compress::Token, Compress::None] {
            s.compress = compress;
            let plan = Plan::new(&s, &LARGE, &FREE).unwrap();
            let chunk = expand_chunk(&s, &plan, &LARGE, &FREE, sequences, time);
            assert!((1..=time).contains(&chunk));
            let chunks = sequences * time.div_ceil(chunk);
            let [across, down] = expand_blocks(&s, &plan, &LARGE, chunks);
            assert_eq!(across, 3);
            assert!((1..=704).contains(&down) && down <= chunks, "{sequences} × {time}: {down}");
        }
    }
}
