//! Overrides as words.

use super::{CLUSTERED, LARGE, SMALL, expansion, specialisation};
use crate::cuda::kernel::{Kernel, RewriteRead};
use crate::cuda::plan::{Overrides, Plan, Residency};
use crate::tensor::Dtype;

#[test]
fn words_become_choices() {
    assert_eq!(Overrides::parse(" "), Ok(Overrides::default()));
    let overrides = Overrides::parse("CLUSTER=2  KEEP_IN_REGISTERS=0 SUMS=3 CHUNK=70000").unwrap();
    let get = ["CLUSTER", "KEEP_IN_REGISTERS", "SUMS", "CHUNK", "THREADS"].map(|name| overrides.get(name));
    assert_eq!(get, [Some(2), Some(0), Some(3), Some(70_000), None]);
    assert_eq!(overrides.without(&["CLUSTER"]).get("CLUSTER"), None);
    for (number, residency) in Residency::ALL.into_iter().enumerate() {
        assert_eq!(residency as usize, number);
    }
}

#[test]
fn other_words_are_refused() {
    let refused = |words| Overrides::parse(words).unwrap_err();
    assert_eq!(refused("STAGES=3"), "must have STAGES from 0 to 2, got 3");
    assert_eq!(refused("WINDOW=3"), "must have WINDOW from 0 to 2, got 3");
    for word in ["SLICES=3", "STAGES", "STAGES=", "STAGES=-1", "STAGES:1"] {
        assert_eq!(refused(word), format!("must be words like CLUSTER=2 or STAGES=0, got {word:?}"));
    }
}

#[test]
fn overrides_that_leave_no_plan_are_refused() {
    let s = specialisation(Kernel::Backward, 4096, 4, 1, Dtype::Bf16);
    for (words, limits) in [
        ("CLUSTER=3", CLUSTERED), // of which 4096 is no multiple
        ("CLUSTER=2", LARGE),
        ("THREADS=48", LARGE), // no whole warps
        ("CLUSTER=8 THREADS=1024", CLUSTERED),
        ("CLUSTER=1 SUMS=1", SMALL),
        ("THREADS=512 BLOCKS=5", LARGE),
        ("BLOCKS=17", SMALL),
        ("STAGES=1 LOAD_AHEAD=1", LARGE),
    ] {
        let s = if words.contains("AHEAD") { RewriteRead { kernel: Kernel::Forward, ..s } } else { s };
        let refused = Plan::new(&s, &limits, &Overrides::parse(words).unwrap()).unwrap_err().to_string();
        assert_eq!(refused, format!("`DDL_PLAN` leaves no plan for `{}`", s.kernel.name()), "{words}");
    }
    let s = expansion(Kernel::ExpandBackward, 6, 1, 4, Dtype::Bf16);
    let refused = Plan::new(&s, &LARGE, &Overrides::parse("FEATURES=4").unwrap()).unwrap_err();
    assert_eq!(refused.to_string(), "`DDL_PLAN` leaves no plan for `expand_bwd`");
}
