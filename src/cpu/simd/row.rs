//! Arithmetic on contiguous rows, in loops that the compiler vectorises.

use fearless_simd::prelude::*;

use super::convert::Accum;
use crate::tensor::Ahead;

/// `products[i]` = row · other(i), three at a time: `row` is loaded once for three, and additions to one sum hide
/// the latency of those to the others.
#[inline(always)]
pub fn dots<'a, S: Simd, A: Accum>(
    simd: S,
    row: &'a [A],
    other: impl Fn(usize) -> &'a [A],
    products: &mut [A],
    ahead: &mut Ahead,
) {
    let (three, rest) = products.as_chunks_mut::<3>();
    let done = 3 * three.len();
    for (at, products) in three.iter_mut().enumerate() {
        *products = some_dots(simd, row, [other(3 * at), other(3 * at + 1), other(3 * at + 2)]);
        ahead.step();
    }
    match rest {
        [a, b] => [*a, *b] = some_dots(simd, row, [other(done), other(done + 1)]),
        [a] => [*a] = some_dots(simd, row, [other(done)]),
        _ => return,
    }
    ahead.step();
}

/// Returns the dot products of `row` with N others.
#[inline(always)]
pub fn some_dots<S: Simd, A: Accum, const N: usize>(simd: S, row: &[A], others: [&[A]; N]) -> [A; N] {
    let zero = A::Vector::<S>::splat(simd, A::default());
    let mut sums = [[zero; N]; 2]; // two per product, because an addition takes longer than its loads
    let (chunks, tail) = A::chunks(row);
    let pairs = chunks.as_chunks::<2>().0;
    let mut other = [&[][..]; N];
    for n in 0..N {
        other[n] = &A::chunks(&others[n][..row.len()]).0.as_chunks::<2>().0[..pairs.len()];
    }
    for (at, pair) in pairs.iter().enumerate() {
        for half in 0..2 {
            let row = A::Vector::<S>::load_array_ref(simd, &pair[half]);
            for n in 0..N {
                let other = A::Vector::load_array_ref(simd, &other[n][at][half]);
                sums[half][n] = row.mul_add(other, sums[half][n]);
            }
        }
    }
    let done = row.len() - tail.len() - chunks.len() % 2 * A::Vector::<S>::LEN;
    let mut products = [A::default(); N];
    for n in 0..N {
        let rest = row[done..].iter().zip(&others[n][done..]);
        products[n] = rest.fold((sums[0][n] + sums[1][n]).reduce_sum(), |sum, (a, b)| sum + *a * *b);
    }
    products
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
    use crate::cpu::simd::dispatch::{WithSimd, dispatch};

    struct AllDots<'a> {
        row: &'a [f64],
        others: &'a [f64],
    }

    impl WithSimd for AllDots<'_> {
        type Output = Vec<f64>;
        fn run<S: Simd>(self, simd: S) -> Vec<f64> {
            let d = self.row.len();
            let mut products = vec![0.0; self.others.len() / d];
            dots(simd, self.row, |j| &self.others[j * d..][..d], &mut products, &mut Ahead::default());
            products
        }
    }

    #[test]
    fn dots_and_mix_agree_with_their_definitions() {
        for d in [1, 7, 16, 31, 32, 63, 100] {
            for m in [1, 2, 3, 4, 6] {
                let a: Vec<f64> = (0..d * m).map(|i| (i as f64).sin()).collect();
                let b: Vec<f64> = (0..d * m).map(|i| (i as f64 * 0.7).cos()).collect();
                let products = dispatch(AllDots { row: &a[..d], others: &b });
                for (product, b) in products.iter().zip(b.chunks_exact(d)) {
                    let expected: f64 = a.iter().zip(b).map(|(a, b)| a * b).sum();
                    assert!((product - expected).abs() < 1e-12);
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
