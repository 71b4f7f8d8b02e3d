//! Plans that were the fastest without a spill of those timed on an H200: table.txt, which `benchmarks/gpu/day.sh table`
//! writes from the records. They are taken on GPUs with clusters and as much shared memory.

use super::candidates::{candidates, short};
use super::footprint::exceeds;
use super::limits::Limits;
use super::overrides::Overrides;
use super::plan::Plan;
use crate::cuda::kernel::{Compress, RewriteRead, Specialisation};

/// Lines of kernel, read, value channels, the state's dtype, chain or stored, width, and the plan's macros.
const TABLE: &str = include_str!("table.txt");
/// Shared memory of a multiprocessor of the GPU that was timed.
const SHARED: usize = 228 << 10;

/// The plan of the table, if it fits and no macro is chosen by hand. A width that was not measured has that of the next
/// narrower one, with threads and registers by the rule, if it is wider by a third at most.
pub(super) fn measured(s: &Specialisation, limits: &Limits, overrides: &Overrides) -> Option<Plan> {
    let Specialisation::RewriteRead(s) = s else { return None };
    let taps = if s.compress == Compress::Token { 4 } else { 1 };
    let timed = s.rewrite && [s.rewrites, s.next, s.taps] == [1, 1, taps] && s.types.direction.size() == 2;
    let like_timed = s.aligned && limits.cluster > 1 && limits.shared_per_multiprocessor >= SHARED;
    let by_hand = overrides.without("ORDER").without("CHUNK") != Overrides::default();
    let (width, words) = row(TABLE, s).filter(|_| timed && like_timed && !by_hand)?;
    let all = Overrides::parse(words).expect("macros in the table");
    let macros = if width == s.d { all } else { all.without("THREADS") };
    let mut plans = candidates(s, limits, &macros).into_iter();
    plans.find(|plan| exceeds(s, plan, limits).is_none() && (width == s.d || short(s, plan, limits) == 0))
}

/// The width and the macros of a row. A chain that was not timed has the plan of a stored state, and so its bits.
pub(super) fn row<'a>(table: &'a str, s: &RewriteRead) -> Option<(usize, &'a str)> {
    let (kernel, read, dtype) = (s.kernel.name(), format!("{:?}", s.compress), s.types.state.name());
    let key = format!("{kernel} {} {} {}", read.to_lowercase(), s.m, dtype.trim_start_matches("torch."));
    let next_narrower = |state: &str| {
        let rows =
            table.lines().filter_map(|line| line.strip_prefix(&format!("{key} {state} "))?.split_once(' '));
        let widths = rows.filter_map(|(width, words)| Some((width.parse().ok()?, words)));
        widths.filter(|(width, _)| (*width..=width * 4 / 3).contains(&s.d)).max()
    };
    let chain = if s.chain { next_narrower("chain") } else { None };
    chain.or_else(|| next_narrower("stored"))
}
