//! The kernels' argument structures, field by field as in kernels/*.cu and *.cuh (tests/emulated_gpu/test_arguments.py).

/// An address on the device; 0 is null, for an absent tensor.
pub type Address = u64;

/// A structure as C lays it out: its fields in order, by their types.
macro_rules! structure {
    ($(#[$about:meta])* $name:ident { $($type:ty: $($field:ident),+;)+ }) => {
        $(#[$about])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default)]
        pub struct $name { $($(pub $field: $type,)+)+ }

        #[cfg(feature = "emulator")]
        impl $name {
            /// Name, size and fields: (name, offset, size) each.
            pub const LAYOUT: Layout = (
                stringify!($name),
                size_of::<$name>(),
                &[$($((stringify!($field), std::mem::offset_of!($name, $field), size_of::<$type>()),)+)+],
            );
        }
    };
}

structure! {
    /// Inputs of `rewrite_read`, and the tensors that its forward saves.
    RewriteRead {
        Address: state, direction, value, gate, compress, norm_weight, gate_weight, gate_bias, value_weight, value_bias,
            new_state, stats, context, new_value, new_gate, compressed, rstd, pending, new_pending, document_starts,
            scratch;
        f64: eps_k, norm_eps, value_scale;
        i64: tokens, time, chunk, step;
    }
}

structure! {
    /// The gradients that come in, those to write, and what parameters_bwd and reduce need.
    Gradients {
        Address: grad_new_state, grad_context, grad_new_value, grad_new_gate, grad_state, grad_direction, grad_value,
            grad_gate, partial, shift;
    }
}

structure! {
    /// An earlier rewrite.
    Link { Address: direction, value, gate, stats; }
}

/// Most rewrites that a backward applies to an anchor.
pub const MOST_LINKS: usize = 31;

structure! {
    Chain {
        [Link; MOST_LINKS]: links;
        i64: length;
    }
}

structure! {
    Backward {
        RewriteRead: forward;
        Gradients: gradients;
        Chain: chain;
    }
}

structure! {
    Reduce {
        Address: partial;
        i64: blocks;
        Address: norm_weight, grad_compress, grad_norm_weight, grad_gate_weight, grad_gate_bias, grad_value_weight,
            grad_value_bias;
    }
}

structure! {
    Expand {
        Address: x, weight, state, before, new_before, document_starts;
        i64: chunks, time, chunk;
    }
}

structure! {
    ExpandBackward {
        Address: x, weight, grad_state, grad_x, partial, document_starts;
        i64: chunks, time, chunk;
    }
}

#[cfg(feature = "emulator")]
pub type Layout = (&'static str, usize, &'static [(&'static str, usize, usize)]);

#[cfg(feature = "emulator")]
pub const LAYOUTS: [Layout; 8] = [
    RewriteRead::LAYOUT,
    Gradients::LAYOUT,
    Link::LAYOUT,
    Chain::LAYOUT,
    Backward::LAYOUT,
    Reduce::LAYOUT,
    Expand::LAYOUT,
    ExpandBackward::LAYOUT,
];

impl RewriteRead {
    /// Returns the tensors that are loaded and stored in packets; all others are accessed a number at a time.
    pub fn packets(&self) -> [Address; 11] {
        let RewriteRead { state, direction, new_state, context, compressed, pending, new_pending, .. } =
            *self;
        let RewriteRead { compress, norm_weight: norm, gate_weight: gate, value_weight: value, .. } = *self;
        [state, direction, new_state, context, compressed, pending, new_pending, compress, norm, gate, value]
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
