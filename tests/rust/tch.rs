//! The operators on tch's tensors against the equations in libtorch's operations and its autograd.

mod equations;

use ddl::tch::{Erase, Expand, Forward, Gradients, Incoming, Link, RewriteRead, Write};
use equations::{D, Expected, Inputs, M, TIME, delayed, random, read_reference, rewrite_reference, wide};
use tch::{Device, Kind, Tensor};

fn gradients_by_name(gradients: Gradients) -> Vec<(&'static str, Option<Tensor>)> {
    vec![
        ("state", gradients.state),
        ("direction", gradients.direction),
        ("value", gradients.value),
        ("gate", gradients.gate),
        ("compress", gradients.compress),
        ("norm_weight", gradients.norm_weight),
        ("gate_weight", gradients.gate_weight),
        ("gate_bias", gradients.gate_bias),
        ("value_weight", gradients.value_weight),
        ("value_bias", gradients.value_bias),
    ]
}

#[track_caller]
fn assert_close(name: &str, got: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(got.size(), expected.size(), "{name}");
    let (got, expected) = (wide(got), wide(expected));
    let error = (&got - &expected).abs().max().double_value(&[]);
    let scale = expected.abs().max().double_value(&[]);
    assert!(scale > 1e-3, "{name}: there is nothing to compare");
    assert!(error <= tolerance * scale, "{name}: off by {error:.2e} of {scale:.2e}");
}

fn weights_of(output: &Tensor) -> Tensor {
    output.cos() // any fixed weights: the gradient that comes in
}

/// Compares a call's results and all its gradients with those of autograd.
fn check(what: &str, inputs: &mut Inputs, change: &dyn Fn(&mut RewriteRead<'_>), tolerance: f64) {
    for (_, tensor) in inputs.all() {
        *tensor = tensor.set_requires_grad(true);
    }
    let mut call = inputs.both();
    change(&mut call);
    let forward = call.forward().unwrap();

    let new_state = match &call.rewrite {
        Some(_) => rewrite_reference(inputs),
        None => wide(&inputs.state),
    };
    let read = call.read.map(|read| read_reference(&new_state, &read, call.document_starts));
    let mut pairs = vec![("new_state", &forward.new_state, call.rewrite.map(|_| new_state.shallow_clone()))];
    if let Some(Expected { context, value, gate }) = read {
        pairs.push(("context", &forward.context, Some(context)));
        pairs.push(("new_value", &forward.new_value, Some(value)));
        pairs.push(("new_gate", &forward.new_gate, Some(gate)));
    }
    let (mut terms, mut grads) = (Vec::new(), Vec::new());
    for (name, got, expected) in pairs {
        let Some(expected) = expected else { continue };
        let got = got.as_ref().unwrap_or_else(|| panic!("{what}: no {name}"));
        assert!(!got.requires_grad(), "{what}: {name} is a leaf");
        assert_close(&format!("{what}: {name}"), got, &expected, tolerance);
        let grad = weights_of(&expected.detach());
        terms.push((&expected * &grad).sum(Kind::Double));
        grads.push((name, grad.to_kind(got.kind())));
    }
    Tensor::stack(&terms, 0).sum(Kind::Double).backward();
    let grad = |name| grads.iter().find(|(known, _)| *known == name).map(|(_, grad)| grad);
    let incoming = Incoming {
        grad_new_state: grad("new_state"),
        grad_context: grad("context"),
        grad_new_value: grad("new_value"),
        grad_new_gate: grad("new_gate"),
    };
    let gradients = gradients_by_name(call.vjp(&forward, &incoming).unwrap());
    let (rewrites, reads) = (call.rewrite.is_some(), call.read.is_some());
    for ((name, tensor), (same, gradient)) in inputs.all().into_iter().zip(gradients) {
        assert_eq!(name, same);
        let given = match name {
            "state" => true,
            "direction" | "value" | "gate" => rewrites,
            _ => reads,
        };
        assert_eq!(gradient.is_some(), given, "{what}: {name}");
        if let Some(gradient) = gradient {
            assert_eq!(gradient.kind(), tensor.kind(), "{what}: {name}");
            assert_close(&format!("{what}: gradient of {name}"), &gradient, &tensor.grad(), tolerance);
        }
        tensor.zero_grad();
    }
}

// --- tests ----------------------------------------------------------------------------------------

#[test]
fn both_halves_agree_with_autograd() {
    for (kind, tolerance) in [(Kind::Double, 1e-11), (Kind::Float, 2e-5), (Kind::BFloat16, 3e-2)] {
        for (n, taps) in [(1, None), (1, Some(4)), (3, Some(3))] {
            let what = format!("{kind:?}, n = {n}, taps = {taps:?}");
            check(&what, &mut Inputs::new(kind, n, taps), &|_| {}, tolerance);
        }
    }
}

#[test]
fn what_erases_nothing_agrees_with_autograd() {
    for (n, taps) in [(1, None), (3, Some(3))] {
        let mut inputs = Inputs::erasing(Erase::None, Kind::Double, n, taps);
        check(&format!("n = {n}"), &mut inputs, &|_| {}, 1e-11);
    }
}

#[test]
fn each_half_agrees_with_autograd() {
    let inputs = || Inputs::new(Kind::Double, 2, Some(3));
    check("rewrite", &mut inputs(), &|call| call.read = None, 1e-11);
    check("read", &mut inputs(), &|call| call.rewrite = None, 1e-11);
    let linear = |call: &mut RewriteRead<'_>| {
        let read = call.read.as_mut().unwrap();
        (read.value_scale, read.value_from_compressed) = (None, true);
    };
    check("a linear value of x", &mut inputs(), &linear, 1e-11);
}

