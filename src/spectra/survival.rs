//! How much of the embedding, and of each write, survives the later rewrites.
//!
//! With k̂ and β fixed, the state after n rewrites is a sum over sources: source 0 is A_n…A_1 X_0, source l is
//! A_n…A_{l+1} β_l k̂_l v_lᵀ. A write has rank one, so that one vector and v_l hold what survives of it.

use super::product::load_rewrites;
use super::rows::{dot, dot_within};
use super::tokens::{for_each_token, sum_of_tokens};
use super::view::View;
use crate::cpu::simd::dispatch::{WithSimd, dispatch};
use crate::cpu::simd::interleaved::Interleaved;
use crate::cpu::simd::row::add_scaled;
use crate::error::Result;

/// The rewrites of all tokens and the states that they start from.
pub struct Rewrites<'a> {
    /// k̂ (N, L, d)
    pub directions: View<'a>,
    /// β (N, L, 1)
    pub gates: View<'a>,
    /// v (N, L, m)
    pub values: View<'a>,
    /// X_0 (N, d, m)
    pub embedding: View<'a>,
}

impl Rewrites<'_> {
    fn sizes(&self) -> Result<Sizes> {
        let ([tokens, rewrites, d], [_, _, m]) = (self.directions.shape(), self.embedding.shape());
        self.gates.require_shape([tokens, rewrites, 1])?;
        self.values.require_shape([tokens, rewrites, m])?;
        self.embedding.require_shape([tokens, d, m])?;
        Ok(Sizes { tokens, rewrites, d, m })
    }
}

#[derive(Clone, Copy)]
struct Sizes {
    tokens: usize,
    rewrites: usize,
    d: usize,
    m: usize,
}

/// Writes L + 2 rows of L + 1 numbers, one for each source, for every token: row n ≤ L has the Frobenius norms of what
/// survives after n rewrites (0 before a source is written), and row L + 1 has each source's share of the last state,
/// ⟨what survives of it, X_L⟩/|X_L|² (0 if X_L is zero).
pub fn write_survival(rewrites: &Rewrites, threads: usize, output: &mut [f64]) -> Result<()> {
    let sizes = rewrites.sizes()?;
    let work = |token: &mut Token, at: usize, rows: &mut [f64]| token.measure(rewrites, at, rows);
    for_each_token(sizes.tokens, threads, output, || Token::new(sizes), work)
}

/// Writes the means of these rows over all tokens, of which there has to be one.
pub fn mean_write_survival(rewrites: &Rewrites, threads: usize, output: &mut [f64]) -> Result<()> {
    let sizes = rewrites.sizes()?;
    let work = |token: &mut Token, at: usize, rows: &mut [f64]| token.measure(rewrites, at, rows);
    sum_of_tokens(sizes.tokens, threads, output, || Token::new(sizes), work)?;
    output.iter_mut().for_each(|sum| *sum /= sizes.tokens as f64);
    Ok(())
}

/// One token in float64.
struct Token {
    sizes: Sizes,
    directions: Vec<f64>,
    gates: Vec<f64>,
    values: Vec<f64>,
    /// what survives of the embedding, one value channel after another
    embedding: Vec<f64>,
    /// what survives of the writes, (L, d); times v_lᵀ
    writes: Vec<f64>,
    /// X_L, one value channel after another
    last: Vec<f64>,
}

impl Token {
    fn new(sizes: Sizes) -> Token {
        let Sizes { rewrites, d, m, .. } = sizes;
        Token {
            sizes,
            directions: vec![0.0; rewrites * d],
            gates: vec![0.0; rewrites],
            values: vec![0.0; rewrites * m],
            embedding: vec![0.0; d * m],
            writes: vec![0.0; rewrites * d],
            last: vec![0.0; d * m],
        }
    }

    /// Writes the rows of one token.
    fn measure(&mut self, from: &Rewrites, token: usize, rows: &mut [f64]) -> Result<()> {
        load_rewrites(&from.directions, &from.gates, token, &mut self.directions, &mut self.gates)?;
        from.values.load_rows(token, &mut self.values)?;
        from.embedding.load_columns(token, &mut self.embedding)?;
        let (norms, shares) = rows.split_at_mut((self.sizes.rewrites + 1) * (self.sizes.rewrites + 1));
        norms.fill(0.0);
        self.survive_embedding(norms);
        self.survive_writes(norms);
        self.add_up();
        self.divide(shares);
        Ok(())
    }

    /// Column 0 of the norms.
    fn survive_embedding(&mut self, norms: &mut [f64]) {
        let Sizes { rewrites, d, m, .. } = self.sizes;
        for j in 0..m {
            let column = &mut self.embedding[j * d..][..d];
            norms[0] += dot(column, column);
            let rows = norms[rewrites + 1..].chunks_exact_mut(rewrites + 1);
            let squares = rows.map(|row| &mut row[0]);
            rewrite(column, &self.directions, &self.gates, squares, |sum, square| *sum += square);
        }
        norms.iter_mut().step_by(rewrites + 1).for_each(|square| *square = square.sqrt());
    }

