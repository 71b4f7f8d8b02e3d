//! Chunks of tokens, and the grids that they make.

use super::{CLUSTERED, LARGE, expansion, specialisation};
use crate::cuda::kernel::Kernel;
use crate::cuda::plan::{Limits, Overrides, Plan};
use crate::tensor::Dtype;

#[test]
fn chunks_cover_the_tokens_in_one_wave() {
    for tokens in [1, 7, 131, 132, 133, 4096, 100_000] {
        for (kernel, d) in [(Kernel::Forward, 768), (Kernel::Backward, 4096), (Kernel::Parameters, 4096)] {
            let s = specialisation(kernel, d, 4, 1, Dtype::Bf16);
            let plan = Plan::new(&s, &CLUSTERED, &Overrides::default()).unwrap();
            let chunk = plan.chunk(&s, plan.wave(&CLUSTERED), &CLUSTERED, tokens);
            let blocks = tokens.div_ceil(chunk) * plan.slices(&s);
            assert!(chunk >= 1 && blocks <= CLUSTERED.multiprocessors * plan.blocks, "{d}: {blocks}");
        }
    }
}

#[test]
fn chunks_leave_out_what_clusters_have_no_room_for() {
    let s = specialisation(Kernel::Backward, 4096, 4, 1, Dtype::Bf16);
    let plan = Plan::new(&s, &CLUSTERED, &Overrides::default()).unwrap();
    assert_eq!((plan.cluster, plan.wave(&CLUSTERED)), (4, 396));
    let chunk = |wave| plan.chunk(&s, wave, &CLUSTERED, 9900);
    assert_eq!(chunk(396), 100);
    assert_eq!(chunk(360), 110);
    assert_eq!(chunk(4), 9900);
}

#[test]
fn a_token_reads_halo_stays_small_while_there_is_work_for_all() {
    let s = specialisation(Kernel::Forward, 768, 4, 4, Dtype::Bf16);
    let plan = Plan::new(&s, &LARGE, &Overrides::default()).unwrap();
    let chunk = |tokens| plan.chunk(&s, plan.wave(&LARGE), &LARGE, tokens);
    assert_eq!(chunk(132 * 40), 30);
    assert_eq!(chunk(132 * 8), 8);
}

#[test]
fn an_expansions_chunks_fit_a_grid() {
    let mut s = expansion(Kernel::ExpandBackward, 768, 4, 4, Dtype::Bf16);
    for tokens in [1, 455_000, 10_000_000] {
        for weight in [Some(Dtype::F32), None] {
            s.weight = weight;
            let plan = Plan::new(&s, &LARGE, &Overrides::default()).unwrap();
            let (chunk, blocks) = (plan.expand_chunk(&s, &LARGE, tokens), plan.expand_blocks(&s, &LARGE));
            assert_eq!((plan.expand_slices(&s), blocks), (3, 704));
            assert!(chunk * blocks >= tokens, "{tokens} × {chunk}");
            assert!(chunk >= if weight.is_some() { 64 } else { 8 });
        }
    }
    let many = Limits { multiprocessors: 30_000, ..LARGE };
    let plan = Plan::new(&s, &many, &Overrides::default()).unwrap();
    assert_eq!(plan.expand_blocks(&s, &many), 65_535, "the most along a grid's second axis");
}
