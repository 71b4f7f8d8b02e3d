//! The footprint of a plan: registers, shared memory, first-level cache, and the bytes that move for every token.

use super::Plan;
use super::limits::RESERVED;
use super::residency::Residency;
use crate::cuda::kernel::{Compress, Kernel, Parts, Specialisation};
use crate::problem::stats_before;
use crate::tensor::Dtype;

/// Bytes of the counters for the numbers that blocks of a cluster send each other.
const COUNTS: usize = 16;

/// All that a plan takes of a multiprocessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// of a thread, estimated
    pub registers: usize,
    /// bytes of a block
    pub dynamic_shared: usize,
    pub static_shared: usize,
    /// bytes of the parameters that the blocks of a multiprocessor need with every token: the first-level cache has
    /// them, or they come from L2
    pub parameters: usize,
    pub moved: Moved,
}

/// Bytes that move with every token, beside those that move whatever the plan: each input and output once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// from device memory a second time
    pub memory: usize,
    /// from L2 and back
    pub l2: usize,
    /// from shared memory and back, for the window and the sums
    pub shared: usize,
}

impl Footprint {
    pub fn new(s: &Specialisation, plan: &Plan) -> Footprint {
        let slices = plan.slices(s);
        Footprint {
            registers: registers(s, plan),
            dynamic_shared: dynamic_shared(s, plan),
            static_shared: static_shared(s, plan.cluster * plan.threads),
            // The blocks of a multiprocessor may all have different slices.
            parameters: parameter_bytes(s) / slices * plan.blocks.min(slices),
            moved: moved(s, plan),
        }
    }

    /// Bytes of its multiprocessor's shared memory that a block takes.
    pub fn shared(&self) -> usize {
        self.dynamic_shared + self.static_shared + RESERVED
    }
}

/// Registers that a thread needs, at the least: fitted to the fewest with which code for sm_90 does not spill. If it
/// still spills, the next candidate is compiled.
fn registers(s: &Specialisation, plan: &Plan) -> usize {
    if s.kernel.expands() {
        let weight = if plan.keep_in_registers { weight_registers(s, plan.features) } else { 0 };
        return 16 + weight + plan.features * (s.m + 1);
    }
    let rows = plan.rows(s);
    let elements = plan.features * s.m;
    let kept_rows = if plan.keep_in_registers { rows } else { 1 };
    let packet = if s.kernel == Kernel::Backward { 4 * elements } else { 3 * elements / 2 };
    let packets = kept_rows * (packet + s.rewrites * plan.features);
    let window = if plan.window == Residency::Registers { rows * plan.features * (s.taps - 1) } else { 0 };
    let has_sums = s.kernel != Kernel::Forward && plan.sums == Residency::Registers;
    let sums = if has_sums { rows * plan.features * s.slots() } else { 0 };
    16 + (2 * s.m * s.rewrites.max(s.next) + packets + window + sums) * s.real().size() / 4
}

/// Registers for the weight of an expansion, its sums, and the numbers of as many tokens as it has taps.
pub(super) fn weight_registers(s: &Specialisation, features: usize) -> usize {
    let taps = if s.compress == Compress::Token { s.taps } else { 0 };
    2 * taps * features * (s.m + 1) * s.real().size() / 4
}

/// Bytes of the two buffers for sums over so many threads.
pub(super) fn static_shared(s: &Specialisation, threads: usize) -> usize {
    let sums = match s.kernel {
        Kernel::Backward => 1 + 2 * s.rewrites * s.m,
        Kernel::Forward => stats_before(s.rewrites, s.m).max(1 + s.next * (1 + s.m)),
        _ => 0,
    };
    2 * sums * threads.div_ceil(32) * s.real().size() + COUNTS
}

/// The stages, the window, the columns, the sums.
pub(super) fn dynamic_shared(s: &Specialisation, plan: &Plan) -> usize {
    let width = plan.width(s);
    let window = if plan.window == Residency::Shared { plan.window_bytes(s) } else { 0 };
    let sums = if plan.sums == Residency::Shared { s.slots() * width * s.real().size() } else { 0 };
    plan.stages * stage(s, width) + window + columns(s, plan) + sums
}

/// Bytes of one token's rows, each in slots of 16.
fn stage(s: &Specialisation, width: usize) -> usize {
    token_inputs(s).map(|bytes| (width * bytes).next_multiple_of(16)).sum()
}

/// Bytes of the columns that wait between the passes over a token, if its packets are re-read.
fn columns(s: &Specialisation, plan: &Plan) -> usize {
    let count = match (s.kernel, plan.sums) {
        _ if plan.keep_in_registers || s.kernel.expands() => 0,
        (Kernel::Backward, Residency::SeparateKernel) => 2, // dh' waits for the sums alone
        (Kernel::Backward, _) => 3,
        _ => 1,
    };
    count * plan.width(s) * s.real().size()
}

/// Bytes per feature of each of a token's inputs.
pub(super) fn token_inputs(s: &Specialisation) -> impl Iterator<Item = usize> {
    let types = &s.types;
    let backward = s.kernel == Kernel::Backward;
    [
        (true, s.m * types.state.size()),
        (s.rewrite, s.rewrites * types.direction.size()),
        (backward, s.m * types.state.size()),
        (backward && s.compress != Compress::None, types.context.size()),
        (backward && s.compress == Compress::Token, types.state.size()),
    ]
    .into_iter()
    .filter_map(|(there, bytes)| there.then_some(bytes))
}

/// Bytes of the parameters that every token needs. Other kernels' blocks have few of them each.
fn parameter_bytes(s: &Specialisation) -> usize {
    if !matches!(s.kernel, Kernel::Forward | Kernel::Backward) {
        return 0;
    }
    let Parts { norm_weight, gate, value, .. } = s.parts;
    let compress = matches!(s.compress, Compress::Channel | Compress::Token);
    let bytes = |there: bool, rows: usize, dtype: Dtype| if there { rows * s.d * dtype.size() } else { 0 };
    bytes(compress, s.m * s.taps, s.types.compress)
        + bytes(norm_weight, 1, s.types.norm)
        + bytes(gate, s.next, s.types.gate)
        + bytes(value, s.next * s.m, s.types.value)
}

fn moved(s: &Specialisation, plan: &Plan) -> Moved {
    let row = s.d * s.real().size();
    let inputs = |count: usize| s.d * token_inputs(s).take(count).sum::<usize>();
    let over_time = s.compress == Compress::Token;
    // Every row of the window and of the sums is read and written.
    let window = if over_time { 2 * s.taps * row } else { 0 };
    let sums = if s.kernel == Kernel::Forward { 0 } else { 2 * s.slots() * row };
    let at = |residency| {
        let window = if plan.window == residency { window } else { 0 };
        window + if plan.sums == residency { sums } else { 0 }
    };
    // The second pass reads X and k again, the backward's G, too.
    let again = match (s.kernel, s.rewrite) {
        _ if plan.keep_in_registers || plan.stages > 0 => 0,
        (Kernel::Backward, rewrite) => inputs(2 + usize::from(rewrite)),
        (_, rewrite) => inputs(1 + usize::from(rewrite)),
    };
    // parameters_bwd reads all of a token but G.
    let separate = inputs(usize::MAX) - s.d * s.m * s.types.state.size();
    Moved {
        memory: if plan.sums == Residency::SeparateKernel { separate } else { 0 },
        l2: again + at(Residency::Global),
        shared: at(Residency::Shared),
    }
}
