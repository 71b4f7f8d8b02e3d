//! Chunks of tokens, and the grids that they make.

use super::{CLUSTERED, LARGE, specialisation};
use crate::cuda::kernel::{Compress, Kernel};
use crate::cuda::plan::chunk::{chunk, expand_blocks, expand_chunk};
use crate::cuda::plan::{Overrides, Plan};
use crate::tensor::Dtype;

#[test]
fn chunks_cover_the_tokens_in_one_wave() {
    for tokens in [1, 7, 131, 132, 133, 4096, 100_000] {
        for (kernel, d) in [(Kernel::Forward, 768), (Kernel::Backward, 4096), (Kernel::Parameters, 4096)] {
            let s = specialisation(kernel, d, 4, 1, Dtype::Bf16);
            let plan = Plan::new(&s, &CLUSTERED, &Overrides::default()).unwrap();
            let chunk = chunk(&s, &plan, plan.wave(&CLUSTERED), &CLUSTERED, &Overrides::default(), tokens);
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
    let chunk = |wave| chunk(&s, &plan, wave, &CLUSTERED, &Overrides::default(), 9900);
    assert_eq!(chunk(396), 100);
    assert_eq!(chunk(360), 110);
    assert_eq!(chunk(4), 9900);
}

#[test]
fn a_token_reads_halo_stays_small_while_there_is_work_for_all() {
    let s = specialisation(Kernel::Forward, 768, 4, 4, Dtype::Bf16);
    let plan = Plan::new(&s, &CLUSTERED, &Overrides::default()).unwrap();
    let chunk = |tokens| chunk(&s, &plan, plan.wave(&CLUSTERED), &LARGE, &Overrides::default(), tokens);
    assert_eq!(chunk(132 * 40), 30);
    assert_eq!(chunk(132 * 8), 8);
}

#[test]
fn an_expansions_chunks_fit_a_grid() {
    let mut s = specialisation(Kernel::ExpandBackward, 768, 4, 4, Dtype::Bf16);
    for (sequences, time) in [(1, 1), (1, 10_000_000), (64, 1024), (65_535, 7), (1_000_000, 1)] {
        for compress in [Compress::Token, Compress::None] {
            s.compress = compress;
            let plan = Plan::new(&s, &LARGE, &Overrides::default()).unwrap();
            let chunk = expand_chunk(&s, &plan, &LARGE, &Overrides::default(), sequences, time);
            assert!((1..=time).contains(&chunk));
            let chunks = sequences * time.div_ceil(chunk);
            let [across, down] = expand_blocks(&s, &plan, &LARGE, chunks);
            assert_eq!(across, 3);
            assert!((1..=704).contains(&down) && down <= chunks, "{sequences} × {time}: {down}");
        }
    }
}
