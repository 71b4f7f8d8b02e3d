//! The plan of a token read's forward that works on tiles of tokens (kernels/tile.cuh).

use super::footprint::{dynamic_shared, fits};
use super::limits::Limits;
use super::overrides::Overrides;
use super::plan::Plan;
use crate::cuda::kernel::{Compress, Kernel, RewriteRead};

const TOKENS: usize = 4;
const CHANNELS: usize = 4;
const FEATURES: usize = 2;
/// Tiles in shared memory: one in use, one on its way.
const STAGES: usize = 2;
/// Registers of a thread: code for sm_90 takes 155 to 168, and spills with 128.
const REGISTERS: usize = 168;

/// The plan, if the call is one of those that the tiles are written for, the GPU has bulk copies (which came with clusters),
/// and no macro is chosen by hand. A thread has one packet, and multiprocessors as many blocks as they have registers for.
pub(super) fn tiled(s: &RewriteRead, limits: &Limits, overrides: &Overrides) -> Option<Plan> {
    let rewrite = s.rewrite && s.rewrites == 1 && s.next == 1 && s.m == CHANNELS;
    let read = s.compress == Compress::Token && s.taps <= TOKENS && s.parts.norm && !s.cached;
    let types = s.types.state.size() <= 4 && s.types.direction.size() == 2 && s.aligned;
    let one_packet = s.kernel == Kernel::Forward && s.d.is_multiple_of(32 * FEATURES);
    if !(rewrite && read && types && one_packet && limits.cluster > 1 && overrides.no_macro()) {
        return None;
    }
    let plan = Plan {
        cluster: 1,
        threads: s.d / FEATURES,
        features: FEATURES,
        align: 16,
        keep_in_registers: true,
        stages: STAGES,
        tile: TOKENS,
        ..Plan::default()
    };
    let shared = dynamic_shared(s, &plan);
    let plans = (1..=limits.blocks_per_multiprocessor).rev().map(|blocks| Plan { blocks, shared, ..plan });
    let mut fitting = plans.filter(|plan| limits.most_registers(plan.blocks * plan.threads) >= REGISTERS);
    fitting.find(|plan| fits(s, plan, limits))
}
