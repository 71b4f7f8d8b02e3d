//! The operators on plain slices: forward against the equations, gradients against differences of the forward.

use ddl::slices::{Array, Erase, Expand, Incoming, Link, Read, RewriteRead, Write};
use half::bf16;

const D: usize = 5;
const M: usize = 3;
const N: usize = 2; // rewrites
const TAPS: usize = 3;
const TIME: usize = 4;
const EPS_K: f64 = 1e-2;
const NORM_EPS: f64 = 1e-3;

/// Reproducible numbers between −1 and 1.
fn numbers(seed: u64, count: usize) -> Vec<f64> {
    let mut bits = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        bits ^= bits << 13;
        bits ^= bits >> 7;
        bits ^= bits << 17;
        (bits >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// The tensors of a call, by name, with their shapes.
#[derive(Clone)]
struct Tensors {
    all: Vec<(&'static str, Vec<usize>, Vec<f64>)>,
    erase: Erase,
}

const ERASES: [Erase; 2] = [Erase::Tied, Erase::None];

impl Tensors {
    fn new() -> Tensors {
        Tensors::erasing(Erase::Tied, TIME)
    }

    fn erasing(erase: Erase, time: usize) -> Tensors {
        let shapes: [(&str, &[usize]); 10] = [
            ("state", &[2, time, D, M]),
            ("direction", &[2, time, N, D]),
            ("value", &[2, time, N, M]),
            ("gate", &[2, time, N]),
            ("compress", &[D, M, TAPS]),
            ("norm_weight", &[D]),
            ("gate_weight", &[N, D]),
            ("gate_bias", &[N]),
            ("value_weight", &[N, M, D]),
            ("value_bias", &[N, M]),
        ];
        let tensor = |(seed, (name, shape)): (usize, (&'static str, &[usize]))| {
            (name, shape.to_vec(), numbers(seed as u64 + 1, shape.iter().product()))
        };
        Tensors { all: shapes.into_iter().enumerate().map(tensor).collect(), erase }
    }

    fn array(&self, name: &str) -> Array<'_, f64> {
        let (_, shape, elements) = self.all.iter().find(|(known, ..)| *known == name).unwrap();
        Array::new(elements, shape)
    }

    fn both(&self) -> RewriteRead<'_, f64> {
        let write = Write {
            direction: self.array("direction"),
            value: self.array("value"),
            gate: self.array("gate"),
            eps_k: EPS_K,
            erase: self.erase,
        };
        let read = Read {
            compress: Some(self.array("compress")),
            norm_weight: Some(self.array("norm_weight")),
            norm_eps: Some(NORM_EPS),
            gate_weight: Some(self.array("gate_weight")),
            gate_bias: Some(self.array("gate_bias")),
            value_weight: Some(self.array("value_weight")),
            value_bias: Some(self.array("value_bias")),
            value_scale: Some(3.0),
            value_from_compressed: false,
        };
        RewriteRead { rewrite: Some(write), read: Some(read), ..RewriteRead::new(self.array("state")) }
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[track_caller]
fn assert_close(name: &str, got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{name}");
    assert!(!got.is_empty(), "{name}: there is nothing to compare");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!((got - expected).abs() <= tolerance, "{name}[{i}]: {got} for {expected}");
    }
}

/// The equations, token by token.
fn reference(tensors: &Tensors) -> [Vec<f64>; 4] {
    let of = |name| tensors.array(name).elements;
    let mut states = of("state").to_vec();
    for (token, x) in states.chunks_mut(D * M).enumerate() {
        for j in 0..N {
            let k = &of("direction")[(token * N + j) * D..][..D];
            let v = &of("value")[(token * N + j) * M..][..M];
            let beta = of("gate")[token * N + j];
            let alpha = if tensors.erase == Erase::Tied { beta } else { 0.0 };
            let norm = (dot(k, k) + EPS_K * EPS_K).sqrt();
            for channel in 0..M {
                let readout: f64 = (0..D).map(|i| k[i] / norm * x[i * M + channel]).sum();
                (0..D)
                    .for_each(|i| x[i * M + channel] += k[i] / norm * (beta * v[channel] - alpha * readout));
            }
        }
    }
    let (mut contexts, mut values, mut gates) = (Vec::new(), Vec::new(), Vec::new());
    let sigmoid = |z: f64| 1.0 / (1.0 + (-z).exp());
    for token in 0..2 * TIME {
        let past = |i: usize| {
            let taps = 0..TAPS.min(token % TIME + 1);
            taps.flat_map(move |s| (0..M).map(move |channel| (s, channel)))
                .map(|(s, channel)| {
                    of("compress")[(i * M + channel) * TAPS + s] * states[((token - s) * D + i) * M + channel]
                })
                .sum::<f64>()
        };
        let x: Vec<f64> = (0..D).map(past).collect();
        let rstd = 1.0 / (dot(&x, &x) / D as f64 + NORM_EPS).sqrt();
        let h: Vec<f64> = x.iter().zip(of("norm_weight")).map(|(x, weight)| x * rstd * weight).collect();
        for j in 0..N {
            for channel in 0..M {
                let row = &of("value_weight")[(j * M + channel) * D..][..D];
                values.push(3.0 * sigmoid(dot(row, &h) + of("value_bias")[j * M + channel]));
            }
        }
        for (row, bias) in of("gate_weight").chunks(D).zip(of("gate_bias")) {
            gates.push(2.0 * sigmoid(dot(row, &h) + bias));
        }
        contexts.extend(h);
    }
    [states, contexts, values, gates]
}

#[test]
fn a_forward_is_the_equations() {
    for tensors in ERASES.map(|erase| Tensors::erasing(erase, TIME)) {
        let forward = tensors.both().forward().unwrap();
        let [state, context, value, gate] = reference(&tensors);
        assert_close("new_state", &forward.new_state, &state, 1e-12);
        assert_close("context", &forward.context, &context, 1e-12);
        assert_close("new_value", &forward.new_value, &value, 1e-12);
        assert_close("new_gate", &forward.new_gate, &gate, 1e-12);
    }
}

#[test]
fn gradients_are_differences_of_the_forward() {
    for erase in ERASES {
        check_gradients(&Tensors::erasing(erase, TIME));
    }
}

fn check_gradients(tensors: &Tensors) {
    let forward = tensors.both().forward().unwrap();
    let lengths = [&forward.new_state, &forward.context, &forward.new_value, &forward.new_gate].map(Vec::len);
    let weights: Vec<Vec<f64>> = (0..).zip(lengths).map(|(i, len)| numbers(50 + i, len)).collect();
    let loss = |tensors: &Tensors| {
        let forward = tensors.both().forward().unwrap();
        let outputs = [&forward.new_state, &forward.context, &forward.new_value, &forward.new_gate];
        outputs.iter().zip(&weights).map(|(output, weights)| dot(output, weights)).sum::<f64>()
    };
    let incoming = Incoming {
        grad_new_state: Some(&weights[0]),
        grad_context: Some(&weights[1]),
        grad_new_value: Some(&weights[2]),
        grad_new_gate: Some(&weights[3]),
    };
    let gradients = tensors.both().vjp(&forward, &incoming).unwrap();
    let got = [
        &gradients.state,
        &gradients.direction,
        &gradients.value,
        &gradients.gate,
        &gradients.compress,
        &gradients.norm_weight,
        &gradients.gate_weight,
        &gradients.gate_bias,
        &gradients.value_weight,
        &gradients.value_bias,
    ];
    for (index, got) in got.into_iter().enumerate() {
        let name = tensors.all[index].0;
        let slope = |element: usize| {
            let at = |step: f64| {
                let mut moved = tensors.clone();
                moved.all[index].2[element] += step;
                loss(&moved)
            };
            (at(1e-5) - at(-1e-5)) / 2e-5
        };
        let expected: Vec<f64> = (0..tensors.all[index].2.len()).map(slope).collect();
        assert_close(name, got, &expected, 1e-7);
    }
}

#[test]
fn the_number_of_threads_changes_nothing() {
    let tensors = Tensors::erasing(Erase::Tied, 600); // long enough for several parts (src/cpu/partition.rs)
    let run = |threads| {
        let call = RewriteRead { threads, ..tensors.both() };
        let forward = call.forward().unwrap();
        let grad = numbers(9, forward.context.len());
        let gradients =
            call.vjp(&forward, &Incoming { grad_context: Some(&grad), ..Incoming::default() }).unwrap();
        (forward.new_state, gradients.compress)
    };
    assert_eq!(run(1), run(4));
}

#[test]
fn a_bfloat16_state_follows_the_equations() {
    let wide = Tensors::new();
    let narrow =
        |name: &str| -> Vec<bf16> { wide.array(name).elements.iter().map(|&x| bf16::from_f64(x)).collect() };
    let small = |name: &str| -> Vec<f32> { wide.array(name).elements.iter().map(|&x| x as f32).collect() };
    let (state, direction, value, gate) =
        (narrow("state"), narrow("direction"), small("value"), small("gate"));
    let shape = |name: &str| wide.array(name).shape;
    let write = Write {
        direction: Array::new(&direction, shape("direction")),
        value: Array::new(&value, shape("value")),
        gate: Array::new(&gate, shape("gate")),
        eps_k: EPS_K,
        erase: Erase::Tied,
    };
    let call = RewriteRead { rewrite: Some(write), ..RewriteRead::new(Array::new(&state, shape("state"))) };
    let got: Vec<f64> = call.forward().unwrap().new_state.iter().map(|x| x.to_f64()).collect();
    assert_close("new_state", &got, &reference(&wide)[0], 0.03);
}

#[test]
fn a_chain_from_an_anchor_stands_for_the_state() {
    let tensors = Tensors::new();
    let anchor = tensors.both();
    let alone = RewriteRead { read: None, ..anchor };
    let first = alone.forward().unwrap();
    let state = Array::new(&first.new_state, anchor.state.shape);
    let call = RewriteRead { state, ..anchor };
    let forward = call.forward().unwrap();
    let grad = numbers(9, forward.context.len());
    let incoming = Incoming { grad_context: Some(&grad), ..Incoming::default() };

    let shape = [2, TIME, first.stats.len() / (2 * TIME)];
    let chain = [Link { write: anchor.rewrite.unwrap(), stats: Array::new(&first.stats, &shape) }];
    let got = anchor.vjp_from_anchor(&chain, &forward, &incoming).unwrap();
    let expected = call.vjp(&forward, &incoming).unwrap();
    assert_close("state", &got.state, &expected.state, 1e-12);
    assert_close("direction", &got.direction, &expected.direction, 1e-12);

    let short = [Link { stats: Array::new(&first.stats[..9], &[1, 1, 9]), ..chain[0] }];
    let refused = anchor.vjp_from_anchor(&short, &forward, &incoming).unwrap_err().to_string();
    assert_eq!(refused, "`chain` must have shape (2, 4, 9), got (1, 1, 9)");

    let reading = RewriteRead { rewrite: None, ..anchor };
    let refused = reading.vjp_from_anchor(&chain, &reading.forward().unwrap(), &incoming).unwrap_err();
    assert_eq!(refused.to_string(), "`chain` must come with a rewrite, got none");
}

#[test]
fn steps_with_a_cache_give_the_whole_sequence() {
    let (x, weight) = (numbers(1, TIME * D), numbers(2, D * M * TAPS));
    let compress = numbers(3, D * M * TAPS);
    let (weight, compress) = (Array::new(&weight, &[D, M, TAPS]), Array::new(&compress, &[D, M, TAPS]));
    let read = Read { compress: Some(compress), norm_eps: Some(NORM_EPS), ..Read::default() };
    let x_shape = [1, TIME, D];
    let expand = Expand { weight: Some(weight), ..Expand::new(Array::new(&x, &x_shape), M) };
    let whole = expand.forward().unwrap();
    let state = Array::new(&whole, &[1, TIME, D, M]);
    let contexts = RewriteRead { read: Some(read), ..RewriteRead::new(state) }.forward().unwrap();

    let shape = [1, TAPS - 1, D];
    let (mut before, mut pending) = (None, None);
    let (mut states, mut steps) = (Vec::new(), Vec::new());
    for token in x.chunks(D) {
        let one = Expand { weight: Some(weight), ..Expand::new(Array::new(token, &[1, 1, D]), M) };
        let expanded = one.cached_step(before.as_deref().map(|b: &[f64]| Array::new(b, &shape))).unwrap();
        let state = Array::new(&expanded.state, &[1, 1, D, M]);
        let call = RewriteRead { read: Some(read), ..RewriteRead::new(state) };
        let step = call.cached_step(pending.as_deref().map(|p: &[f64]| Array::new(p, &shape))).unwrap();
        states.extend_from_slice(&expanded.state);
        steps.extend_from_slice(&step.context);
        (before, pending) = (Some(expanded.new_before), Some(step.new_pending));
    }
    assert_close("state", &states, &whole, 1e-12);
    assert_close("context", &steps, &contexts.context, 1e-12);
}

#[test]
fn an_expansion_has_gradients() {
    let (x, weight) = (numbers(1, TIME * D), numbers(2, D * M * TAPS));
    let grad = numbers(3, TIME * D * M);
    let loss = |x: &[f64], weight: &[f64]| {
        let call = Expand {
            weight: Some(Array::new(weight, &[D, M, TAPS])),
            ..Expand::new(Array::new(x, &[1, TIME, D]), M)
        };
        (dot(&call.forward().unwrap(), &grad), call.vjp(&grad).unwrap())
    };
    let slope = |of_x: bool, element: usize| {
        let at = |step: f64| {
            let (mut x, mut weight) = (x.clone(), weight.clone());
            let moved = if of_x { &mut x } else { &mut weight };
            moved[element] += step;
            loss(&x, &weight).0
        };
        (at(1e-5) - at(-1e-5)) / 2e-5
    };
    let gradients = loss(&x, &weight).1;
    let expected: Vec<f64> = (0..x.len()).map(|element| slope(true, element)).collect();
    assert_close("x", &gradients.x, &expected, 1e-8);
    let expected: Vec<f64> = (0..weight.len()).map(|element| slope(false, element)).collect();
    assert_close("weight", &gradients.weight, &expected, 1e-8);
}

#[test]
fn bad_input_gets_a_sentence() {
    let tensors = Tensors::new();
    let sentence = |call: RewriteRead<'_, f64>| call.forward().unwrap_err().to_string();
    let nothing = RewriteRead::new(tensors.array("state"));
    assert_eq!(sentence(nothing), "`rewrite` or `read` must be given, got neither");

    let state = Array::new(&tensors.array("state").elements[1..], &[2, TIME, D, M]);
    let expected = "`state` must have as many elements as its shape (2, 4, 5, 3) says, got 119";
    assert_eq!(sentence(RewriteRead { state, ..tensors.both() }), expected);

    let huge = Array::new(&[], &[usize::MAX, 2, D, M]);
    assert!(sentence(RewriteRead { state: huge, ..tensors.both() }).starts_with("`state` must have as many"));

    let mut write = tensors.both().rewrite.unwrap();
    write.gate = Array::new(&write.gate.elements[..1], &[1]);
    let expected = "`gate` must have shape (2, 4, 2), got (1,)";
    assert_eq!(sentence(RewriteRead { rewrite: Some(write), ..tensors.both() }), expected);

    let step = tensors.both().cached_step(None).unwrap();
    let refused = tensors.both().vjp(&step, &Incoming::default()).unwrap_err().to_string();
    assert!(
        refused.starts_with("`stats` must have as many elements as its shape (2, 4, 9) says, got 0"),
        "{refused}"
    );

    let alone = RewriteRead { read: None, ..tensors.both() };
    let grad = [0.0; 2 * TIME * D];
    let incoming = Incoming { grad_context: Some(&grad), ..Incoming::default() };
    let refused = alone.vjp(&alone.forward().unwrap(), &incoming).unwrap_err().to_string();
    assert_eq!(refused, "`grad_context` must be left out of a call without `context`, got a tensor");

    for (elements, shape) in [(&[1.0; 4][..], [2, 2]), (&[], [0, 4])] {
        let refused = Expand::new(Array::new(elements, &shape), usize::MAX).forward().unwrap_err();
        assert!(refused.to_string().starts_with("`state` must have shape with fewer"), "{refused}");
    }
    let expand = Expand::new(Array::new(&[1.0, 2.0], &[1, 2]), 0);
    let refused = expand.forward().unwrap_err().to_string();
    assert_eq!(refused, "`value_channels` must be an integer of at least 1, got 0");
}