#[test]
fn no_read_looks_beyond_its_document() {
    let mut inputs = Inputs::new(Kind::Double, 1, Some(4));
    let starts = inputs.starts.shallow_clone();
    // The mask outlives the call that borrows it.
    let starts: &'static Tensor = Box::leak(Box::new(starts));
    check("documents", &mut inputs, &|call| call.document_starts = Some(starts), 1e-11);
}

#[test]
fn tensors_that_are_not_contiguous_give_the_same() {
    let inputs = Inputs::new(Kind::Double, 1, None);
    let turned = |tensor: &Tensor| tensor.transpose(0, 1).contiguous().transpose(0, 1);
    let (state, direction) = (turned(&inputs.state), turned(&inputs.direction));
    assert!(!state.is_contiguous() && !direction.is_contiguous());
    let write = Write { direction: &direction, ..inputs.rewrite() };
    let call = RewriteRead { rewrite: Some(write), state: &state, ..inputs.both() };
    let (got, expected) = (call.forward().unwrap(), inputs.both().forward().unwrap());
    assert!(got.new_state.unwrap() == expected.new_state.unwrap());
    assert!(got.context.unwrap() == expected.context.unwrap());
}

#[test]
fn a_negated_view_has_the_values_that_torch_sees() {
    let inputs = Inputs::new(Kind::Float, 1, None);
    let negated = inputs.state.internal_neg_view();
    let got = RewriteRead { state: &negated, ..inputs.both() }.forward().unwrap();
    let expected = RewriteRead { state: &-&inputs.state, ..inputs.both() }.forward().unwrap();
    assert!(got.new_state.unwrap() == expected.new_state.unwrap());
}

#[test]
fn a_context_may_be_of_another_kind() {
    let inputs = Inputs::new(Kind::Float, 1, None);
    let call = RewriteRead { context_dtype: Some(Kind::BFloat16), ..inputs.both() };
    let context = call.forward().unwrap().context.unwrap();
    let same = inputs.both().forward().unwrap().context.unwrap().to_kind(Kind::BFloat16);
    assert!(context == same);
}

