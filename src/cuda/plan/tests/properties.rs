//! Every case: limits are kept, retries end, overrides filter.

use std::iter::successors;

use super::{CLUSTERED, LARGE, every_case, expansion, specialisation};
use crate::cuda::kernel::{Compress, Kernel, RewriteRead};
use crate::cuda::plan::candidates::candidates;
use crate::cuda::plan::footprint::{MOST_STATIC, fits, static_shared};
use crate::cuda::plan::{Overrides, Plan, RESERVED, Residency};
use crate::tensor::Dtype;

#[test]
fn a_plan_keeps_to_the_kernels_and_the_devices_limits() {
    for (s, limits) in every_case() {
        let plan = Plan::new(&s, &limits, &Overrides::default()).unwrap();
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
fn plans_that_spill_come_to_an_end_within_the_limits() {
    for (s, limits) in every_case().step_by(5) {
        let first = Plan::new(&s, &limits, &Overrides::default()).unwrap();
        let separate = first.sums == Residency::SeparateKernel;
        let plans: Vec<Plan> =
            successors(Some(first), |plan| plan.after_spill(&s, &limits)).take(49).collect();
        assert!(plans.len() <= 48, "{s:?}");
        for (place, plan) in plans.iter().enumerate() {
            assert!(!plans[..place].contains(plan), "{s:?}: {plan:?}");
            assert!(fits(&s, plan, &limits));
            assert_eq!(plan.sums == Residency::SeparateKernel, separate, "warm-up has decided that: {s:?}");
        }
    }
}

#[test]
fn an_override_keeps_every_candidate_that_has_it_and_no_other() {
    for (s, limits) in every_case().step_by(23) {
        let all = candidates(&(&s).into(), &limits, &Overrides::default());
        let macros: Vec<_> = all.iter().map(Plan::defines).collect();
        let mut every: Vec<_> = macros.iter().flatten().filter(|(name, _)| can_override(&s, name)).collect();
        every.sort();
        every.dedup();
        for one in every {
            let separate = s.kernel == Kernel::Parameters && one.0 == "SUMS";
            let name = if separate { "SEPARATE_SUMS" } else { one.0 };
            let Ok(overrides) = Overrides::parse(&format!("{name}={}", one.1)) else { continue };
            let kept = candidates(&(&s).into(), &limits, &overrides);
            assert!(kept.iter().all(|plan| plan.defines().contains(one)), "{s:?}: {one:?}");
            let mut rest = kept.iter(); // in the same order
            let mut expected = all.iter().zip(&macros).filter(|(_, macros)| macros.contains(one));
            assert!(expected.all(|(plan, _)| rest.any(|other| other == plan)), "{s:?}: {one:?}");
        }
    }
}

/// Whether a plan's macro is a choice of the kernel.
fn can_override(s: &RewriteRead, name: &str) -> bool {
    let of_parameters = ["THREADS", "FEATURES", "WINDOW", "SUMS", "BLOCKS"].contains(&name);
    match name {
        "ALIGN" => false,
        "WINDOW" => s.compress == Compress::Token,
        "SUMS" => s.kernel != Kernel::Forward,
        "LOAD_AHEAD" => s.kernel == Kernel::Forward,
        _ => s.kernel != Kernel::Parameters || of_parameters,
    }
}

#[test]
fn an_override_leaves_a_plan_or_a_sentence() {
    let words = [
        "CLUSTER=3",
        "THREADS=1024",
        "FEATURES=8",
        "KEEP_IN_REGISTERS=0",
        "WINDOW=0",
        "SUMS=0",
        "STAGES=2",
        "BLOCKS=32",
    ];
    for (s, limits) in every_case().step_by(5) {
        assert!(Plan::new(&s, &limits, &Overrides::parse("KEEP_IN_REGISTERS=1").unwrap()).is_ok(), "{s:?}");
        for word in words {
            if let Err(refused) = Plan::new(&s, &limits, &Overrides::parse(word).unwrap()) {
                assert!(refused.to_string().starts_with("`DDL_PLAN` leaves no plan for"));
            }
        }
    }
}

#[test]
fn too_many_value_channels_are_refused() {
    let s = specialisation(Kernel::Backward, 8, 7000, 1, Dtype::F32);
    let refused = Plan::new(&s, &LARGE, &Overrides::default()).unwrap_err().to_string();
    assert!(refused.starts_with("`state` must have fewer value channels to be worked on by a GPU, got 7000"));
}

#[test]
fn a_plan_has_the_overrides_even_where_it_spills() {
    let s = specialisation(Kernel::Backward, 4096, 4, 4, Dtype::Bf16);
    let words = "CLUSTER=2 THREADS=96 FEATURES=1 KEEP_IN_REGISTERS=1 WINDOW=0 SUMS=3 STAGES=0 BLOCKS=3";
    let plan = Plan::new(&s, &CLUSTERED, &Overrides::parse(words).unwrap()).unwrap();
    let defines = plan.defines().map(|(name, value)| format!("{name}={value}"));
    assert!(words.split(' ').all(|word| defines.contains(&word.to_string())), "{defines:?}");
}

#[test]
fn an_expansion_has_the_longest_packets_that_leave_room_for_its_weight() {
    for (sizes, limits) in every_case().step_by(7) {
        for kernel in [Kernel::ExpandForward, Kernel::ExpandBackward] {
            let s = expansion(kernel, sizes.d, sizes.m, sizes.taps, sizes.types.state);
            let plan = Plan::new(&s, &limits, &Overrides::default()).unwrap();
            for other in candidates(&(&s).into(), &limits, &Overrides::default()) {
                assert!(other.features <= plan.features, "{s:?}: {other:?} before {plan:?}");
                assert_eq!(other.keep_in_registers, plan.keep_in_registers, "the weight's layout: {s:?}");
            }
        }
    }
}

#[test]
fn an_expansion_that_spills_has_shorter_packets_next() {
    for (m, taps) in [(1, 8), (4, 4), (8, 4), (16, 4), (4, 512)] {
        let s = expansion(Kernel::ExpandBackward, 768, m, taps, Dtype::Bf16);
        let mut plan = Plan::new(&s, &LARGE, &Overrides::default()).unwrap();
        while let Some(next) = plan.after_spill(&s, &LARGE) {
            assert_eq!(next.features, plan.features / 2);
            assert_eq!((next.shared, next.blocks, next.window), (0, 1, Residency::Registers));
            assert_eq!(next.threads, (768 / next.features).min(128));
            plan = next;
        }
        assert_eq!(plan.features, 1);
    }
    let s = specialisation(Kernel::Reduce, 768, 4, 4, Dtype::F32);
    assert_eq!(Plan::new(&s, &LARGE, &Overrides::default()).unwrap().after_spill(&s, &LARGE), None);
}
