//! Forwards in tiles of tokens: which calls and devices have them.

use crate::cuda::kernel::{Compress, Kernel, Parts, RewriteRead};
use crate::cuda::plan::samples::{CLUSTERED, LARGE, SMALL, specialisation};
use crate::cuda::plan::{Limits, Overrides, Plan, Residency};
use crate::problem::Erase;
use crate::tensor::Dtype;

/// A token read with four taps whose k has two bytes.
fn token_read(d: usize, state: Dtype) -> RewriteRead {
    let mut s = specialisation(Kernel::Forward, d, 4, 4, state);
    s.types.direction = Dtype::Bf16;
    s
}

fn plan(s: &RewriteRead, limits: &Limits, words: &str) -> Plan {
    Plan::new(s, limits, &Overrides::parse(words).unwrap()).unwrap()
}

#[test]
fn a_narrow_token_read_has_tiles_and_a_packet_per_thread() {
    for (d, blocks) in [(64, 12), (128, 6), (320, 2), (384, 2), (448, 1), (768, 1)] {
        for (state, size) in [(Dtype::Bf16, 2), (Dtype::F16, 2), (Dtype::F32, 4)] {
            let plan = plan(&token_read(d, state), &CLUSTERED, "");
            assert_eq!((plan.tile, plan.stages, plan.blocks), (4, 2, blocks), "{d} {state:?}");
            assert_eq!((plan.threads, plan.features, plan.window), (d / 2, 2, Residency::Registers));
            assert_eq!(plan.shared, 2 * 4 * d * (4 * size + 2));
        }
    }
    assert_eq!(plan(&token_read(768, Dtype::Bf16), &CLUSTERED, "CHUNK=7 ORDER=0").tile, 4, "no macros");
}

#[test]
fn the_parts_of_a_tiled_read_are_free() {
    let s = token_read(128, Dtype::F32);
    let parts = Parts { norm: true, ..Parts::default() };
    for s in [
        RewriteRead { parts, ..s },
        RewriteRead {
            parts: Parts { value: true, value_sigmoid: true, value_from_compressed: true, ..parts },
            ..s
        },
        RewriteRead { documents: true, ..s },
        RewriteRead { erase: Erase::None, ..s },
        RewriteRead { taps: 2, ..s },
    ] {
        assert_eq!(plan(&s, &CLUSTERED, "").tile, 4, "{s:?}");
    }
}

#[test]
fn other_calls_have_no_tiles() {
    let s = token_read(128, Dtype::Bf16);
    for s in [
        token_read(100, Dtype::Bf16),
        token_read(832, Dtype::Bf16),
        specialisation(Kernel::Forward, 128, 4, 4, Dtype::F32),
        specialisation(Kernel::Forward, 128, 4, 1, Dtype::Bf16),
        specialisation(Kernel::Forward, 128, 2, 4, Dtype::Bf16),
        specialisation(Kernel::Forward, 128, 4, 5, Dtype::Bf16),
        specialisation(Kernel::Backward, 128, 4, 4, Dtype::Bf16),
        RewriteRead { parts: Parts { norm: false, ..s.parts }, ..s },
        RewriteRead { rewrite: false, ..s },
        RewriteRead { rewrites: 2, ..s },
        RewriteRead { next: 2, ..s },
        RewriteRead { cached: true, ..s },
        RewriteRead { aligned: false, ..s },
        RewriteRead { compress: Compress::Channel, taps: 1, ..s },
    ] {
        assert_eq!(plan(&s, &CLUSTERED, "").tile, 0, "{s:?}");
    }
}

#[test]
fn gpus_without_bulk_copies_or_room_and_choices_by_hand_have_no_tiles() {
    let s = token_read(768, Dtype::F32);
    assert_eq!(plan(&s, &LARGE, "").tile, 0, "before sm_90");
    assert_eq!(plan(&s, &CLUSTERED, "CLUSTER=1").tile, 0, "by hand");
    let small = Limits { cluster: 8, ..SMALL };
    assert_eq!(plan(&s, &small, "").tile, 0, "110 KiB of shared memory");
    assert_eq!(plan(&token_read(768, Dtype::Bf16), &small, "").tile, 4, "60 KiB");
}

#[test]
fn tiles_that_spill_are_followed_by_the_plan_without() {
    let s = token_read(768, Dtype::Bf16);
    let next = plan(&s, &CLUSTERED, "").after_spill(&s, &CLUSTERED);
    assert_eq!(next.map(|plan| plan.tile), Some(0));
    assert_eq!(next.and_then(|plan| plan.after_spill(&s, &CLUSTERED)).map(|plan| plan.tile), Some(0));
}
