//! The passes, at every kind of vectors, against loops over numbers.

use super::slice::{self, Pair, Sliced, Step, load, rows_mut, step, steps, store};
use super::transposed::{self, Back, Columns, Sums, get, put};
use crate::cpu::simd::dispatch::{WithSimd, dispatch_all};
use crate::cpu::simd::interleaved::Interleaved;

const ROWS: usize = 48;

/// Numbers that repeat late, between −1 and 1.
fn numbers<A: Sliced>(count: usize, seed: usize) -> Vec<A> {
    (0..count).map(|i| A::from_f64(((i * 7 + seed * 13 + 1) as f64 * 0.731).sin())).collect()
}

fn close<A: Sliced>(name: &str, actual: A, expected: f64) {
    let tolerance = if size_of::<A>() == 4 { 3e-5 } else { 1e-13 };
    assert!(
        (actual.to_f64() - expected).abs() <= tolerance,
        "{name}: {}, expected {expected}",
        actual.to_f64()
    );
}

struct Forward<A>(std::marker::PhantomData<A>);

impl<A: Sliced> WithSimd for Forward<A> {
    type Output = ();

    fn run<S: Interleaved>(self, simd: S) {
        let width = A::COLUMNS;
        let old = numbers::<A>(ROWS * width, 0);
        let [decay, k, q, next] = [1, 2, 3, 4].map(|seed| numbers::<A>(ROWS, seed));
        let w = numbers::<A>(width, 5);
        for decays in [false, true] {
            let mut state = old.clone();
            let of = Step { decay: &decay, k: &k, q: &q, next: &next };
            let w_row = load::<A, S>(simd, &w);
            let (y, p) = match decays {
                true => step::<A, S, true, true>(simd, rows_mut(&mut state), &of, w_row),
                false => step::<A, S, false, true>(simd, rows_mut(&mut state), &of, w_row),
            };
            let again = slice::product::<A, S>(simd, rows_mut(&mut state), &q);
            let [mut of_y, mut of_p, mut of_again] = [0; 3].map(|_| vec![A::default(); width]);
            store::<A, S>(y, &mut of_y);
            store::<A, S>(p, &mut of_p);
            store::<A, S>(again, &mut of_again);
            for c in 0..width {
                let new = |r: usize| {
                    let a = if decays { decay[r].to_f64() } else { 1.0 };
                    a * old[r * width + c].to_f64() + k[r].to_f64() * w[c].to_f64()
                };
                close("y", of_y[c], (0..ROWS).map(|r| q[r].to_f64() * new(r)).sum());
                close("y again", of_again[c], of_y[c].to_f64());
                close("p", of_p[c], (0..ROWS).map(|r| next[r].to_f64() * new(r)).sum());
                (0..ROWS).for_each(|r| close("S", state[r * width + c], new(r)));
            }
        }
    }
}

/// Two steps in a pass.
struct Both<A>(std::marker::PhantomData<A>);

impl<A: Sliced> WithSimd for Both<A> {
    type Output = ();

    fn run<S: Interleaved>(self, simd: S) {
        let passes = [
            steps::<A, S, false, false, false>,
            steps::<A, S, false, false, true>,
            steps::<A, S, false, true, false>,
            steps::<A, S, false, true, true>,
            steps::<A, S, true, false, false>,
            steps::<A, S, true, false, true>,
            steps::<A, S, true, true, false>,
            steps::<A, S, true, true, true>,
        ];
        let width = A::COLUMNS;
        let old = numbers::<A>(ROWS * width, 0);
        let of: [_; 7] = std::array::from_fn(|n| numbers::<A>(ROWS, n + 1));
        let w = [8, 9].map(|seed| numbers::<A>(width, seed));
        let wide = |x: &[A], at: usize| x[at].to_f64();
        for (index, pass) in passes.into_iter().enumerate() {
            let mut state = old.clone();
            let pair =
                Pair { decay: &of[0], k: [&of[1], &of[2]], q: [&of[3], &of[4]], next: [&of[5], &of[6]] };
            let mut sums = [slice::zeros::<A, S>(simd); 4];
            let w_rows = [&w[0], &w[1]].map(|w| load::<A, S>(simd, w));
            pass(simd, rows_mut(&mut state), &pair, &w_rows, &mut sums);
            let sums = sums.map(|sum| {
                let mut to = vec![A::default(); width];
                store::<A, S>(sum, &mut to);
                to
            });
            for c in 0..width {
                let before = |r: usize| wide(&old, r * width + c);
                let new = |r: usize| {
                    let a = if index & 4 > 0 { wide(&of[0], r) } else { 1.0 };
                    a * before(r) + wide(&of[1], r) * wide(&w[0], c) + wide(&of[2], r) * wide(&w[1], c)
                };
                let sum = |by: &[A], s: &dyn Fn(usize) -> f64| (0..ROWS).map(|r| wide(by, r) * s(r)).sum();
                let first = if index & 2 > 0 { sum(&of[3], &before) } else { 0.0 };
                let second = if index & 1 > 0 { sum(&of[4], &new) } else { 0.0 };
                close("first y", sums[0][c], first);
                close("second y", sums[1][c], second);
                close("first p", sums[2][c], sum(&of[5], &new));
                close("second p", sums[3][c], sum(&of[6], &new));
                (0..ROWS).for_each(|r| close("S", state[r * width + c], new(r)));
            }
        }
    }
}

