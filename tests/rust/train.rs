//! The example that trains: its gradients are those of its loss, and the loss falls.

#[allow(dead_code)]
#[path = "../../examples/train.rs"]
mod example;

use example::{Model, train};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

const TEXT: &[u8] = include_bytes!("../../kernels/README.md");

#[test]
fn the_gradients_are_those_of_the_loss() {
    tch::manual_seed(3);
    let variables = VarStore::new(Device::Cpu);
    let model = Model::new(&variables.root());
    let tokens = Tensor::from_slice(&TEXT[..65]).view([1, 65]).to_kind(Kind::Int64);
    model.loss_and_gradients(&tokens).unwrap();
    let of = |(name, tensor): (String, Tensor)| (name, tensor.grad().copy(), tensor);
    let known: Vec<_> = variables.variables().into_iter().map(of).collect();
    let checked = ["reads.0.", "reads.3.", "reads.4.", "tokens", "attention.1.out.weight", "mlp.0.up.bias"];
    for (name, grad, mut tensor) in known {
        if !checked.iter().any(|part| name.starts_with(part)) {
            continue;
        }
        let length = grad.norm().double_value(&[]);
        assert!(length > 1e-6, "{name} has no gradient");
        let step = grad * (1e-2 / length);
        let mut loss_at = |sign: f64| {
            tch::no_grad(|| tensor += &step * sign);
            let loss = model.loss_and_gradients(&tokens).unwrap();
            tch::no_grad(|| tensor -= &step * sign);
            loss
        };
        let slope = (loss_at(1.0) - loss_at(-1.0)) / 2e-2;
        assert!((slope - length).abs() < 0.02 * length + 2e-4, "{name}: slope {slope}, gradient {length}");
    }
}

#[test]
fn the_loss_falls() {
    let mut losses = Vec::new();
    train(TEXT, 15, |_, loss| losses.push(loss)).unwrap();
    assert!(losses[14] < losses[0] - 0.3, "{losses:?}");
    let refused = train(&TEXT[..20], 1, |_, _| {}).unwrap_err().to_string();
    assert_eq!(refused, "the text must have more than 64 bytes, got 20");
}
