//! Where numbers live.

/// Where the numbers live that a thread keeps; numbered as WINDOW and SUMS in common.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Residency {
    Registers = 0,
    Shared = 1,
    Global = 2,
    /// in a kernel of their own
    SeparateKernel = 3,
}

impl Residency {
    /// In the order of their numbers.
    pub const ALL: [Residency; 4] =
        [Residency::Registers, Residency::Shared, Residency::Global, Residency::SeparateKernel];
}
