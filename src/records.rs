//! The arguments of an operator and its results, each spelled once for all interfaces.
//!
//! A record is generic over what holds its numbers. `T` holds those of the state's dtype, and `S` the small ones, which
//! are float32 or, beside a float64 state, float64: values, gates and statistics. [`crate::slices`] has the records on
//! arrays and vectors, `crate::tch` on tch's tensors. Where a field may be left out, `T` is an `Option` or a vector that
//! may be empty.

use crate::error::Result;

/// Puts the numbers of a record's fields into another holder, one field after the other, in their order.
pub(crate) trait Map<From, To> {
    fn map(&mut self, name: &'static str, from: &From) -> Result<To>;
}

impl<From, To, F: FnMut(&'static str, &From) -> Result<To>> Map<From, To> for F {
    fn map(&mut self, name: &'static str, from: &From) -> Result<To> {
        self(name, from)
    }
}

/// Defines a record: its fields with numbers, of which those marked with `S` are the small ones, then the others, which
/// are the same for all holders.
macro_rules! record {
    ($(#[$about:meta])* $name:ident<T $(, $S:ident -> $R:ident)?> {
        $($(#[$doc:meta])* $vis:vis $field:ident: $holder:ident,)+
        $(; $($(#[$same_doc:meta])* $same_vis:vis $same:ident: $type:ty,)+)?
    }) => {
        $(#[$about])*
        pub struct $name<T $(, $S = T)?> {
            $($(#[$doc])* $vis $field: $holder,)+
            $($($(#[$same_doc])* $same_vis $same: $type,)+)?
        }

        impl<T $(, $S)?> $name<T $(, $S)?> {
            pub(crate) fn try_map<U, $($R,)? M: Map<T, U> $(+ Map<$S, $R>)?>(
                &self,
                by: &mut M,
            ) -> Result<$name<U $(, $R)?>> {
                Ok($name {
                    $($field: by.map(stringify!($field), &self.$field)?,)+
                    $($($same: self.$same,)+)?
                })
            }
        }
    };
}

/// The gate α of X' = X + k̂ (β vᵀ − α k̂ᵀX): how much of what is along k̂ a rewrite erases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Erase {
    /// α = β, the delta rule
    #[default]
    Tied = 0,
    /// α = 0: k̂ᵀX is not computed
    None = 1,
}

record! {
    /// A rewrite of a state, X' = X + β k̂ (vᵀ − k̂ᵀX), or X + β k̂ vᵀ with [`Erase::None`]: once, or n times in order
    /// if its tensors have an axis n after the batch. Source: DDL (arXiv 2601.00417), eq. 2.5.
    #[derive(Clone, Copy, Debug)]
    Write<T, S -> R> {
        /// k (…, d) or (…, n, d), of any norm
        pub direction: T,
        /// v (…, m) or (…, n, m)
        pub value: S,
        /// β (…) or (…, n), in [0, 2]: 0 keeps a finite X, 1 replaces the readout k̂ᵀX by v, 2 with v = 0 reflects
        pub gate: S,
        ;
        /// ε_k in k̂ = k/√(|k|² + ε_k²)
        pub eps_k: f64,
        pub erase: Erase,
    }
}

impl<T> Write<T> {
    pub(crate) fn tensors(&self) -> [&T; 3] {
        [&self.direction, &self.value, &self.gate]
    }
}

/// A rewrite of an earlier call with the `stats` that its forward returned, from which it can be applied again.
#[derive(Clone, Copy, Debug)]
pub struct Link<T, S = T> {
    pub write: Write<T, S>,
    /// (…, 1 + m), or more for n rewrites; see [`Outputs::stats`]
    pub stats: S,
}

impl<T, S> Link<T, S> {
    pub(crate) fn try_map<U, R>(&self, by: &mut (impl Map<T, U> + Map<S, R>)) -> Result<Link<U, R>> {
        let mut by = OfChain(by);
        Ok(Link { write: self.write.try_map(&mut by)?, stats: by.map("stats", &self.stats)? })
    }
}

/// Every field of a link has the name of the argument that it belongs to.
struct OfChain<'a, M>(&'a mut M);

impl<T, U, M: Map<T, U>> Map<T, U> for OfChain<'_, M> {
    fn map(&mut self, _: &'static str, from: &T) -> Result<U> {
        self.0.map("chain", from)
    }
}

record! {
    /// A read of a state: x = compress(X'), h = norm(x), v = φ(W z + b), β = 2σ(w·h + b).
    /// Source: the same paper; the gate is eq. 2.6.
    #[derive(Clone, Copy, Debug, Default)]
    Read<T> {
        /// (d, m) over channels, (d, m, K) over channels and time; None for m = 1 without mixing
        pub compress: T,
        /// γ (d,); None for ones
        pub norm_weight: T,
        /// w (d,), or (n, d) for n rewrites to come; None for no gate
        pub gate_weight: T,
        /// () or (n,)
        pub gate_bias: T,
        /// W (m, d) or (n, m, d); None for no value
        pub value_weight: T,
        /// (m,) or (n, m)
        pub value_bias: T,
        ;
        /// None: no normalisation
        pub norm_eps: Option<f64>,
        /// φ = scale·sigmoid; None: φ = identity
        pub value_scale: Option<f64>,
        /// z = x instead of h
        pub value_from_compressed: bool,
    }
}

record! {
    /// Results of a forward; absent if their half is absent or nothing requests them.
    ///
    /// `vjp` needs `stats`, `new_value` and `new_gate` as the forward left them: changing them in place changes the gradients.
    #[derive(Clone, Debug, Default)]
    Outputs<T, S -> R> {
        /// X' (…, d, m)
        pub new_state: T,
        /// h (…, d)
        pub context: T,
        /// v (…, m) or (…, n, m), if the read has a `value_weight`
        pub new_value: S,
        /// β (…) or (…, n), if the read has a `gate_weight`
        pub new_gate: S,
        /// statistics of the rewrite, for a [`Link`]: r = 1/√(|k|² + ε_k²) and p = k̂ᵀX (0 if nothing is erased), (…, 1 + m); for n rewrites
        /// (…, n(1 + m) + n(n − 1)/2), with the products k_j·k_i
        pub stats: S,
        /// 1/√(mean x² + ε) (…)
        pub(crate) rstd: S,
        /// x (…, d), if the read looks back in time
        pub(crate) compressed: T,
        /// contribution of the tokens of a cached step to the compressed x of the next K − 1 (…, K − 1, d)
        pub new_pending: S,
    }
}

record! {
    /// Gradients of a forward's results; None is zero.
    #[derive(Clone, Copy, Debug, Default)]
    Incoming<T, S -> R> {
        pub grad_new_state: T,
        pub grad_context: T,
        pub grad_new_value: S,
        pub grad_new_gate: S,
    }
}

record! {
    /// Gradients of the inputs, each as its input; absent for what was not given. The state always has one.
    #[derive(Clone, Debug, Default)]
    Gradients<T, S -> R> {
        pub state: T,
        pub direction: T,
        pub value: S,
        pub gate: S,
        pub compress: T,
        pub norm_weight: T,
        pub gate_weight: T,
        pub gate_bias: T,
        pub value_weight: T,
        pub value_bias: T,
        ;
        /// `state` holds the incoming ∂L/∂X', each row is overwritten after its use, and `grad_new_state` is `None`.
        pub(crate) in_place: bool,
    }
}

record! {
    /// Results of a step of an expansion.
    #[derive(Clone, Debug)]
    Expanded<T, S -> R> {
        /// X (…, d, m)
        pub state: T,
        /// x of the last K − 1 tokens (…, K − 1, d); absent for a repetition
        pub new_before: S,
    }
}

record! {
    /// Gradients of an expansion's inputs.
    #[derive(Clone, Debug)]
    ExpandGradients<T, S -> R> {
        /// (…, d)
        pub x: T,
        /// (d, m, K); absent for a repetition
        pub weight: S,
    }
}
