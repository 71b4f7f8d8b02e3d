//! The kernels' argument structures, field by field as in kernels/*.cu and *.cuh.

#[cfg(feature = "emulator")]
use super::specialisation::Kernel;

/// An address on the device; 0 is null, for an absent tensor.
pub type Address = u64;

/// Inputs of `rewrite_read`, and the tensors that its forward saves.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RewriteRead {
    pub state: Address,
    pub direction: Address,
    pub value: Address,
    pub gate: Address,
    pub compress: Address,
    pub norm_weight: Address,
    pub gate_weight: Address,
    pub gate_bias: Address,
    pub value_weight: Address,
    pub value_bias: Address,
    pub new_state: Address,
    pub stats: Address,
    pub context: Address,
    pub new_value: Address,
    pub new_gate: Address,
    pub compressed: Address,
    pub rstd: Address,
    pub pending: Address,
    pub new_pending: Address,
    pub document_starts: Address,
    pub scratch: Address,
    pub eps_k: f64,
    pub norm_eps: f64,
    pub value_scale: f64,
    pub tokens: i64,
    pub time: i64,
    pub chunk: i64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Gradients {
    pub grad_new_state: Address,
    pub grad_context: Address,
    pub grad_new_value: Address,
    pub grad_new_gate: Address,
    pub grad_state: Address,
    pub grad_direction: Address,
    pub grad_value: Address,
    pub grad_gate: Address,
    pub partial: Address,
    pub shift: Address,
}

/// An earlier rewrite.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Link {
    pub direction: Address,
    pub value: Address,
    pub gate: Address,
    pub stats: Address,
}

/// Most rewrites that a backward applies to an anchor.
pub const MOST_LINKS: usize = 31;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Chain {
    pub links: [Link; MOST_LINKS],
    pub length: i64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Backward {
    pub forward: RewriteRead,
    pub gradients: Gradients,
    pub chain: Chain,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Reduce {
    pub partial: Address,
    pub blocks: i64,
    pub norm_weight: Address,
    pub compress: Address,
    pub norm: Address,
    pub gate: Address,
    pub gate_bias: Address,
    pub value: Address,
    pub value_bias: Address,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Expand {
    pub x: Address,
    pub weight: Address,
    pub state: Address,
    pub before: Address,
    pub new_before: Address,
    pub document_starts: Address,
    pub chunks: i64,
    pub time: i64,
    pub chunk: i64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ExpandBackward {
    pub x: Address,
    pub weight: Address,
    pub grad_state: Address,
    pub grad_x: Address,
    pub partial: Address,
    pub document_starts: Address,
    pub chunks: i64,
    pub time: i64,
    pub chunk: i64,
}

impl RewriteRead {
    /// Returns the tensors that are loaded and stored in packets; all others are accessed a number at a time.
    pub fn packets(&self) -> [Address; 11] {
        let RewriteRead { state, direction, new_state, context, compressed, pending, new_pending, .. } =
            *self;
        let RewriteRead { compress, norm_weight, gate_weight, value_weight, .. } = *self;
        [
            state,
            direction,
            new_state,
            context,
            compressed,
            pending,
            new_pending,
            compress,
            norm_weight,
            gate_weight,
            value_weight,
        ]
    }
}

impl Gradients {
    pub fn packets(&self) -> [Address; 4] {
        [self.grad_new_state, self.grad_context, self.grad_state, self.grad_direction]
    }
}

impl Chain {
    /// Returns the tensors that are loaded in packets.
    pub fn packets(&self) -> [Address; MOST_LINKS] {
        self.links.map(|link| link.direction)
    }
}

/// Returns true if packets may be loaded and stored 16 bytes at a time.
pub fn are_aligned(packets: &[Address]) -> bool {
    packets.iter().all(|address| address % 16 == 0)
}

#[cfg(feature = "emulator")]
impl Kernel {
    /// Returns the size of the kernel's argument structure.
    pub fn argument_bytes(self) -> usize {
        match self {
            Kernel::Forward => size_of::<RewriteRead>(),
            Kernel::Backward | Kernel::Parameters => size_of::<Backward>(),
            Kernel::Reduce => size_of::<Reduce>(),
            Kernel::ExpandForward => size_of::<Expand>(),
            Kernel::ExpandBackward => size_of::<ExpandBackward>(),
        }
    }
}
