//! Divides the tokens of an operator: a fixed partition into parts, and a part into documents.
//!
//! Where partial sums are added up, the partition depends on the problem alone, never on the number of threads, and they
//! are added in the order of the parts. So results are bit-identical with 1 thread or 64.

use std::ops::Range;

use crate::problem::Sizes;
use crate::tensor::{RowsMut, Tensor};

/// Most parts: enough to balance the threads of one machine, few enough to add up their sums.
const MOST_PARTS: usize = 64;

/// Fewest tokens in a part, so that its fixed cost (scratch, a lock) stays small.
const SMALLEST_PART: usize = 64;

/// Fewest tokens in a part per tap of an operator over time. A part starts K−1 tokens early, discards their
/// results, and keeps sums for the gradient of a weight of d·m·K elements. With at least 4K tokens in a part, at
/// most a quarter of the work is repeated, and all sums have at most a quarter of the state's elements (unless
/// there is only one part).
const TOKENS_PER_TAP: usize = 4;

/// Returns the bounds of the parts of `tokens` tokens, for an operator that looks back `taps` − 1 tokens.
pub fn partition(tokens: usize, taps: usize) -> Vec<usize> {
    parts_of(tokens, SMALLEST_PART.max(TOKENS_PER_TAP.saturating_mul(taps)))
}

/// Returns the bounds of the parts of `tokens` tokens, of at least `smallest` each if there are so many.
pub fn parts_of(tokens: usize, smallest: usize) -> Vec<usize> {
    let parts = (tokens / smallest).clamp(1, MOST_PARTS);
    (0..=parts).map(|part| (tokens as u128 * part as u128 / parts as u128) as usize).collect()
}

/// Fewest elements of the state in a part of a forward.
const SMALLEST_FORWARD: usize = 8_192;

/// Returns the bounds of the parts of a forward. It keeps no sums, so they may be smaller: a step of a cached batch of
/// sequences has one token of each. Neither do its results depend on them: one thread has one part.
pub fn forward_partition(sizes: Sizes, taps: usize, threads: usize) -> Vec<usize> {
    if threads == 1 {
        return vec![0, sizes.tokens()];
    }
    let over_time = if sizes.time > 1 { TOKENS_PER_TAP.saturating_mul(taps) } else { 1 };
    let elements = sizes.d.saturating_mul(sizes.m).max(1);
    parts_of(sizes.tokens(), SMALLEST_FORWARD.div_ceil(elements).max(over_time))
}

/// Below this many state elements a second thread costs more than it saves.
const SERIAL: usize = 16_384;

/// Returns the threads worth using for a state of `elements` elements.
pub fn useful_threads(elements: usize, threads: usize) -> usize {
    if elements < SERIAL { 1 } else { threads.max(1) }
}

/// Splits an output at `bounds`: each call returns the next part's rows, or `None` if there is no output.
pub fn split<'a>(
    output: &'a mut Option<Tensor>,
    width: usize,
    bounds: &[usize],
) -> impl FnMut() -> Option<RowsMut<'a>> {
    let mut pieces = output.as_mut().map(|tensor| tensor.split_rows(width, bounds).into_iter());
    move || pieces.as_mut()?.next()
}

/// The documents of all sequences: tokens that may look back at one another.
#[derive(Clone, Copy)]
pub struct Documents<'a> {
    time: usize,
    /// other than 0 where a document starts; without it every sequence is a document
    starts: Option<&'a [u8]>,
}

impl<'a> Documents<'a> {
    /// `starts` is a mask of all tokens.
    pub fn new(sizes: Sizes, starts: &'a Option<Tensor>) -> Documents<'a> {
        let starts = starts.as_ref().map(|starts| starts.rows(starts.len()).row(0));
        Documents { time: sizes.time.max(1), starts }
    }

    /// Splits `tokens` at the ends of documents; yields (tokens of the piece, of its document).
    pub fn within(self, tokens: Range<usize>) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let mut next = tokens.start;
        std::iter::from_fn(move || {
            (next < tokens.end).then(|| {
                let document = self.around(next);
                let piece = next..tokens.end.min(document.end);
                next = piece.end;
                (piece, document)
            })
        })
    }

    /// Returns the tokens of the document, within the sequence, that holds `token`.
    pub fn around(self, token: usize) -> Range<usize> {
        let first = token / self.time * self.time;
        let end = first + self.time;
        let Some(starts) = self.starts else { return first..end };
        let start = starts[first..=token].iter().rposition(|start| *start != 0);
        let next = starts[token + 1..end].iter().position(|start| *start != 0);
        start.map_or(first, |back| first + back)..next.map_or(end, |ahead| token + 1 + ahead)
    }

    /// Returns true if the document that starts at `token` may continue one of an earlier call.
    pub fn may_continue(self, token: usize) -> bool {
        token.is_multiple_of(self.time) && self.starts.is_none_or(|starts| starts[token] == 0)
    }

    /// Returns true if `end` ends a sequence.
    pub fn is_sequence_end(self, end: usize) -> bool {
        end.is_multiple_of(self.time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_all_tokens_in_order() {
        for tokens in [0, 1, 63, 64, 129, 100_000] {
            for taps in [1, 4, 17, 512, usize::MAX] {
                let ends = partition(tokens, taps);
                assert_eq!((ends[0], *ends.last().unwrap()), (0, tokens));
                assert!(ends.windows(2).all(|pair| pair[0] <= pair[1]) && ends.len() <= 1 + MOST_PARTS);
                let sums = (ends.len() - 1).saturating_mul(taps); // in states of one token
                assert!(ends.len() == 2 || sums <= tokens / TOKENS_PER_TAP);
            }
        }
        assert_eq!(partition(1000, 4).len(), 1 + 1000 / SMALLEST_PART);
        let step = |sequences, time| Sizes { sequences, time, d: 384, m: 4 };
        assert_eq!(forward_partition(step(16, 1), 4, 2), [0, 8, 16]);
        assert_eq!(forward_partition(step(1, 40), 4, 2), [0, 20, 40]);
        assert_eq!(forward_partition(step(1, 40), 4, 1), [0, 40]);
        assert_eq!(forward_partition(step(1, 1), 4, 2), [0, 1]);
        assert_eq!(forward_partition(step(0, 0), 4, 2), [0, 0]);
    }

    #[test]
    fn pieces_end_with_their_sequences() {
        let sequences = Documents { time: 4, starts: None };
        let pieces: Vec<_> = sequences.within(3..9).collect();
        assert_eq!(pieces, [(3..4, 0..4), (4..8, 4..8), (8..9, 8..12)]);
        assert_eq!(sequences.within(0..0).count(), 0);
        assert!(sequences.may_continue(8) && !sequences.may_continue(9));
    }

    #[test]
    fn pieces_end_with_their_documents() {
        let documents = Documents { time: 6, starts: Some(&[0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 255, 0]) };
        let pieces: Vec<_> = documents.within(1..11).collect();
        assert_eq!(pieces, [(1..2, 0..2), (2..5, 2..5), (5..6, 5..6), (6..10, 6..10), (10..11, 10..12)]);
        assert!(documents.may_continue(0) && !documents.may_continue(2) && !documents.may_continue(6));
        assert!(documents.is_sequence_end(6) && !documents.is_sequence_end(5));
    }
}
