//! Arithmetic on contiguous rows, in loops that the compiler vectorises.

use super::convert::Accum;
use super::simd::{Kernel, dispatch};
use crate::tensor::Ahead;

/// Lanes of a running sum: two AVX-512 vectors of f32, enough to hide the latency of an addition.
const LANES: usize = 32;

/// Σ aᵢ bᵢ
pub fn dot<A: Accum>(a: &[A], b: &[A]) -> A {
    dispatch(Dots { row: a, others: [b] })[0]
}

/// products[i] = row · other(i), three at a time: `row` is loaded once for three, and their sums wait for
/// one another's additions instead of for their own.
#[inline(always)]
pub fn dots<'a, A: Accum>(
    row: &'a [A],
    other: impl Fn(usize) -> &'a [A],
    products: &mut [A],
    ahead: &mut Ahead,
) {
    let (three, rest) = products.as_chunks_mut::<3>();
    let done = 3 * three.len();
    for (at, products) in three.iter_mut().enumerate() {
        *products = dispatch(Dots { row, others: [other(3 * at), other(3 * at + 1), other(3 * at + 2)] });
        ahead.step();
    }
    match rest {
        [a, b] => [*a, *b] = dispatch(Dots { row, others: [other(done), other(done + 1)] }),
        [a] => *a = dot(row, other(done)),
        _ => return,
    }
    ahead.step();
}

struct Dots<'a, A, const N: usize> {
    row: &'a [A],
    others: [&'a [A]; N],
}

impl<A: Accum, const N: usize> Kernel for Dots<'_, A, N> {
    type Output = [A; N];
    #[inline(always)]
    fn run(self) -> [A; N] {
        let mut sums = [[A::default(); LANES]; N];
        let (body, tail) = self.row.as_chunks::<LANES>();
        for (at, row) in body.iter().enumerate() {
            for (sums, other) in sums.iter_mut().zip(&self.others) {
                let other = &other.as_chunks::<LANES>().0[at];
                for lane in 0..LANES {
                    sums[lane] += row[lane] * other[lane];
                }
            }
        }
        let sums = std::hint::black_box(sums);
        let mut products = [A::default(); N];
        for ((product, sums), other) in products.iter_mut().zip(&sums).zip(&self.others) {
            for (a, b) in tail.iter().zip(&other[self.row.len() - tail.len()..]) {
                *product += *a * *b;
            }
            *product += total(sums);
        }
        products
    }
}

/// The sum of the lanes, eight at a time and then as a tree. The black box above sends the lanes through
/// memory once: seen whole, the tree persuades LLVM to keep the loop in two-lane vectors (8× slower).
#[inline(always)]
fn total<A: Accum>(lanes: &[A; LANES]) -> A {
    let mut sums = [A::default(); 8];
    for chunk in lanes.as_chunks::<8>().0 {
        for lane in 0..8 {
            sums[lane] += chunk[lane];
        }
    }
    let [a, b, c, d, e, f, g, h] = sums;
    ((a + e) + (b + f)) + ((c + g) + (d + h))
}

/// to += scale · from
#[inline(always)]
pub fn add_scaled<A: Accum>(to: &mut [A], scale: A, from: &[A]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += scale * *from);
}

/// to = from + scale · row
#[inline(always)]
pub fn set_scaled_sum<A: Accum>(to: &mut [A], from: &[A], scale: A, row: &[A]) {
    to.iter_mut().zip(from).zip(row).for_each(|((to, from), row)| *to = *from + scale * *row);
}

/// to = Σⱼ scaleⱼ · rowⱼ of three
#[inline(always)]
pub fn set_three_scaled<A: Accum>(to: &mut [A], scales: [A; 3], rows: [&[A]; 3]) {
    let [a, b, c] = rows;
    for (((to, a), b), c) in to.iter_mut().zip(a).zip(b).zip(c) {
        *to = (scales[0] * *a + scales[1] * *b) + scales[2] * *c;
    }
}

/// to += Σⱼ scaleⱼ · rowⱼ of two
#[inline(always)]
pub fn add_two_scaled<A: Accum>(to: &mut [A], scales: [A; 2], rows: [&[A]; 2]) {
    let [a, b] = rows;
    to.iter_mut().zip(a).zip(b).for_each(|((to, a), b)| *to += scales[0] * *a + scales[1] * *b);
}

