//! Why a plan does not fit, and why overrides leave none.

use super::{CLUSTERED, LARGE, SMALL, expansion, specialisation};
use crate::cuda::kernel::Kernel;
use crate::cuda::plan::footprint::{dynamic_shared, exceeds};
use crate::cuda::plan::{Limits, Overrides, Plan};
use crate::tensor::Dtype;

fn refused(words: &str, m: usize, limits: &Limits) -> String {
    let s = specialisation(Kernel::Backward, 4096, m, 1, Dtype::Bf16);
    Plan::new(&s, limits, &Overrides::parse(words).unwrap()).unwrap_err().to_string()
}

#[test]
fn too_many_value_channels_are_refused() {
    let s = specialisation(Kernel::Backward, 8, 7000, 1, Dtype::F32);
    let refused = Plan::new(&s, &LARGE, &Overrides::default()).unwrap_err().to_string();
    assert!(refused.starts_with("`state` must have fewer value channels to be worked on by a GPU, got 7000"));
}

#[test]
fn every_limit_has_its_reason() {
    let s = specialisation(Kernel::Backward, 4096, 4, 1, Dtype::Bf16);
    let plan = Plan::new(&s, &CLUSTERED, &Overrides::default()).unwrap();
    assert_eq!(plan.cluster, 4);
    let reason = |change: &dyn Fn(&mut Plan), limits: Limits| {
        let mut plan = plan;
        change(&mut plan);
        plan.shared = dynamic_shared(&s, &plan);
        exceeds(&s, &plan, &limits).unwrap()
    };
    let reasons = [
        reason(&|_| (), LARGE),
        reason(&|plan| plan.threads = 1056, CLUSTERED),
        reason(&|plan| (plan.cluster, plan.blocks) = (1, 1), Limits { cluster: 8, ..SMALL }),
        reason(&|plan| plan.blocks = 6, CLUSTERED),
        reason(&|plan| (plan.cluster, plan.threads, plan.blocks) = (8, 512, 5), CLUSTERED),
        reason(&|_| (), Limits { blocks_per_multiprocessor: 2, ..CLUSTERED }),
    ];
    let expected = [
        "needs clusters of 4 blocks, this GPU has clusters of 1 at most",
        "needs sums over 4224 threads, the kernels add up 4096 at most",
        "needs 242 KiB of shared memory, a block has 99",
        "needs 373 KiB of shared memory for 6 blocks, a multiprocessor has 228",
        "needs 2560 threads for 5 blocks, a multiprocessor has 2048",
        "needs 3 blocks per multiprocessor, which runs 2 at most",
    ];
    assert_eq!(reasons, expected);
    let wide = specialisation(Kernel::Backward, 4096, 100, 1, Dtype::Bf16);
    let plan = Plan { threads: 1024, ..plan };
    assert_eq!(
        exceeds(&wide, &plan, &CLUSTERED).unwrap(),
        "needs 202 KiB of static shared memory, the compiler accepts 48"
    );
}

#[test]
fn overrides_that_leave_no_plan_are_refused_with_the_one_at_fault() {
    let leaves_none = "leaves no plan for `rewrite_read_bwd`:";
    for (words, limits, expected) in [
        (
            "STAGES=0 CLUSTER=3",
            CLUSTERED,
            format!(
                "`DDL_PLAN` has CLUSTER=3, which {leaves_none} the kernel cannot run so with d = 4096 and m = 4"
            ),
        ),
        (
            "CLUSTER=2",
            LARGE,
            format!(
                "`DDL_PLAN` has CLUSTER=2, which {leaves_none} with d = 4096 and m = 4 it needs clusters of 2 \
                 blocks, this GPU has clusters of 1 at most"
            ),
        ),
        (
            "CLUSTER=1 SUMS=1 STAGES=2",
            LARGE,
            format!(
                "`DDL_PLAN` has CLUSTER=1 SUMS=1 STAGES=2, which {leaves_none} with d = 4096 and m = 4 it needs \
                 322 KiB of shared memory, a block has 227"
            ),
        ),
    ] {
        assert_eq!(refused(words, 4, &limits), expected);
    }
    assert!(
        refused("BLOCKS=3 THREADS=768 SUMS=0", 4, &LARGE)
            .ends_with("needs 2304 threads for 3 blocks, a multiprocessor has 2048")
    );
}

#[test]
fn an_expansion_has_its_reason() {
    let s = expansion(Kernel::ExpandBackward, 6, 1, 4, Dtype::F32);
    let overrides = Overrides::parse("STAGES=0 FEATURES=4").unwrap();
    assert_eq!(
        Plan::new(&s, &LARGE, &overrides).unwrap_err().to_string(),
        "`DDL_PLAN` has FEATURES=4, which leaves no plan for `expand_bwd`: the kernel cannot run so with d = 6 and m = 1"
    );
}