/// The state after each of three rewrites, and what their forwards saved.
fn chained(inputs: &Inputs) -> Vec<(Tensor, Forward)> {
    let mut state = inputs.state.shallow_clone();
    (0..3)
        .map(|_| {
            let call = RewriteRead { rewrite: Some(inputs.rewrite()), ..RewriteRead::new(&state) };
            let forward = call.forward().unwrap();
            let before = std::mem::replace(&mut state, forward.new_state.as_ref().unwrap().shallow_clone());
            (before, forward)
        })
        .collect()
}

#[test]
fn a_chain_from_an_anchor_stands_for_the_state() {
    for n in [1, 2] {
        let inputs = Inputs::new(Kind::Double, n, Some(3));
        let states = chained(&inputs);
        let stats: Vec<&Tensor> =
            states[..2].iter().map(|(_, saved)| saved.stats.as_ref().unwrap()).collect();
        let write = inputs.rewrite();
        let chain: Vec<Link<'_>> = stats.iter().map(|stats| Link { write, stats }).collect();
        let call = RewriteRead { state: &states[2].0, ..inputs.both() };
        let forward = call.forward().unwrap();
        let weights = |output: &Option<Tensor>| weights_of(output.as_ref().unwrap());
        let Forward { new_state, context, new_value, new_gate, .. } = &forward;
        let grads = [new_state, context, new_value, new_gate].map(weights);
        let [grad_new_state, grad_context, grad_new_value, grad_new_gate] = grads.each_ref().map(Some);
        let incoming = Incoming { grad_new_state, grad_context, grad_new_value, grad_new_gate };
        let expected = gradients_by_name(call.vjp(&forward, &incoming).unwrap());
        let got = gradients_by_name(inputs.both().vjp_from_anchor(&chain, &forward, &incoming).unwrap());
        for ((name, got), (_, expected)) in got.into_iter().zip(expected) {
            assert_close(name, &got.unwrap(), &expected.unwrap(), 1e-11);
        }
        let reading = RewriteRead { rewrite: None, ..inputs.both() };
        let refused = reading.vjp_from_anchor(&chain, &forward, &incoming).unwrap_err().to_string();
        assert_eq!(refused, "`chain` must come with a rewrite, got none");
    }
}

#[test]
fn steps_with_a_cache_give_the_whole_sequence() {
    let inputs = Inputs::new(Kind::Double, 2, Some(3));
    let whole = inputs.both().forward().unwrap();
    let (mut pending, mut contexts, mut states) = (None, Vec::new(), Vec::new());
    for (start, length) in [(0, 2), (2, 1), (3, 4)] {
        let part = |tensor: &Tensor| tensor.narrow(1, start, length);
        let (state, direction) = (part(&inputs.state), part(&inputs.direction));
        let (value, gate) = (part(&inputs.value), part(&inputs.gate));
        let write = Write { direction: &direction, value: &value, gate: &gate, ..inputs.rewrite() };
        let call = RewriteRead { rewrite: Some(write), state: &state, ..inputs.both() };
        let step = call.cached_step(pending.as_ref()).unwrap();
        contexts.push(step.context.unwrap());
        states.push(step.new_state.unwrap());
        pending = step.new_pending;
    }
    assert_close("context", &Tensor::cat(&contexts, 1), &whole.context.unwrap(), 1e-12);
    assert_close("state", &Tensor::cat(&states, 1), &whole.new_state.unwrap(), 1e-12);
}

