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

/// The gate α of X' = X + k̂ (β vᵀ − α k̂ᵀX): how much of what is along k̂ a rewrite erases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Erase {
    /// α = β, the delta rule
    #[default]
    Tied = 0,
    /// α = 0: k̂ᵀX is not computed
    None = 1,
}

/// A rewrite of a state, X' = X + β k̂ (vᵀ − k̂ᵀX), or X + β k̂ vᵀ with [`Erase::None`]: once, or n times in order
/// if its tensors have an axis n after the batch. Source: DDL (arXiv 2601.00417), eq. 2.5.
#[derive(Clone, Copy, Debug)]
pub struct Write<T, S = T> {
    /// k (…, d) or (…, n, d), of any norm
    pub direction: T,
    /// v (…, m) or (…, n, m)
    pub value: S,
    /// β (…) or (…, n), in [0, 2]: 0 keeps a finite X, 1 replaces the readout k̂ᵀX by v, 2 with v = 0 reflects
    pub gate: S,
    /// ε_k in k̂ = k/√(|k|² + ε_k²)
    pub eps_k: f64,
    pub erase: Erase,
}

#[cfg(feature = "torch")]
impl<T> Write<T> {
    pub(crate) fn tensors(&self) -> [&T; 3] {
        [&self.direction, &self.value, &self.gate]
    }
}

impl<T, S> Write<T, S> {
    pub(crate) fn try_map<U, R>(&self, by: &mut (impl Map<T, U> + Map<S, R>)) -> Result<Write<U, R>> {
        Ok(Write {
            direction: by.map("direction", &self.direction)?,
            value: by.map("value", &self.value)?,
            gate: by.map("gate", &self.gate)?,
            eps_k: self.eps_k,
            erase: self.erase,
        })
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

/// A read of a state: x = compress(X'), h = norm(x), v = φ(W z + b), β = 2σ(w·h + b).
/// Source: the same paper; the gate is eq. 2.6.
#[derive(Clone, Copy, Debug, Default)]
pub struct Read<T> {
    /// (d, m) over channels, (d, m, K) over channels and time; None for m = 1 without mixing
    pub compress: T,
    /// γ (d,); None for ones
    pub norm_weight: T,
    /// None: no normalisation
    pub norm_eps: Option<f64>,
    /// w (d,), or (n, d) for n rewrites to come; None for no gate
    pub gate_weight: T,
    /// () or (n,)
    pub gate_bias: T,
    /// W (m, d) or (n, m, d); None for no value
    pub value_weight: T,
    /// (m,) or (n, m)
    pub value_bias: T,
    /// φ = scale·sigmoid; None: φ = identity
    pub value_scale: Option<f64>,
    /// z = x instead of h
    pub value_from_compressed: bool,
}

impl<T> Read<T> {
    pub(crate) fn try_map<U>(&self, by: &mut impl Map<T, U>) -> Result<Read<U>> {
        Ok(Read {
            compress: by.map("compress", &self.compress)?,
            norm_weight: by.map("norm_weight", &self.norm_weight)?,
            norm_eps: self.norm_eps,
            gate_weight: by.map("gate_weight", &self.gate_weight)?,
            gate_bias: by.map("gate_bias", &self.gate_bias)?,
            value_weight: by.map("value_weight", &self.value_weight)?,
            value_bias: by.map("value_bias", &self.value_bias)?,
            value_scale: self.value_scale,
            value_from_compressed: self.value_from_compressed,
        })
    }
}

/// Results of a forward; absent if their half is absent or nothing requests them.
///
/// `vjp` needs `stats`, `new_value` and `new_gate` as the forward left them: changing them in place changes the gradients.
#[derive(Clone, Debug, Default)]
pub struct Outputs<T, S = T> {
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

impl<T, S> Outputs<T, S> {
    pub(crate) fn try_map<U, R>(&self, by: &mut (impl Map<T, U> + Map<S, R>)) -> Result<Outputs<U, R>> {
        Ok(Outputs {
            new_state: by.map("new_state", &self.new_state)?,
            context: by.map("context", &self.context)?,
            new_value: by.map("new_value", &self.new_value)?,
            new_gate: by.map("new_gate", &self.new_gate)?,
            stats: by.map("stats", &self.stats)?,
            rstd: by.map("rstd", &self.rstd)?,
            compressed: by.map("compressed", &self.compressed)?,
            new_pending: by.map("new_pending", &self.new_pending)?,
        })
    }
}

/// Gradients of a forward's results; None is zero.
#[derive(Clone, Copy, Debug, Default)]
pub struct Incoming<T, S = T> {
    pub grad_new_state: T,
    pub grad_context: T,
    pub grad_new_value: S,
    pub grad_new_gate: S,
}

/// Gradients of the inputs, each as its input; absent for what was not given. The state always has one.
#[derive(Clone, Debug, Default)]
pub struct Gradients<T, S = T> {
    pub state: T,
    /// `state` holds the incoming ∂L/∂X', each row is overwritten after its use, and `grad_new_state` is `None`.
    pub(crate) in_place: bool,
    pub direction: T,
    pub value: S,
    pub gate: S,
    pub compress: T,
    pub norm_weight: T,
    pub gate_weight: T,
    pub gate_bias: T,
    pub value_weight: T,
    pub value_bias: T,
}

impl<T, S> Gradients<T, S> {
    pub(crate) fn try_map<U, R>(&self, by: &mut (impl Map<T, U> + Map<S, R>)) -> Result<Gradients<U, R>> {
        Ok(Gradients {
            state: by.map("state", &self.state)?,
            in_place: self.in_place,
            direction: by.map("direction", &self.direction)?,
            value: by.map("value", &self.value)?,
            gate: by.map("gate", &self.gate)?,
            compress: by.map("compress", &self.compress)?,
            norm_weight: by.map("norm_weight", &self.norm_weight)?,
            gate_weight: by.map("gate_weight", &self.gate_weight)?,
            gate_bias: by.map("gate_bias", &self.gate_bias)?,
            value_weight: by.map("value_weight", &self.value_weight)?,
            value_bias: by.map("value_bias", &self.value_bias)?,
        })
    }
}