    /// The other columns of the norms.
    fn survive_writes(&mut self, norms: &mut [f64]) {
        let Sizes { rewrites, d, m, .. } = self.sizes;
        for at in 0..rewrites {
            let write = &mut self.writes[at * d..][..d];
            let direction = &self.directions[at * d..][..d];
            write.iter_mut().zip(direction).for_each(|(to, from)| *to = self.gates[at] * from);
            let value = &self.values[at * m..][..m];
            let norm = dot(value, value).sqrt();
            let mut rows = norms[(at + 1) * (rewrites + 1)..].chunks_exact_mut(rewrites + 1);
            if let Some(row) = rows.next() {
                row[at + 1] = norm * dot(write, write).sqrt();
            }
            let later = (&self.directions[(at + 1) * d..], &self.gates[at + 1..]);
            let norms = rows.map(|row| &mut row[at + 1]);
            rewrite(write, later.0, later.1, norms, |to, square| *to = norm * square.sqrt());
        }
    }

    /// X_L, the sum of all sources.
    fn add_up(&mut self) {
        let Sizes { d, m, .. } = self.sizes;
        self.last.copy_from_slice(&self.embedding);
        for (write, value) in self.writes.chunks_exact(d).zip(self.values.chunks_exact(m)) {
            for (channel, scale) in self.last.chunks_exact_mut(d).zip(value) {
                add_scaled(channel, *scale, write);
            }
        }
    }

    /// ⟨source, X_L⟩/|X_L|²
    fn divide(&self, shares: &mut [f64]) {
        let Sizes { d, m, .. } = self.sizes;
        let square = dot(&self.last, &self.last);
        if square == 0.0 {
            return shares.fill(0.0);
        }
        shares[0] = dot(&self.embedding, &self.last) / square;
        let writes = self.writes.chunks_exact(d).zip(self.values.chunks_exact(m));
        for (share, (write, value)) in shares[1..].iter_mut().zip(writes) {
            let channels = self.last.chunks_exact(d).zip(value);
            *share = channels.map(|(channel, scale)| scale * dot(write, channel)).sum::<f64>() / square;
        }
    }
}

/// Applies the rewrites without their values, x ← x − β k̂ (k̂·x), and gives |x|² after each one to `record`, with the
/// place for it.
fn rewrite<'a>(
    vector: &mut [f64],
    directions: &[f64],
    gates: &[f64],
    places: impl Iterator<Item = &'a mut f64>,
    record: impl Fn(&mut f64, f64),
) {
    let rewrites = directions.chunks_exact(vector.len().max(1)).zip(gates);
    for ((direction, gate), place) in rewrites.zip(places) {
        record(place, dispatch(Rewrite { vector, direction, gate: *gate }));
    }
}

struct Rewrite<'a> {
    vector: &'a mut [f64],
    direction: &'a [f64],
    gate: f64,
}

impl WithSimd for Rewrite<'_> {
    type Output = f64;
    #[inline(always)]
    fn run<S: Interleaved>(self, simd: S) -> f64 {
        let readout = dot_within(simd, self.direction, self.vector);
        add_scaled(self.vector, -self.gate * readout, self.direction);
        dot_within(simd, self.vector, self.vector)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overwritten_embedding_is_gone_and_a_reflected_one_stays() {
        // k̂ = e₀ twice, then e₁: β = 1 overwrites, β = 2 reflects.
        let directions = View::of_slice("directions", [1, 3, 2], &[1.0, 0.0, 1.0, 0.0, 0.0, 1.0]).unwrap();
        let gates = View::of_slice("gates", [1, 3, 1], &[1.0, 2.0, 1.0]).unwrap();
        let values = View::of_slice("values", [1, 3, 1], &[5.0, 0.5, 0.0]).unwrap();
        let embedding = View::of_slice("embedding", [1, 2, 1], &[3.0, 4.0]).unwrap();
        let mut rows = [f64::NAN; 20];
        let rewrites = Rewrites { directions, gates, values, embedding };
        write_survival(&rewrites, 1, &mut rows).unwrap();
        let norms = [5.0, 0.0, 0.0, 0.0, 4.0, 5.0, 0.0, 0.0, 4.0, 5.0, 1.0, 0.0, 0.0, 5.0, 1.0, 0.0];
        assert_eq!(rows[..16], norms);
        assert_eq!(rows[16..], [0.0, 20.0 / 16.0, -4.0 / 16.0, 0.0]); // X_L = (−5 + 1, 0)
        let mut mean = [f64::NAN; 20];
        mean_write_survival(&rewrites, 1, &mut mean).unwrap();
        assert_eq!(mean, rows);
    }
}
