//! The operators on the CPU: per-token rows that stay in cache, a fixed partition of the tokens,
//! the widest vectors of the machine.

pub mod backward;
mod backward_read;
mod backward_rewrite;
pub mod buffer;
pub mod convert;
pub mod expand;
pub mod forward;
mod lanes;
pub mod parallel;
pub mod row;
pub mod simd;
pub mod weights;

use std::ops::Range;

use crate::tensor::{RowsMut, Tensor};

/// Below this many state elements a second thread costs more than it brings.
const SERIAL: usize = 16_384;

/// Threads worth using for a state of `elements` elements.
pub fn useful_threads(elements: usize, threads: usize) -> usize {
    if elements < SERIAL { 1 } else { threads.max(1) }
}

/// An output cut at `bounds`: every call gives the next part's piece; `None` where it is not asked for.
pub fn split<'a>(
    output: &'a mut Option<Tensor>,
    width: usize,
    bounds: &[usize],
) -> impl FnMut() -> Option<RowsMut<'a>> {
    let mut pieces = output.as_mut().map(|tensor| tensor.split_rows(width, bounds).into_iter());
    move || pieces.as_mut()?.next()
}

/// `tokens` cut where sequences of `time` tokens end: (tokens of the piece, tokens of its sequence).
pub fn within_sequences(
    tokens: Range<usize>,
    time: usize,
) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let mut next = tokens.start;
    std::iter::from_fn(move || {
        (next < tokens.end).then(|| {
            let first = next / time * time;
            let piece = next..tokens.end.min(first + time);
            next = piece.end;
            (piece, first..first + time)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_end_with_their_sequences() {
        let pieces: Vec<_> = within_sequences(3..9, 4).collect();
        assert_eq!(pieces, [(3..4, 0..4), (4..8, 4..8), (8..9, 8..12)]);
        assert_eq!(within_sequences(0..0, 1).count(), 0);
    }
}
