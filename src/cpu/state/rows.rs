//! The operators' arithmetic on a state's rows, and its arguments.

use crate::cpu::simd::convert::{Accum, Convert};
use crate::cpu::simd::interleaved::Interleaved;

/// A type of a state's elements.
pub trait Stored: Convert {
    /// of all arithmetic and sums: f64 for f64, else f32
    type Accum: Accum + Stored<Accum = Self::Accum>;

    /// Returns a row in place if its type is that of the arithmetic; else widens it into `to`.
    #[inline(always)]
    fn widen_row<'a>(row: &'a [Self], to: &mut [Self::Accum]) -> Option<&'a [Self::Accum]> {
        to.iter_mut().zip(row).for_each(|(to, from)| *to = from.widen());
        None
    }

    /// Returns the arithmetic on rows of m channels, which may `follow` each other in memory, token by token.
    fn arithmetic<S: Interleaved>(simd: S, m: usize, follow: bool) -> Box<dyn StateRows<Self>>;
}

/// Rewrites of one row.
#[derive(Clone, Copy)]
pub struct Terms<'a, A> {
    /// k [n][d]
    pub k: &'a [A],
    /// what k adds to each channel [n][m]
    pub factors: &'a [A],
}

impl<A: Accum> Terms<'_, A> {
    pub fn none() -> Self {
        Terms { k: &[], factors: &[] }
    }

    /// Returns none if all of them add 0, so that X stays bit for bit, −0 included.
    pub fn that_write(self) -> Self {
        let zero = self.factors.iter().all(|factor| *factor == A::default());
        if zero { Terms::none() } else { self }
    }
}

/// The read of a row: into x of its token and, if it looks back in time, into the sums of the next ones.
pub struct Mix<'a, A> {
    /// w [K][d][m]
    pub weight: &'a [A],
    /// x, or its sums so far, in a ring [K][d]
    pub window: &'a mut [A],
    /// K
    pub ring: usize,
    /// the slot of this token's x
    pub slot: usize,
    /// how many of the taps are wanted
    pub taps: usize,
}

/// Rows of one number per feature, each times its weight, are added to a row of the state's shape. Each weight's gradient
/// is the product with another such row.
///
/// | | a read's backward | an expansion | its backward |
/// |---|---|---|---|
/// | `grad` | the incoming ∂L/∂X', None for zeros | None | None |
/// | `weight` [K][d][m], None for ones | w | w | None |
/// | `dx`, a ring [K][d] | dx | x | x |
/// | `to` [d][m], empty if it is not wanted | G | X | empty |
/// | `k` [d], empty without `k_grad` | k | empty | empty |
/// | `k_grad` [m], to be added to | kᵀG | empty | empty |
/// | `state` [d][m], unused without `grad_weight` | X' | empty | dX |
/// | `grad_weight` [K][d][m], to be added to, empty if it is not wanted | dw | empty | dw |
pub struct Join<'a, T, A> {
    /// d
    pub features: usize,
    pub grad: Option<&'a [T]>,
    pub weight: Option<&'a [A]>,
    pub dx: &'a [A],
    /// K
    pub ring: usize,
    /// the slot of this token's row in the ring
    pub slot: usize,
    /// how many taps are within the document
    pub taps: usize,
    pub to: &'a mut [A],
    pub k: &'a [A],
    pub k_grad: &'a mut [A],
    pub state: &'a [T],
    pub grad_weight: &'a mut [A],
}

impl<T, A> Join<'_, T, A> {
    /// Adds nothing and computes nothing: to be completed with `..`.
    pub fn none(features: usize) -> Self {
        Join {
            features,
            grad: None,
            weight: None,
            dx: &[],
            ring: 0,
            slot: 0,
            taps: 0,
            to: &mut [],
            k: &[],
            k_grad: &mut [],
            state: &[],
            grad_weight: &mut [],
        }
    }
}

/// One row of the rewrites' gradients.
pub struct Finish<'a, T, A> {
    /// G [d][m]
    pub grad: &'a [A],
    /// X
    pub state: &'a [T],
    /// k and what times it is added to X
    pub terms: Terms<'a, A>,
    /// α r g [n][m]; empty if nothing is erased: dX is then G
    pub back: &'a [A],
    /// the coefficient of each k in its own dk [n]
    pub on_k: &'a [A],
    /// dX
    pub to: &'a mut [T],
    /// each dk without its multiples of the other k: G f − X b + on_k·k, with f = r (β v − α p) and b = α r g [n][d]
    pub dk: &'a mut [A],
}

/// Arithmetic on rows. Each method enters `vectorize` again, so that a call through `dyn` runs with the vectors'
/// instructions, too, and is compiled once, not in every loop over tokens. Every sum over features has one order for one m
/// and one operation, whatever else is computed.
pub trait StateRows<T: Stored> {
    /// products += kᵀX; returns |k|².
    fn products(&self, k: &[T::Accum], state: &[T], products: &mut [T::Accum]) -> T::Accum;

    /// X' = X + Σ k fᵀ, rounded as it is stored, into `to`, and x = Σ_j w_j ⊙ X'_j.
    fn write_read(
        &self,
        state: &[T],
        terms: Terms<'_, T::Accum>,
        to: Option<&mut [T]>,
        mix: Option<&mut Mix<'_, T::Accum>>,
    );

    /// G += Σ_s w_s ⊙ dx_s, kᵀG, and dw_s += X' ⊙ dx_s.
    fn join(&self, join: &mut Join<'_, T, T::Accum>);

    /// dX = G − Σ k bᵀ, and each dk without its multiples of the other k.
    fn finish(&self, finish: &mut Finish<'_, T, T::Accum>);
}