/// A step back in slices of so many columns.
struct StepBack<A>(usize, std::marker::PhantomData<A>);

impl<A: Sliced> WithSimd for StepBack<A> {
    type Output = ();

    fn run<S: Interleaved>(self, simd: S) {
        let width = self.0;
        let [s, ds] = [0, 1].map(|seed| numbers::<A>(ROWS * width, seed));
        let [decay, k, k_before, q_before] = [2, 3, 4, 5].map(|seed| numbers::<A>(ROWS, seed));
        let [w, dp, dy, dy_before] = [6, 7, 8, 9].map(|seed| numbers::<A>(width, seed));
        let [packed, mut new] = [&s, &ds].map(|from| {
            let mut to = vec![A::default(); ROWS * width];
            (0..ROWS).for_each(|r| put(&mut to, width, r, &from[r * width..][..width]));
            to
        });
        let [mut dq, mut dk, mut dg] = [0; 3].map(|_| vec![A::default(); ROWS]);
        let mut dw = vec![A::default(); width];
        let (lag, k_before, q_before) = (0.5, &*k_before, &*q_before);
        let of = Back { lag: A::from_f64(lag), decay: &decay, multiply: &decay, k: &k, k_before, q_before };
        let columns = Columns { w: &w, dp: &dp, dy: &dy, dy_before: &dy_before };
        let mut sums = Sums { dq: &mut dq, dk: &mut dk, dg: &mut dg };
        transposed::back::<A, S, true, true, true>(
            simd, &packed, &mut new, &of, &columns, &mut sums, &mut dw,
        );
        let wide = |x: &[A], at: usize| x[at].to_f64();
        let before = |r: usize, c: usize| {
            wide(&decay, r) * (wide(&ds, r * width + c) + wide(&k, r) * wide(&dp, c) / lag)
        };
        let after = |r: usize, c: usize| before(r, c) + wide(q_before, r) * wide(&dy_before, c);
        for r in 0..ROWS {
            let sum = |f: &dyn Fn(usize) -> f64| (0..width).map(f).sum::<f64>();
            let of_s = |by: &[A]| wide(&decay, r) * sum(&|c| wide(&s, r * width + c) * wide(by, c));
            close("dq", dq[r], of_s(&dy));
            close("dk", dk[r], lag * sum(&|c| wide(&ds, r * width + c) * wide(&w, c)) + of_s(&dp));
            close("dg", dg[r], sum(&|c| wide(&s, r * width + c) * before(r, c)));
            let mut row = vec![A::default(); width];
            get(&new, width, r, &mut row);
            (0..width).for_each(|c| close("dS", row[c], after(r, c)));
        }
        for (c, dw) in dw.iter().enumerate() {
            close("dw", *dw, (0..ROWS).map(|r| wide(k_before, r) * after(r, c)).sum());
        }
    }
}

#[test]
fn passes_agree_with_their_definitions() {
    dispatch_all(|| Forward::<f32>(std::marker::PhantomData));
    dispatch_all(|| Forward::<f64>(std::marker::PhantomData));
    dispatch_all(|| Both::<f32>(std::marker::PhantomData));
    dispatch_all(|| Both::<f64>(std::marker::PhantomData));
    for width in [16, 32, 64] {
        dispatch_all(|| StepBack::<f32>(width, std::marker::PhantomData));
        dispatch_all(|| StepBack::<f64>(width, std::marker::PhantomData));
    }
}

#[test]
fn exponentials_are_within_two_units_in_the_last_place() {
    let mut row: Vec<f32> = (-10_700..9_000).map(|n| n as f32 * 0.01).collect();
    row.extend([0.0, -0.0, -1e-10, f32::NEG_INFINITY, f32::INFINITY, f32::NAN, -1e30, 1e30]);
    let given = row.clone();
    <f32 as Sliced>::exp(&mut row);
    for (x, actual) in given.into_iter().zip(row) {
        let expected = (x as f64).exp() as f32;
        let same = actual == expected || actual.is_nan() && expected.is_nan();
        let distance = (actual.to_bits() as i64 - expected.to_bits() as i64).abs();
        assert!(same || distance <= 2, "exp {x}: {actual:e}, expected {expected:e}");
    }
}
