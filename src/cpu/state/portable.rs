//! Rows of any number of channels, one number at a time: the definition of [`StateRows`].

use super::rows::{Finish, Join, Mix, StateRows, Stored, Terms};
use crate::cpu::simd::convert::Accum;

pub struct Portable {
    pub m: usize,
    /// the first feature; those before it have been worked on
    pub first: usize,
}

impl<T: Stored> StateRows<T> for Portable {
    #[inline(always)]
    fn products(&self, k: &[T::Accum], state: &[T], products: &mut [T::Accum]) -> T::Accum {
        let mut square = T::Accum::default();
        for (k, state) in k.iter().zip(state.chunks_exact(self.m)).skip(self.first) {
            square += *k * *k;
            for (product, state) in products.iter_mut().zip(state) {
                *product += *k * state.widen::<T::Accum>();
            }
        }
        square
    }

    #[inline(always)]
    fn write_read(
        &self,
        state: &[T],
        terms: Terms<'_, T::Accum>,
        mut to: Option<&mut [T]>,
        mut mix: Option<&mut Mix<'_, T::Accum>>,
    ) {
        let m = self.m;
        let d = state.len() / m;
        for (feature, state) in state.chunks_exact(m).enumerate().skip(self.first) {
            mix.iter_mut().for_each(|mix| mix.start(feature, d));
            for (channel, state) in state.iter().enumerate() {
                let at = feature * m + channel;
                let mut new = *state;
                if !terms.k.is_empty() {
                    let mut sum = state.widen::<T::Accum>();
                    for (k, factors) in terms.k.chunks_exact(d).zip(terms.factors.chunks_exact(m)) {
                        sum += k[feature] * factors[channel];
                    }
                    new = T::narrow(sum);
                }
                if let Some(to) = &mut to {
                    to[at] = new;
                }
                mix.iter_mut().for_each(|mix| mix.add(feature, at, new.widen(), d, m));
            }
        }
    }

    #[inline(always)]
    fn join(&self, join: &mut Join<'_, T, T::Accum>) {
        let Join { features: d, grad, weight, dx, ring, slot, taps, ref mut to, k, state, .. } = *join;
        let (k_grad, grad_weight) = (&mut *join.k_grad, &mut *join.grad_weight);
        let m = self.m;
        for at in self.first * m..d * m {
            let mut sum = grad.map_or(T::Accum::default(), |grad| grad[at].widen());
            for tap in 0..taps {
                let dx = dx[(slot + tap) % ring * d + at / m];
                sum += weight.map_or(dx, |weight| dx * weight[tap * d * m + at]);
                if let Some(weight) = grad_weight.get_mut(tap * d * m + at) {
                    *weight += state[at].widen::<T::Accum>() * dx;
                }
            }
            if let Some(to) = to.get_mut(at) {
                *to = sum;
            }
            if let Some(k) = k.get(at / m) {
                k_grad[at % m] += *k * sum;
            }
        }
    }

    #[inline(always)]
    fn finish(&self, finish: &mut Finish<'_, T, T::Accum>) {
        let Finish { grad, state, terms, back, on_k, ref mut to, .. } = *finish;
        let m = self.m;
        let d = state.len() / m;
        for (at, to) in to.iter_mut().enumerate().skip(self.first * m) {
            let (feature, channel) = (at / m, at % m);
            let mut sum = grad[at];
            for (k, back) in terms.k.chunks_exact(d).zip(back.chunks_exact(m)) {
                sum -= k[feature] * back[channel];
            }
            *to = T::narrow(sum);
        }
        let rows = grad.chunks_exact(m).zip(state.chunks_exact(m));
        for (feature, (grad, state)) in rows.enumerate().skip(self.first) {
            for (index, factors) in terms.factors.chunks_exact(m).enumerate() {
                let mut sum = on_k[index] * terms.k[index * d + feature];
                for channel in 0..m {
                    let mut product = grad[channel] * factors[channel];
                    if let Some(back) = back.get(index * m + channel) {
                        product -= state[channel].widen::<T::Accum>() * *back;
                    }
                    sum += product;
                }
                finish.dk[index * d + feature] = sum;
            }
        }
    }
}

impl<A: Accum> Mix<'_, A> {
    /// Returns where the x of `tap` starts.
    #[inline(always)]
    fn start_of(&self, tap: usize, d: usize) -> usize {
        (self.slot + tap) % self.ring * d
    }

    /// Makes room for a feature of the last x: its tap is the first to add to it.
    #[inline(always)]
    fn start(&mut self, feature: usize, d: usize) {
        let last = self.ring - 1;
        if last < self.taps {
            self.window[self.start_of(last, d) + feature] = A::default();
        }
    }

    #[inline(always)]
    fn add(&mut self, feature: usize, at: usize, state: A, d: usize, m: usize) {
        for tap in 0..self.taps {
            let start = self.start_of(tap, d);
            self.window[start + feature] += self.weight[tap * d * m + at] * state;
        }
    }
}
