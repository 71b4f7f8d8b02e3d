//! Overrides as words.

use crate::cuda::plan::{Overrides, Residency};

const NAMES: &str = "CLUSTER, THREADS, FEATURES, KEEP_IN_REGISTERS, WINDOW, SUMS, SEPARATE_SUMS, STAGES, LOAD_AHEAD, BLOCKS, \
                     ORDER or CHUNK";

#[test]
fn every_override_comes_back_as_a_word() {
    let names = NAMES.split([',', ' ']).filter(|name| !matches!(*name, "" | "or"));
    let words: Vec<_> =
        names.map(|name| format!("{name}={}", if name == "THREADS" { 32 } else { 1 })).collect();
    assert_eq!(Overrides::parse(&words.join("  ")).unwrap().words(), words.join(" "));
}

#[test]
fn words_become_choices() {
    assert_eq!(Overrides::parse(" "), Ok(Overrides::default()));
    let overrides = Overrides::parse("CLUSTER=2  KEEP_IN_REGISTERS=0 SUMS=3 CHUNK=70000").unwrap();
    let get = ["CLUSTER", "KEEP_IN_REGISTERS", "SUMS", "CHUNK", "THREADS"].map(|name| overrides.get(name));
    assert_eq!(get, [Some(2), Some(0), Some(3), Some(70_000), None]);
    assert_eq!(overrides.without("CLUSTER").get("CLUSTER"), None);
    for (number, residency) in Residency::ALL.into_iter().enumerate() {
        assert_eq!(residency as usize, number);
    }
}

#[test]
fn other_words_are_refused() {
    let refused = |words| Overrides::parse(words).unwrap_err();
    assert_eq!(refused("STAGES=3"), "must have STAGES from 0 to 2, got 3");
    assert_eq!(refused("THREADS=48"), "must have THREADS in warps of 32, got 48");
    assert_eq!(refused("WINDOW=3"), "must have WINDOW from 0 to 2, got 3");
    assert_eq!(refused("SLICES=3"), format!("must name {NAMES}, got \"SLICES\""));
    for word in ["STAGES", "STAGES=", "STAGES=-1", "STAGES:1"] {
        assert_eq!(refused(word), format!("must be words like CLUSTER=2 or STAGES=0, got {word:?}"));
    }
}
