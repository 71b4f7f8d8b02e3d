//! Arithmetic on contiguous rows.

use fearless_simd::prelude::*;

use super::convert::Accum;

/// Fills `products` with those of a row and others of its length, and returns |row|². Five others are multiplied in one
/// pass.
#[inline(always)]
pub fn dots<S: Simd, A: Accum>(simd: S, row: &[A], others: &[A], products: &mut [A]) -> A {
    let d = row.len();
    let (five, rest) = products.as_chunks_mut::<5>();
    let (of_five, of_rest) = others.split_at(5 * five.len() * d);
    let mut square = A::default();
    for (products, others) in five.iter_mut().zip(of_five.chunks_exact(5 * d)) {
        (square, *products) = square_and_dots(simd, row, others);
    }
    match rest {
        [a, b, c, e] => (square, [*a, *b, *c, *e]) = square_and_dots(simd, row, of_rest),
        [a, b, c] => (square, [*a, *b, *c]) = square_and_dots(simd, row, of_rest),
        [a, b] => (square, [*a, *b]) = square_and_dots(simd, row, of_rest),
        [a] => (square, [*a]) = square_and_dots(simd, row, of_rest),
        _ if five.is_empty() => (square, []) = square_and_dots(simd, row, of_rest),
        _ => {}
    }
    square
}

/// Returns |row|² and the products with N others.
#[inline(always)]
fn square_and_dots<S: Simd, A: Accum, const N: usize>(simd: S, row: &[A], others: &[A]) -> (A, [A; N]) {
    let d = row.len();
    let zero = A::Vector::<S>::splat(simd, A::default());
    let (mut squares, mut sums) = (zero, [zero; N]);
    let (chunks, tail) = A::chunks(row);
    let mut rows = [&[][..]; N];
    for n in 0..N {
        rows[n] = &A::chunks(&others[n * d..][..d]).0[..chunks.len()];
    }
    for (at, chunk) in chunks.iter().enumerate() {
        let row = A::Vector::<S>::load_array_ref(simd, chunk);
        squares = row.mul_add(row, squares);
        for n in 0..N {
            sums[n] = row.mul_add(A::Vector::load_array_ref(simd, &rows[n][at]), sums[n]);
        }
    }
    let done = d - tail.len();
    if !tail.is_empty() {
        let row = padded(simd, tail);
        squares = row.mul_add(row, squares);
        for n in 0..N {
            sums[n] = row.mul_add(padded(simd, &others[n * d + done..(n + 1) * d]), sums[n]);
        }
    }
    let mut products = [A::default(); N];
    for n in 0..N {
        products[n] = sums[n].reduce_sum();
    }
    (squares.reduce_sum(), products)
}

/// Replaces each number of `to` by what `new` makes of it and of those of `from`, a vector at a time.
#[inline(always)]
pub fn update<S: Simd, A: Accum, const N: usize>(
    simd: S,
    to: &mut [A],
    from: [&[A]; N],
    new: impl Fn(A::Vector<S>, [A::Vector<S>; N]) -> A::Vector<S>,
) {
    let len = to.len();
    let (chunks, tail) = A::chunks_mut(to);
    let mut rows = [&[][..]; N];
    for n in 0..N {
        rows[n] = &A::chunks(&from[n][..len]).0[..chunks.len()];
    }
    let mut others = [A::Vector::<S>::splat(simd, A::default()); N];
    for (at, to) in chunks.iter_mut().enumerate() {
        for n in 0..N {
            others[n] = A::Vector::load_array_ref(simd, &rows[n][at]);
        }
        new(A::Vector::load_array_ref(simd, to), others).store_array(to);
    }
    if tail.is_empty() {
        return;
    }
    let start = len - tail.len();
    for n in 0..N {
        others[n] = padded(simd, &from[n][start..len]);
    }
    let last = new(padded(simd, tail), others);
    tail.copy_from_slice(&last.as_slice()[..tail.len()]);
}

/// Loads fewer numbers than a vector has lanes, and zeros.
#[inline(always)]
fn padded<S: Simd, A: Accum>(simd: S, part: &[A]) -> A::Vector<S> {
    let mut chunk = A::ZEROS;
    chunk.as_mut()[..part.len()].copy_from_slice(part);
    A::Vector::load_array_ref(simd, &chunk)
}

