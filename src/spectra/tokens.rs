//! Runs a computation for every token, on several threads.
//!
//! The tokens are divided into parts that do not depend on the number of threads, and sums over tokens are added in the
//! order of the parts, so that results are the same to the bit with 1 thread or 64.

use std::ops::Range;

use crate::cpu::parallel;
use crate::cpu::partition::parts_of;
use crate::error::Result;

/// Fewest tokens in a part: a token costs microseconds or more, a part some allocations.
const SMALLEST_PART: usize = 8;

/// Computes the numbers of every token. `work(scratch, token, numbers)` writes those of one token; `output` holds them
/// in the order of the tokens. `scratch` makes working memory for the tokens of a part.
pub fn for_each_token<S>(
    tokens: usize,
    threads: usize,
    output: &mut [f64],
    scratch: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize, &mut [f64]) -> Result<()> + Sync,
) -> Result<()> {
    let width = output.len().checked_div(tokens).unwrap_or(0);
    assert_eq!(output.len(), tokens * width, "the output has no whole number of elements per token");
    let mut rest = output;
    let mut parts = Vec::new();
    for part in parts_of_tokens(tokens) {
        let (numbers, others) = rest.split_at_mut(part.len() * width);
        parts.push((part, numbers));
        rest = others;
    }
    parallel::for_each(parts, threads, |(part, numbers)| {
        let mut scratch = scratch();
        for (at, token) in part.enumerate() {
            work(&mut scratch, token, &mut numbers[at * width..][..width])?;
        }
        Ok(())
    })
}

/// Sums what `work` computes over all tokens, in memory that does not depend on their number. `work` writes all numbers of
/// a token, or adds to zeros.
pub fn sum_of_tokens<S>(
    tokens: usize,
    threads: usize,
    output: &mut [f64],
    scratch: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize, &mut [f64]) -> Result<()> + Sync,
) -> Result<()> {
    let parts: Vec<Range<usize>> = parts_of_tokens(tokens).collect();
    let width = output.len();
    let mut sums = vec![0.0; parts.len() * width];
    let items = parts.into_iter().zip(sums.chunks_exact_mut(width.max(1))).collect();
    parallel::for_each(items, threads, |(part, sum): (Range<usize>, &mut [f64])| {
        let (mut scratch, mut numbers) = (scratch(), vec![0.0; width]);
        for token in part {
            numbers.fill(0.0);
            work(&mut scratch, token, &mut numbers)?;
            sum.iter_mut().zip(&numbers).for_each(|(sum, number)| *sum += number);
        }
        Ok(())
    })?;
    output.fill(0.0);
    for sum in sums.chunks_exact(width.max(1)) {
        output.iter_mut().zip(sum).for_each(|(output, sum)| *output += sum);
    }
    Ok(())
}

fn parts_of_tokens(tokens: usize) -> impl Iterator<Item = Range<usize>> {
    let bounds = parts_of(tokens, SMALLEST_PART);
    (1..bounds.len()).map(move |end| bounds[end - 1]..bounds[end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_is_computed_once_and_sums_do_not_depend_on_threads() {
        for tokens in [0, 1, 7, 63, 1000] {
            let mut sums = [[0.0; 2]; 2];
            for (threads, sum) in [1, 3].into_iter().zip(&mut sums) {
                let count = |_: &mut (), token: usize, numbers: &mut [f64]| {
                    numbers[0] += 0.1 * token as f64;
                    numbers[1] += 1.0;
                    Ok(())
                };
                let mut output = vec![0.0; 2 * tokens];
                for_each_token(tokens, threads, &mut output, || (), count).unwrap();
                assert!(output.chunks_exact(2).enumerate().all(|(n, pair)| *pair == [0.1 * n as f64, 1.0]));
                sum_of_tokens(tokens, threads, sum, || (), count).unwrap();
                assert_eq!(sum[1], tokens as f64);
            }
            assert_eq!(sums[0], sums[1]);
        }
    }
}
