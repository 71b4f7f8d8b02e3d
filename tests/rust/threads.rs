//! The operators from many threads at once, each of which starts threads: `make tsan` runs this under ThreadSanitizer.

use std::sync::Barrier;

use ddl::slices::{Array, Erase, Expand, Incoming, Read, RewriteRead, Write};

const TIME: usize = 400; // long enough for several parts (src/cpu/partition.rs)
const D: usize = 8;
const M: usize = 2;
const TAPS: usize = 3;
const CALLERS: usize = 8;

/// Numbers between −1 and 1.
fn numbers(seed: usize, count: usize) -> Vec<f64> {
    (0..count).map(|i| ((i * 7 + seed * 13 + 1) as f64 * 0.731).sin()).collect()
}

/// All outputs and gradients of an expansion, a rewrite and a token read.
fn step(threads: usize) -> Vec<Vec<f64>> {
    let (x, weight) = (numbers(1, TIME * D), numbers(2, D * M * TAPS));
    let weight = Some(Array::new(&weight, &[D, M, TAPS]));
    let x = Array::new(&x, &[1, TIME, D]);
    let expand = Expand { weight, threads, ..Expand::new(x, M) };
    let state = expand.forward().unwrap();

    let (value, gate) = (numbers(3, TIME * M), numbers(4, TIME));
    let write = Write {
        direction: x,
        value: Array::new(&value, &[1, TIME, M]),
        gate: Array::new(&gate, &[1, TIME]),
        eps_k: 0.1,
        erase: Erase::Tied,
    };
    let read = Read { compress: weight, norm_eps: Some(1e-3), ..Read::default() };
    let state = Array::new(&state, &[1, TIME, D, M]);
    let call = RewriteRead { rewrite: Some(write), read: Some(read), threads, ..RewriteRead::new(state) };
    let forward = call.forward().unwrap();
    let grad = numbers(5, forward.context.len());
    let incoming = Incoming { grad_context: Some(&grad), ..Incoming::default() };
    let gradients = call.vjp(&forward, &incoming).unwrap();
    let expanded = expand.vjp(&gradients.state).unwrap();
    let (state, compress) = (gradients.state, gradients.compress);
    vec![
        forward.new_state,
        forward.context,
        gradients.direction,
        state,
        compress,
        expanded.x,
        expanded.weight,
    ]
}

/// Calls `work` in many threads that start at once, and returns the results.
fn at_once<R: Send>(work: impl Fn(usize) -> R + Sync) -> Vec<R> {
    let start = Barrier::new(CALLERS);
    let (start, work) = (&start, &work);
    std::thread::scope(|scope| {
        let caller = |caller| {
            scope.spawn(move || {
                start.wait();
                work(caller)
            })
        };
        let callers: Vec<_> = (0..CALLERS).map(caller).collect();
        callers.into_iter().map(|caller| caller.join().unwrap()).collect()
    })
}

#[test]
fn first_calls_at_once_have_the_bits_of_one_alone() {
    let all = at_once(|caller| step(1 + caller % 4));
    let alone = step(1);
    assert!(alone.iter().all(|numbers| numbers.iter().any(|number| *number != 0.0)));
    assert!(all.iter().all(|results| *results == alone));
}

#[test]
fn every_thread_gets_its_own_sentence() {
    at_once(|caller| {
        let (elements, shape) = (vec![0.0; 1 + caller], [1, 2 + caller]);
        let expected = format!(
            "`x` must have as many elements as its shape (1, {}) says, got {}",
            2 + caller,
            1 + caller
        );
        for _ in 0..200 {
            let refused = Expand::new(Array::new(&elements, &shape), M).forward().unwrap_err();
            assert_eq!(refused.to_string(), expected);
        }
    });
}