/// to = start + Σⱼ scaleⱼ · rowⱼ, up to five rows a pass; returns toᵀother. The start is the product of two rows, or `to`.
#[inline(always)]
pub fn add_rows<S: Simd, A: Accum>(
    simd: S,
    to: &mut [A],
    mut start: Option<[&[A]; 2]>,
    [scales, rows]: [&[A]; 2],
    other: &[A],
) -> A {
    let d = to.len();
    let (five, rest) = scales.as_chunks::<5>();
    let (of_five, of_rest) = rows.split_at(5 * five.len() * d);
    let mut product = A::default();
    for (scales, rows) in five.iter().zip(of_five.chunks_exact(5 * d)) {
        product = add_some_rows(simd, to, start.take(), *scales, rows, other);
    }
    match *rest {
        [a] => add_some_rows(simd, to, start, [a], of_rest, other),
        [a, b] => add_some_rows(simd, to, start, [a, b], of_rest, other),
        [a, b, c] => add_some_rows(simd, to, start, [a, b, c], of_rest, other),
        [a, b, c, e] => add_some_rows(simd, to, start, [a, b, c, e], of_rest, other),
        _ if five.is_empty() => add_some_rows(simd, to, start, [], of_rest, other),
        _ => product,
    }
}

#[inline(always)]
fn add_some_rows<S: Simd, A: Accum, const N: usize>(
    simd: S,
    to: &mut [A],
    start: Option<[&[A]; 2]>,
    scales: [A; N],
    rows: &[A],
    other: &[A],
) -> A {
    let d = to.len();
    let mut product = A::Vector::<S>::splat(simd, A::default());
    let mut splat = [product; N];
    let (chunks, tail) = A::chunks_mut(to);
    let done = d - tail.len();
    let mut of_rows = [&[][..]; N];
    for n in 0..N {
        splat[n] = A::Vector::<S>::splat(simd, scales[n]);
        of_rows[n] = &A::chunks(&rows[n * d..][..d]).0[..chunks.len()];
    }
    let [a, b] = start.unwrap_or([other; 2]);
    let [of_a, of_b, of_other] = [a, b, other].map(|row| &A::chunks(&row[..d]).0[..chunks.len()]);
    for (at, to) in chunks.iter_mut().enumerate() {
        let mut sum = match start {
            Some(_) => {
                A::Vector::<S>::load_array_ref(simd, &of_a[at]) * A::Vector::load_array_ref(simd, &of_b[at])
            }
            None => A::Vector::load_array_ref(simd, to),
        };
        for n in 0..N {
            sum = splat[n].mul_add(A::Vector::load_array_ref(simd, &of_rows[n][at]), sum);
        }
        product = sum.mul_add(A::Vector::load_array_ref(simd, &of_other[at]), product);
        sum.store_array(to);
    }
    if !tail.is_empty() {
        let mut sum = match start {
            Some(_) => padded::<S, A>(simd, &a[done..d]) * padded(simd, &b[done..d]),
            None => padded(simd, tail),
        };
        for n in 0..N {
            sum = splat[n].mul_add(padded(simd, &rows[n * d + done..(n + 1) * d]), sum);
        }
        product = sum.mul_add(padded(simd, &other[done..d]), product);
        tail.copy_from_slice(&sum.as_slice()[..tail.len()]);
    }
    product.reduce_sum()
}

/// rowⱼ += scaleⱼ · from, up to five rows a pass.
#[inline(always)]
pub fn add_to_rows<S: Simd, A: Accum>(simd: S, rows: &mut [A], scales: &[A], from: &[A]) {
    let d = from.len();
    let (five, rest) = scales.as_chunks::<5>();
    let (of_five, of_rest) = rows.split_at_mut(5 * five.len() * d);
    for (scales, rows) in five.iter().zip(of_five.chunks_exact_mut(5 * d)) {
        add_to_some_rows(simd, rows, *scales, from);
    }
    match *rest {
        [a] => add_to_some_rows(simd, of_rest, [a], from),
        [a, b] => add_to_some_rows(simd, of_rest, [a, b], from),
        [a, b, c] => add_to_some_rows(simd, of_rest, [a, b, c], from),
        [a, b, c, e] => add_to_some_rows(simd, of_rest, [a, b, c, e], from),
        _ => {}
    }
}