/// to += Σⱼ scaleⱼ · rowⱼ, four rows a pass.
#[inline(always)]
pub fn add_rows<A: Accum>(to: &mut [A], scale: &[A], rows: &[A]) {
    let d = to.len();
    let (four, rest) = scale.as_chunks::<4>();
    for (at, [a, b, c, e]) in four.iter().enumerate() {
        let row: [&[A]; 4] = std::array::from_fn(|j| &rows[(4 * at + j) * d..][..d]);
        for i in 0..d {
            to[i] += (*a * row[0][i] + *b * row[1][i]) + (*c * row[2][i] + *e * row[3][i]);
        }
    }
    for (scale, row) in rest.iter().zip(rows[4 * four.len() * d..].chunks_exact(d)) {
        add_scaled(to, *scale, row);
    }
}

/// to += a ⊙ b
#[inline(always)]
pub fn add_product<A: Accum>(to: &mut [A], a: &[A], b: &[A]) {
    to.iter_mut().zip(a).zip(b).for_each(|((to, a), b)| *to += *a * *b);
}

/// to += scale · a ⊙ b
#[inline(always)]
pub fn add_scaled_product<A: Accum>(to: &mut [A], scale: A, a: &[A], b: &[A]) {
    to.iter_mut().zip(a).zip(b).for_each(|((to, a), b)| *to += scale * *a * *b);
}

/// to = scale · a ⊙ b
#[inline(always)]
pub fn set_scaled_product<A: Accum>(to: &mut [A], scale: A, a: &[A], b: &[A]) {
    to.iter_mut().zip(a).zip(b).for_each(|((to, a), b)| *to = scale * *a * *b);
}

/// to = a ⊙ b
#[inline(always)]
pub fn set_product<A: Accum>(to: &mut [A], a: &[A], b: &[A]) {
    to.iter_mut().zip(a).zip(b).for_each(|((to, a), b)| *to = *a * *b);
}

/// to = (or +=, if `add`) Σⱼ weightⱼ ⊙ channelⱼ, four channels a pass.
#[inline(always)]
pub fn mix<A: Accum>(to: &mut [A], add: bool, weight: &[A], channels: &[A]) {
    let d = to.len();
    if !add {
        to.fill(A::default());
    }
    let mut first = 0;
    while first + 4 * d <= channels.len() {
        let w: [&[A]; 4] = std::array::from_fn(|j| &weight[first + j * d..][..d]);
        let x: [&[A]; 4] = std::array::from_fn(|j| &channels[first + j * d..][..d]);
        for i in 0..d {
            to[i] += (w[0][i] * x[0][i] + w[1][i] * x[1][i]) + (w[2][i] * x[2][i] + w[3][i] * x[3][i]);
        }
        first += 4 * d;
    }
    for (w, x) in weight[first..].chunks_exact(d).zip(channels[first..].chunks_exact(d)) {
        add_product(to, w, x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dot_and_mix_agree_with_their_definitions() {
        for d in [1, 31, 32, 63, 100] {
            for m in [1, 3, 4, 6] {
                let a: Vec<f64> = (0..d * m).map(|i| (i as f64).sin()).collect();
                let b: Vec<f64> = (0..d * m).map(|i| (i as f64 * 0.7).cos()).collect();
                let expected: f64 = a.iter().zip(&b).map(|(a, b)| a * b).sum();
                assert!((dot(&a, &b) - expected).abs() < 1e-12);
                let mut products = vec![0.0; m];
                dots(&a[..d], |j| &b[j * d..(j + 1) * d], &mut products, &mut Ahead::default());
                for (j, product) in products.iter().enumerate() {
                    assert!((product - dot(&a[..d], &b[j * d..(j + 1) * d])).abs() < 1e-12);
                }
                let mut to = vec![1.0; d];
                mix(&mut to, true, &a, &b);
                for i in 0..d {
                    let expected: f64 = 1.0 + (0..m).map(|j| a[j * d + i] * b[j * d + i]).sum::<f64>();
                    assert!((to[i] - expected).abs() < 1e-12);
                }
            }
        }
    }
}
