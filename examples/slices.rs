//! The delta rule on plain slices, without torch or Python:
//!
//! ```text
//! cargo run --no-default-features --example slices
//! ```
//!
//! A state X of d features and m value channels is an associative memory: a rewrite with β = 1 stores a value under a
//! direction, and replaces what was stored there. Writes along orthogonal directions do not affect each other.

use ddl::slices::{Array, Erase, RewriteRead, Write};

const D: usize = 4;
const M: usize = 2;

/// Rewrites the state of one token.
fn rewrite(state: &[f64], direction: [f64; D], value: [f64; M], gate: f64) -> ddl::error::Result<Vec<f64>> {
    let write = Write {
        direction: Array::new(&direction, &[1, D]),
        value: Array::new(&value, &[1, M]),
        gate: Array::new(std::slice::from_ref(&gate), &[1]),
        eps_k: 1e-9,
        erase: Erase::Tied,
    };
    let call = RewriteRead { rewrite: Some(write), ..RewriteRead::new(Array::new(state, &[1, D, M])) };
    Ok(call.forward()?.new_state)
}

/// k̂ᵀX: what is stored under a direction.
fn readout(state: &[f64], direction: [f64; D]) -> [f64; M] {
    let norm = direction.iter().map(|k| k * k).sum::<f64>().sqrt();
    std::array::from_fn(|channel| (0..D).map(|i| direction[i] / norm * state[i * M + channel]).sum())
}

fn main() -> ddl::error::Result<()> {
    let (first, second) = ([1.0, 1.0, 0.0, 0.0], [1.0, -1.0, 0.0, 0.0]);
    let mut state = vec![0.0; D * M];
    let print = |label: &str, state: &[f64]| {
        println!("{label:<42} first {:.2?}  second {:.2?}", readout(state, first), readout(state, second));
    };
    print("empty", &state);
    state = rewrite(&state, first, [1.0, 2.0], 1.0)?;
    print("β = 1 writes (1, 2) under the first", &state);
    state = rewrite(&state, second, [5.0, 5.0], 1.0)?;
    print("β = 1 writes (5, 5) under the second", &state);
    state = rewrite(&state, first, [3.0, 3.0], 0.5)?;
    print("β = 0.5 moves the first halfway to (3, 3)", &state);
    state = rewrite(&state, second, [0.0, 0.0], 2.0)?;
    print("β = 2 with v = 0 reflects the second", &state);
    Ok(())
}