#[inline(always)]
fn add_to_some_rows<S: Simd, A: Accum, const N: usize>(simd: S, rows: &mut [A], scales: [A; N], from: &[A]) {
    let d = from.len();
    let mut splat = [A::Vector::<S>::splat(simd, A::default()); N];
    for n in 0..N {
        splat[n] = A::Vector::<S>::splat(simd, scales[n]);
    }
    let (chunks, tail) = A::chunks(from);
    let mut rows = rows.chunks_exact_mut(d);
    let to: [(&mut [A::Chunk], &mut [A]); N] =
        std::array::from_fn(|_| A::chunks_mut(rows.next().expect("a row for each scale")));
    assert!(to.iter().all(|(to, _)| to.len() == chunks.len()));
    for (at, chunk) in chunks.iter().enumerate() {
        let from = A::Vector::<S>::load_array_ref(simd, chunk);
        for n in 0..N {
            let to = &mut to[n].0[at];
            splat[n].mul_add(from, A::Vector::load_array_ref(simd, to)).store_array(to);
        }
    }
    for n in 0..N {
        to[n].1.iter_mut().zip(tail).for_each(|(to, from)| *to += scales[n] * *from);
    }
}

/// to += scale · from
#[inline(always)]
pub fn add_scaled<A: Accum>(to: &mut [A], scale: A, from: &[A]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += scale * *from);
}

/// to += a ⊙ b
#[inline(always)]
pub fn add_product<A: Accum>(to: &mut [A], a: &[A], b: &[A]) {
    to.iter_mut().zip(a).zip(b).for_each(|((to, a), b)| *to += *a * *b);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::dispatch::{WithSimd, dispatch_all};
    use crate::cpu::simd::interleaved::Interleaved;

    /// a row of d, and others
    struct Rows<'a>(&'a [f64], &'a [f64]);

    impl WithSimd for Rows<'_> {
        type Output = ();
        fn run<S: Interleaved>(self, simd: S) {
            let Rows(row, others) = self;
            let d = row.len();
            let mut products = vec![0.0; others.len() / d];
            let square = dots(simd, row, others, &mut products);
            assert!((square - row.iter().map(|a| a * a).sum::<f64>()).abs() < 1e-12);
            for (product, other) in products.iter().zip(others.chunks_exact(d)) {
                let expected: f64 = row.iter().zip(other).map(|(a, b)| a * b).sum();
                assert!((product - expected).abs() < 1e-12);
            }
            for start in [None, Some([row, &others[..d]])] {
                let mut sum = row.to_vec();
                let along = add_rows(simd, &mut sum, start, [&products, others], row);
                for i in 0..d {
                    let start = start.map_or(row[i], |[a, b]| a[i] * b[i]);
                    let added: f64 =
                        products.iter().enumerate().map(|(j, scale)| scale * others[j * d + i]).sum();
                    assert!((sum[i] - start - added).abs() < 1e-12, "{d} {i}");
                }
                let expected: f64 = sum.iter().zip(row).map(|(a, b)| a * b).sum();
                assert!((along - expected).abs() < 1e-12 * d as f64, "{d}");
            }
            let mut rows = others.to_vec();
            add_to_rows(simd, &mut rows, &products, row);
            for (at, to) in rows.iter().enumerate() {
                assert!((to - others[at] - products[at / d] * row[at % d]).abs() < 1e-12, "{d} {at}");
            }
        }
    }

    #[test]
    fn dots_and_sums_agree_with_their_definitions() {
        for d in [1, 7, 16, 31, 32, 63, 100] {
            for m in [1, 2, 3, 4, 5, 8, 12] {
                let row: Vec<f64> = (0..d).map(|i| (i as f64).sin()).collect();
                let others: Vec<f64> = (0..d * m).map(|i| (i as f64 * 0.7).cos()).collect();
                dispatch_all(|| Rows(&row, &others));
            }
        }
    }
}
