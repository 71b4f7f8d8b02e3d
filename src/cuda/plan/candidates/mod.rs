//! The candidates for a plan: every way to divide a kernel's work that is worth comparing, as a product of the choices
//! that the kernel leaves open.
//!
//! An override keeps those candidates that have its value. Among what a kernel can run, values that nobody would time
//! are left out (idle warps, packets of odd lengths) unless an override names them.

pub(super) mod choices;
mod expand;
mod parameters;
mod rewrite_read;

use super::Plan;
use super::footprint::dynamic_shared;
use super::limits::Limits;
use super::overrides::Overrides;
use crate::cuda::kernel::{Kernel, Specialisation};

pub fn candidates(s: &Specialisation, limits: &Limits, overrides: &Overrides) -> Vec<Plan> {
    let mut plans = match s.kernel {
        Kernel::Forward | Kernel::Backward => rewrite_read::candidates(s, limits, overrides),
        Kernel::Parameters => parameters::candidates(s, overrides),
        Kernel::ExpandForward | Kernel::ExpandBackward => expand::candidates(s, overrides),
        Kernel::Reduce => vec![Plan { threads: 256, ..Plan::plain(s) }],
    };
    plans.iter_mut().for_each(|plan| plan.shared = dynamic_shared(s, plan));
    plans
}
