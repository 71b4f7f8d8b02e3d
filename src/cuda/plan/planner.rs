//! Which planner serves a kernel, and which plan follows one that spills registers.

use super::footprint::{Plan, plain};
use super::limits::Limits;
use super::overrides::Overrides;
use super::{cluster, expand, parameters};
use crate::cuda::kernel::{Kernel, Specialisation};
use crate::error::Result;

impl Plan {
    /// Fails for so many value channels that no block could add up its sums.
    pub fn new(s: &Specialisation, limits: &Limits, overrides: &Overrides) -> Result<Plan> {
        match s.kernel {
            Kernel::Forward | Kernel::Backward => cluster::plan(s, limits, overrides),
            Kernel::Parameters => Ok(parameters::plan(s, limits, overrides)),
            Kernel::ExpandForward | Kernel::ExpandBackward => Ok(expand::plan(s, overrides)),
            Kernel::Reduce | Kernel::Arrange => Ok(Plan { threads: 256, ..plain(s) }),
        }
    }

    /// The next plan to try if this one spills registers: fewer blocks, then packets read twice. For an
    /// expansion: packets of half the length.
    pub fn relaxed(&self, s: &Specialisation, limits: &Limits) -> Option<Plan> {
        if s.kernel == Kernel::Parameters {
            return (self.blocks > 1).then(|| Plan { blocks: self.blocks - 1, ..*self });
        }
        if !matches!(s.kernel, Kernel::Forward | Kernel::Backward) {
            let half = Overrides { features: Some(self.features / 2), ..Overrides::default() };
            return (s.kernel.expands() && self.features > 1).then(|| expand::plan(s, &half));
        }
        cluster::relaxed(self, s, limits)
    }
}
