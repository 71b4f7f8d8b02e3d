//! The table of measured plans.

use super::{CLUSTERED, LARGE, specialisation};
use crate::cuda::kernel::{Kernel, RewriteRead};
use crate::cuda::plan::planner::row;
use crate::cuda::plan::{Limits, Overrides, Plan};
use crate::tensor::Dtype;

/// Of a model under autocast: k and h in two bytes.
fn autocast(kernel: Kernel, d: usize, taps: usize, state: Dtype) -> RewriteRead {
    let mut s = specialisation(kernel, d, 4, taps, state);
    (s.types.direction, s.types.context) = (Dtype::Bf16, Dtype::Bf16);
    s
}

#[test]
fn measured_plans_come_first_on_such_a_gpu() {
    let plan = |s: &RewriteRead, limits: &Limits, words| {
        let plan = Plan::new(s, limits, &Overrides::parse(words).unwrap()).unwrap();
        (plan.threads, plan.stages, plan.blocks)
    };
    let s = autocast(Kernel::Forward, 768, 1, Dtype::F32);
    let (measured, by_rule) = ((64, 1, 3), (64, 1, 8));
    assert_eq!(plan(&s, &CLUSTERED, ""), measured);
    assert_eq!(plan(&s, &CLUSTERED, "ORDER=0 CHUNK=32"), measured, "no macros");
    assert_eq!(plan(&s, &CLUSTERED, "CLUSTER=1"), by_rule, "a choice by hand");
    assert_eq!(plan(&s, &LARGE, ""), by_rule, "another GPU");
    for other in [
        RewriteRead { aligned: false, ..s },
        RewriteRead { rewrites: 2, ..s },
        RewriteRead { next: 2, ..s },
        specialisation(Kernel::Forward, 768, 4, 1, Dtype::F32),
        specialisation(Kernel::Forward, 768, 4, 1, Dtype::F16),
    ] {
        assert_ne!(plan(&other, &CLUSTERED, ""), measured, "{other:?}");
    }
}

#[test]
fn a_wider_token_has_the_plan_of_the_next_narrower_one() {
    let plan = |d, limits| {
        let plan = Plan::new(&autocast(Kernel::Forward, d, 1, Dtype::F32), limits, &Overrides::default());
        plan.unwrap()
    };
    assert_eq!((plan(1024, &CLUSTERED).threads, plan(1024, &CLUSTERED).stages), (96, 1), "more threads");
    for d in [512, 1026, 1536] {
        assert_eq!(plan(d, &CLUSTERED), plan(d, &LARGE), "by the rule: {d}");
    }
}

#[test]
fn a_chain_has_a_row_of_its_own_or_that_of_a_stored_state() {
    let table = "rewrite_read_bwd channel 4 float32 chain 768 BLOCKS=2\n\
                 rewrite_read_bwd channel 4 float32 stored 768 BLOCKS=3\n\
                 rewrite_read_bwd channel 4 float32 stored 1024 BLOCKS=4";
    let found = |d, chain| row(table, &RewriteRead { chain, ..autocast(Kernel::Backward, d, 1, Dtype::F32) });
    assert_eq!((found(768, true), found(768, false)), (Some((768, "BLOCKS=2")), Some((768, "BLOCKS=3"))));
    assert_eq!((found(1024, true), found(1024, false)), (Some((768, "BLOCKS=2")), Some((1024, "BLOCKS=4"))));
    assert_eq!((found(1365, true), found(767, false)), (Some((1024, "BLOCKS=4")), None));
    assert_eq!(row(table, &autocast(Kernel::Backward, 768, 4, Dtype::F32)), None, "another read");
}
