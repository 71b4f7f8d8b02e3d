//! The footprint of a plan: registers, shared memory, first-level cache, and the bytes that move for every token.

use super::limits::RESERVED;
use super::plan::Plan;
use super::residency::Residency;
use crate::cuda::kernel::{Compress, Kernel, Parts, Specialisation};
use crate::problem::stats_before;
use crate::tensor::Dtype;

/// Bytes of the counters for the numbers that blocks of a cluster send each other.
const COUNTS: usize = 16;

/// All that a plan takes of a multiprocessor, in bytes but for the registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// of a thread, estimated
    pub registers: usize,
    /// of a block
    pub dynamic_shared: usize,
    pub static_shared: usize,
    /// the parameters that every token needs, and what the first-level cache holds if it holds those of them that the
    /// blocks of a multiprocessor need
    pub parameters: usize,
    pub cached: usize,
    /// of a token from device memory and back: each input and output once, and what is read again without a stage or by
    /// a separate kernel (L2 may have lost it)
    pub device: usize,
    /// of a token from L2 and back: a window, sums
    pub l2: usize,
    /// of a token from shared memory or the first-level cache and back: stages, columns, a window, sums, a weight
    pub moved_shared: usize,
}

impl Footprint {
    pub fn new(s: &Specialisation, plan: &Plan) -> Footprint {
        let (slices, parameters) = (plan.slices(s), parameter_bytes(s));
        let [device, l2, moved_shared] = moved(s, plan);
        Footprint {
            registers: registers(s, plan),
            dynamic_shared: dynamic_shared(s, plan),
            static_shared: static_shared(s, plan.cluster * plan.threads),
            parameters,
            // They may all have different slices; rows that are read again pass through the cache beside them.
            cached: parameters / slices * plan.blocks.min(slices)
                + read_again(s, plan) / slices * plan.blocks,
            device,
            l2,
            moved_shared,
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
    let (rows, features, real) = (plan.rows(s), plan.features, s.real().size());
    if s.kernel.expands() {
        // The weight, its sums, and the numbers of as many tokens as it has taps.
        let kept = plan.keep_in_registers && s.compress == Compress::Token;
        let weight = if kept { 2 * s.taps * features * (s.m + 1) * real / 4 } else { 0 };
        return 16 + weight + features * (s.m + 1);
    }
    let elements = features * s.m;
    let kept_rows = if plan.keep_in_registers { rows } else { 1 };
    let packet = if s.kernel == Kernel::Backward { 4 * elements } else { 3 * elements / 2 };
    let packets = kept_rows * (packet + s.rewrites * features);
    let window = if plan.window == Residency::Registers { rows * features * (s.taps - 1) } else { 0 };
    let has_sums = s.kernel != Kernel::Forward && plan.sums == Residency::Registers;
    let sums = if has_sums { rows * features * s.slots() } else { 0 };
    16 + (2 * s.m * s.rewrites.max(s.next) + packets + window + sums) * real / 4
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

/// The stages, each of one token's rows in slots of 16 bytes, the window, the columns, the sums.
pub(super) fn dynamic_shared(s: &Specialisation, plan: &Plan) -> usize {
    let width = plan.width(s);
    let stage: usize = token_inputs(s).map(|bytes| (width * bytes).next_multiple_of(16)).sum();
    let window = if plan.window == Residency::Shared { plan.window_bytes(s) } else { 0 };
    let sums = if plan.sums == Residency::Shared { s.slots() * width * s.real().size() } else { 0 };
    plan.stages * stage + window + columns(s, plan) + sums
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

/// Bytes of a token that the second pass reads: X and k, in the backward G, too.
fn second_pass(s: &Specialisation, plan: &Plan) -> usize {
    let count = 1 + usize::from(s.rewrite) + usize::from(s.kernel == Kernel::Backward);
    if plan.keep_in_registers { 0 } else { s.d * token_inputs(s).take(count).sum::<usize>() }
}

/// Those of them that come from memory.
fn read_again(s: &Specialisation, plan: &Plan) -> usize {
    if plan.stages == 0 { second_pass(s, plan) } else { 0 }
}

/// Bytes that move with every token: of device memory, of L2, of shared memory.
fn moved(s: &Specialisation, plan: &Plan) -> [usize; 3] {
    let row = s.d * s.real().size();
    let (all, state) = (s.d * token_inputs(s).sum::<usize>(), s.d * s.m * s.types.state.size());
    let outputs = if s.kernel == Kernel::Parameters { 0 } else { state + s.d * s.types.direction.size() };
    // The second kernel reads all of a token but G.
    let separate = if plan.sums == Residency::SeparateKernel { all - state } else { 0 };
    // Every row of the window and of the sums is read and written.
    let window = if s.compress == Compress::Token { 2 * s.taps * row } else { 0 };
    let sums = if s.kernel == Kernel::Forward { 0 } else { 2 * s.slots() * row };
    let at = |residency| {
        let window = if plan.window == residency { window } else { 0 };
        window + if plan.sums == residency { sums } else { 0 }
    };
    // A stage is written and read, and read again.
    let again = read_again(s, plan);
    let staged = if plan.stages == 0 { 0 } else { all + second_pass(s, plan) };
    let weight = match s.kernel {
        Kernel::ExpandForward if !plan.keep_in_registers => s.m * s.taps * row,
        Kernel::ExpandBackward if !plan.keep_in_registers => 3 * s.m * s.taps * row, // and its sums
        _ => 0,
    };
    let columns = 2 * columns(s, plan) * plan.slices(s);
    let shared = at(Residency::Shared) + staged + columns + weight;
    [all + outputs + separate + again, at(Residency::Global), shared]
}