#[test]
fn an_expansion_agrees_with_autograd() {
    let inputs = Inputs::new(Kind::Double, 1, None);
    let x = random(&[2, TIME, D], Kind::Double).set_requires_grad(true);
    let weight = random(&[D, M, 3], Kind::Double).set_requires_grad(true);
    for starts in [None, Some(&inputs.starts)] {
        let call = Expand { weight: Some(&weight), document_starts: starts, ..Expand::new(&x, M) };
        let expected = (0..3)
            .map(|s| delayed(&x, s, 1, starts).unsqueeze(-1) * weight.select(-1, s))
            .reduce(|sum, part| sum + part)
            .unwrap();
        assert_close("state", &call.forward().unwrap(), &expected, 1e-12);
        let grad = weights_of(&expected.detach());
        (expected * &grad).sum(Kind::Double).backward();
        let got = call.vjp(&grad).unwrap();
        assert_close("gradient of x", &got.x, &x.grad(), 1e-12);
        assert_close("gradient of weight", &got.weight.unwrap(), &weight.grad(), 1e-12);
        for mut grad in [x.grad(), weight.grad()] {
            let _ = grad.zero_();
        }
    }
    let repeated = Expand::new(&x, M);
    assert!(repeated.forward().unwrap() == x.unsqueeze(-1).repeat([1, 1, 1, M]));
    assert!(repeated.vjp(&weights_of(&repeated.forward().unwrap())).unwrap().weight.is_none());
}

#[test]
fn an_expansion_in_steps_gives_the_whole() {
    let (x, weight) = (random(&[2, TIME, D], Kind::Float), random(&[D, M, 3], Kind::Float));
    let whole = Expand { weight: Some(&weight), ..Expand::new(&x, M) }.forward().unwrap();
    let (mut before, mut states) = (None, Vec::new());
    for (start, length) in [(0, 1), (1, 4), (5, 2)] {
        let part = x.narrow(1, start, length);
        let step =
            Expand { weight: Some(&weight), ..Expand::new(&part, M) }.cached_step(before.as_ref()).unwrap();
        states.push(step.state);
        before = step.new_before;
    }
    assert_close("state", &Tensor::cat(&states, 1), &whole, 1e-6);
}

#[test]
fn bad_input_gets_a_sentence() {
    let inputs = Inputs::new(Kind::Float, 1, None);
    let sentence = |call: &RewriteRead<'_>| call.forward().unwrap_err().to_string();
    assert_eq!(sentence(&RewriteRead::new(&inputs.state)), "`rewrite` or `read` must be given, got neither");

    let gate = inputs.gate.narrow(1, 0, 3);
    let short = Write { gate: &gate, ..inputs.rewrite() };
    let call = RewriteRead { rewrite: Some(short), ..inputs.both() };
    assert_eq!(sentence(&call), "`gate` must have shape (2, 7, 1), got (2, 3, 1)");

    let call = RewriteRead { context_dtype: Some(Kind::Int), ..inputs.both() };
    assert_eq!(sentence(&call), "`context_dtype` must have dtype Float, Double, BFloat16 or Half, got Int");

    let whole = Tensor::ones([2, TIME, D, M], (Kind::Int64, Device::Cpu));
    let call = RewriteRead { state: &whole, ..inputs.both() };
    let dtypes = "float32, float64, bfloat16 or float16";
    assert_eq!(sentence(&call), format!("`state` must have dtype {dtypes}, got torch's dtype number 4"));

    let wide = wide(&inputs.state);
    let call = RewriteRead { state: &wide, ..inputs.both() };
    assert_eq!(sentence(&call), "`direction` must have dtype torch.float64, got torch.float32");

    let starts = Tensor::zeros([2, TIME], (Kind::Uint8, Device::Cpu));
    let call = RewriteRead { document_starts: Some(&starts), ..inputs.both() };
    assert_eq!(sentence(&call), "`document_starts` must have dtype Bool, got Uint8");

    let step = inputs.both().cached_step(None).unwrap();
    let refused = inputs.both().vjp(&step, &Incoming::default()).unwrap_err().to_string();
    let expected = "`stats` must be what the forward saved, a tensor, got None";
    assert_eq!(refused, expected);

    let none = Tensor::zeros([0, 4], (Kind::Float, Device::Cpu));
    let refused = Expand::new(&none, i64::MAX).forward().unwrap_err().to_string();
    assert_eq!(refused, "`state` must have shape with fewer elements, got (0, 4, 9223372036854775807)");

    let nothing = Tensor::new();
    let refused = Expand::new(&nothing, 4).forward().unwrap_err().to_string();
    assert_eq!(refused, "`x` must be a tensor with memory behind it, got one without");
}
