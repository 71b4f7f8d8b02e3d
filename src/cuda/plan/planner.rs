//! The planner: the plan that was timed to be the fastest, else the first candidate of the rule, and the next one if its
//! kernel spills registers.

use super::candidates::{candidates, short};
use super::footprint::registers;
use super::limits::Limits;
use super::overrides::Overrides;
use super::plan::{Plan, Residency};
use super::tile::tiled;
use crate::cuda::kernel::{Compress, RewriteRead, Specialisation};
use crate::error::{Error, Result};

/// The fastest plans without a spill of those that were timed on an H200, by `benchmarks/gpu/day.sh table`: lines of kernel,
/// read, value channels, the state's dtype, chain or stored, width, and the plan's macros.
const TABLE: &str = include_str!("table.txt");
/// Shared memory of a multiprocessor of the GPU that was timed.
const SHARED: usize = 228 << 10;

impl Plan {
    /// Fails for overrides that leave no plan, and for so many value channels that no block could add up its sums.
    pub fn new(s: impl Into<Specialisation>, limits: &Limits, overrides: &Overrides) -> Result<Plan> {
        let s = s.into();
        let tiles = match &s {
            Specialisation::RewriteRead(s) => tiled(s, limits, overrides),
            Specialisation::Expand(_) => None,
        };
        tiles.or_else(|| untiled(&s, limits, overrides)).ok_or_else(|| {
            Error::Argument(match &s {
                Specialisation::RewriteRead(wide) if untiled(&s, limits, &Overrides::default()).is_none() => format!(
                    "`state` must have fewer value channels to be worked on by a GPU, got {}: move it to the CPU",
                    wide.m
                ),
                _ => format!("`DDL_PLAN` leaves no plan for `{}`", s.kernel().name()),
            })
        })
    }

    /// The next plan to try if this one's kernel spills registers: the next of the rule that leaves a thread more of
    /// them. Whether the sums have a kernel of their own may not change: warm-up decides that before it compiles any kernel.
    pub fn after_spill(&self, s: impl Into<Specialisation>, limits: &Limits) -> Option<Plan> {
        let s = s.into();
        if self.tile > 0 {
            return untiled(&s, limits, &Overrides::default());
        }
        let separate = |plan: &Plan| plan.sums == Residency::SeparateKernel;
        let most = |plan: &Plan| limits.most_registers(plan.blocks * plan.threads);
        let needed = |plan: &Plan| match &s {
            Specialisation::RewriteRead(s) => registers(s, plan) + plan.load_ahead, // which takes a few
            Specialisation::Expand(_) => plan.features, // which have their registers each
        };
        candidates(&s, limits, &Overrides::default()).into_iter().find(|plan| {
            separate(plan) == separate(self) && most(plan) + needed(self) > most(self) + needed(plan)
        })
    }
}

/// The plan without tiles: of the table, else the first by the rule.
fn untiled(s: &Specialisation, limits: &Limits, overrides: &Overrides) -> Option<Plan> {
    measured(s, limits, overrides).or_else(|| candidates(s, limits, overrides).first().copied())
}

/// The plan of the table, on GPUs with clusters and as much shared memory, if it fits and no macro is chosen by hand. A
/// width that was not timed has that of the next narrower one, with threads and registers by the rule, if it is wider by
/// a third at most.
fn measured(s: &Specialisation, limits: &Limits, overrides: &Overrides) -> Option<Plan> {
    let Specialisation::RewriteRead(timed) = s else { return None };
    let taps = if timed.compress == Compress::Token { 4 } else { 1 };
    let as_timed = timed.rewrite
        && [timed.rewrites, timed.next, timed.taps] == [1, 1, taps]
        && timed.aligned
        && timed.types.direction.size() == 2
        && limits.cluster > 1
        && limits.shared_per_multiprocessor >= SHARED;
    let (width, words) = row(TABLE, timed).filter(|_| as_timed && overrides.no_macro())?;
    let all = Overrides::parse(words).expect("macros in the table");
    let macros = if width == timed.d { all } else { all.without(&["THREADS"]) };
    let mut plans = candidates(s, limits, &macros).into_iter();
    plans.find(|plan| width == timed.d || short(timed, plan, limits) == 0)
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
    next_narrower("chain").filter(|_| s.chain).or_else(|| next_narrower("stored"))
}
