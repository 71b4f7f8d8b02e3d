//! Plans that were the fastest without a spill of those timed on an H200, where the estimate takes another
//! (benchmarks/results/gpu-plans.jsonl). They are taken on GPUs with clusters and as much shared memory.

use super::candidates::candidates;
use super::footprint::exceeds;
use super::limits::Limits;
use super::overrides::Overrides;
use super::plan::Plan;
use crate::cuda::kernel::{
    Compress::{self, Channel, Token},
    Kernel::{self, Backward, Forward},
    RewriteRead,
};
use crate::tensor::Dtype::{self, Bf16, F32};

/// Value channels and taps of the states that were timed, and the shared memory of a multiprocessor.
const CHANNELS: usize = 4;
const TAPS: [usize; 2] = [1, 4];
const SHARED: usize = 228 << 10;

/// One rewrite and its read, with k in two bytes: the kernel, d, the state's dtype, and choices of the fastest plan. The comments
/// give the microseconds of 32,768 tokens with the plan of the least estimate and with this one. The rows hold for chains as
/// well, so gradients have the same bits whatever is stored.
const TIMED: [(Kernel, Compress, usize, Dtype, &str); 8] = [
    (Forward, Channel, 768, F32, "STAGES=1 BLOCKS=3"), // 291, 269
    (Forward, Channel, 768, Bf16, "STAGES=1 BLOCKS=8"), // 154, 147
    (Forward, Channel, 2048, Bf16, "STAGES=1 BLOCKS=2"), // 405, 371
    (Forward, Channel, 4096, Bf16, "CLUSTER=1 KEEP_IN_REGISTERS=0 THREADS=256 STAGES=1 BLOCKS=3"), // 766, 742
    (Backward, Channel, 768, F32, "THREADS=96 SUMS=1 STAGES=0 BLOCKS=2"), // 412, 387
    (Backward, Channel, 768, Bf16, "STAGES=1 BLOCKS=4"), // 266, 236
    (Backward, Token, 768, F32, "THREADS=128 SUMS=1 STAGES=0 BLOCKS=2"), // 487, 468
    (Backward, Token, 768, Bf16, "THREADS=128 SUMS=1 STAGES=1 BLOCKS=2"), // 367, 364
];

/// The plan that was timed to be the fastest, if there is one for this kernel and device and no macro is chosen by hand.
pub(super) fn timed(s: &RewriteRead, limits: &Limits, overrides: &Overrides) -> Option<Plan> {
    let sizes = s.m == CHANNELS && TAPS.contains(&s.taps) && s.types.direction.size() == 2;
    let known = sizes && s.rewrite && s.rewrites == 1 && s.aligned;
    let like_timed = limits.cluster > 1 && limits.shared_per_multiprocessor >= SHARED;
    if !known || !like_timed || !overrides.no_macro() {
        return None;
    }
    let key = (s.kernel, s.compress, s.d, s.types.state);
    let (.., words) = TIMED.iter().find(|(kernel, read, d, state, _)| (*kernel, *read, *d, *state) == key)?;
    let mut plans = candidates(s, limits, &Overrides::parse(words).ok()?).into_iter();
    plans.find(|plan| exceeds(s, plan, limits).is_none())
}
