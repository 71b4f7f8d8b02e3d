//! Rows in vectors against rows number by number, for each kind of vectors.

use half::{bf16, f16};

use super::portable::Portable;
use super::rows::{Finish, Join, Mix, StateRows, Stored, Terms};
use super::vectors::Vectors;
use crate::cpu::simd::dispatch::{WithSimd, dispatch_all};
use crate::cpu::simd::halves::Narrow;
use crate::cpu::simd::interleaved::Interleaved;

/// Numbers between −1 and 1, others for each seed.
fn numbers(len: usize, seed: usize) -> Vec<f32> {
    let number = |at: usize| ((at * 7919 + seed * 104_729) % 2003) as f32 / 1001.5 - 1.0;
    (0..len).map(number).collect()
}

fn stored<T: Narrow>(len: usize, seed: usize) -> Vec<T> {
    numbers(len, seed).into_iter().map(T::narrow).collect()
}

struct Sizes {
    d: usize,
    rewrites: usize,
    taps: usize,
}

/// All that the operations leave behind, one after the other.
fn results<T: Stored<Accum = f32> + Narrow>(rows: &dyn StateRows<T>, m: usize, sizes: &Sizes) -> Vec<f32> {
    let Sizes { d, rewrites, taps } = *sizes;
    let (state, all) = (stored::<T>(d * m, 1), d * m);
    let (k, factors, back) = (numbers(rewrites * d, 2), numbers(rewrites * m, 3), numbers(rewrites * m, 4));
    let weight = numbers(taps * all, 5);
    let terms = Terms { k: &k, factors: &factors };
    let mut found = numbers(m, 6);
    for k in k.chunks_exact(d) {
        let square = rows.products(k, &state, &mut found[..m]);
        found.push(square);
    }
    for slot in 0..taps {
        let (mut to, mut window) = (stored::<T>(all, 7), numbers(taps * d, 8));
        let mut mix = Mix { weight: &weight, window: &mut window, ring: taps, slot, taps: taps - slot };
        rows.write_read(&state, terms, (rewrites > 0).then_some(&mut to), Some(&mut mix));
        found.extend(to.iter().map(|number| number.widen::<f32>()).chain(window));
    }
    let (grad, dx) = (stored::<T>(all, 9), numbers(taps * d, 10));
    for parts in 0..32 {
        let [adds, weighs, totals, learns, multiplies] = [1, 2, 4, 8, 16].map(|part| parts & part != 0);
        let reach = if weighs || learns { taps } else { taps - 1 };
        let (mut to, mut grad_weight) = (vec![0.0; all], numbers(taps * all, 11));
        let mut k_grad = numbers(m, 14);
        rows.join(&mut Join {
            features: d,
            grad: adds.then_some(&grad),
            weight: weighs.then_some(&weight),
            dx: &dx,
            ring: taps,
            slot: taps - 1,
            taps: reach,
            to: if totals { &mut to } else { &mut [] },
            k: if multiplies && rewrites > 0 { &k[..d] } else { &[] },
            k_grad: &mut k_grad,
            state: &state,
            grad_weight: if learns { &mut grad_weight } else { &mut [] },
        });
        found.extend(to.into_iter().chain(grad_weight).chain(k_grad));
    }
    if rewrites > 0 {
        let (grad, mut to, mut dk) = (numbers(all, 12), stored::<T>(all, 13), vec![0.0; rewrites * d]);
        rows.finish(&mut Finish {
            grad: &grad,
            state: &state,
            terms,
            back: &back,
            on_k: &numbers(rewrites, 15),
            to: &mut to,
            dk: &mut dk,
        });
        found.extend(to.iter().map(|number| number.widen::<f32>()).chain(dk));
    }
    found
}

struct Compared<const M: usize>(Sizes);

impl<const M: usize> WithSimd for &Compared<M> {
    type Output = ();
    fn run<S: Interleaved>(self, simd: S) {
        self.of::<f32, S>(simd, 2e-6);
        self.of::<bf16, S>(simd, 1.0 / 128.0);
        self.of::<f16, S>(simd, 1.0 / 1024.0);
    }
}

impl<const M: usize> Compared<M> {
    /// `tolerance` is a place of a stored number, which the two may round to different neighbours.
    fn of<T: Stored<Accum = f32> + Narrow, S: Interleaved>(&self, simd: S, tolerance: f32) {
        let Sizes { d, rewrites, taps } = self.0;
        let ours = results::<T>(&Vectors::<S, M> { simd, follow: false }, M, &self.0);
        let expected = results::<T>(&Portable { m: M, first: 0 }, M, &self.0);
        assert_eq!(ours.len(), expected.len());
        let terms = (d * (1 + rewrites) + M * taps) as f32; // of the longest sum
        for (at, (ours, expected)) in ours.iter().zip(&expected).enumerate() {
            let allowed = tolerance * (expected.abs() + 1.0) + 1e-6 * terms.sqrt() * 4.0;
            let where_ = format!("{at} of m {M}, d {d}, {rewrites} rewrites, {taps} taps");
            assert!((ours - expected).abs() <= allowed, "{ours} for {expected}: {where_}");
        }
    }
}

fn compare<const M: usize>() {
    for d in [1, 7, 16, 40, 67] {
        for (rewrites, taps) in [(0, 1), (1, 1), (1, 3), (3, 2)] {
            let compared = Compared::<M>(Sizes { d, rewrites, taps });
            dispatch_all(|| &compared);
        }
    }
}

#[test]
fn rows_in_vectors_are_those_of_numbers() {
    compare::<1>();
    compare::<2>();
    compare::<4>();
    compare::<8>();
    compare::<16>();
}
