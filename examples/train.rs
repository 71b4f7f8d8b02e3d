//! Trains a small language model of bytes on a delta stream, in Rust, and prints its loss:
//!
//! ```text
//! cargo run --release --no-default-features --features tch --example train -- TEXT [STEPS]
//! ```
//!
//! TEXT is any text file of some kilobytes. docs/rust.md says how tch finds libtorch.
//!
//! Between two sublayers stands one call that rewrites the state with the last sublayer's output and reads it for the
//! next. libtorch's autograd does not see these calls, so a step has two loops: forward, each sublayer on a leaf of its
//! own, and backward, in which [`RewriteRead::vjp`] carries the gradient from sublayer to sublayer.

use std::error::Error;

use ddl::tch::{Erase, Expand, Forward, Incoming, Read, RewriteRead, Write};
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Tensor};

const HIDDEN_SIZE: i64 = 64;
const VALUE_CHANNELS: i64 = 4;
const HEADS: i64 = 4;
const BLOCKS: i64 = 2; // each an attention and an MLP
const LENGTH: i64 = 64;
const BATCH_SIZE: i64 = 8;
const EPS_K: f64 = 0.02 * 8.0; // 0.02·√d, the default of DeltaResidual
const NORM_EPS: f64 = 1e-5;

/// A sublayer F(h), whose output is the direction of a rewrite.
enum Sublayer {
    Attention { qkv: nn::Linear, out: nn::Linear },
    Mlp { up: nn::Linear, down: nn::Linear },
}

impl Sublayer {
    fn attention(path: nn::Path<'_>) -> Sublayer {
        Sublayer::Attention {
            qkv: nn::linear(&path / "qkv", HIDDEN_SIZE, 3 * HIDDEN_SIZE, Default::default()),
            out: nn::linear(&path / "out", HIDDEN_SIZE, HIDDEN_SIZE, Default::default()),
        }
    }

    fn mlp(path: nn::Path<'_>) -> Sublayer {
        Sublayer::Mlp {
            up: nn::linear(&path / "up", HIDDEN_SIZE, 4 * HIDDEN_SIZE, Default::default()),
            down: nn::linear(&path / "down", 4 * HIDDEN_SIZE, HIDDEN_SIZE, Default::default()),
        }
    }

    fn forward(&self, h: &Tensor) -> Tensor {
        match self {
            Sublayer::Attention { qkv, out } => {
                let heads = |x: Tensor| x.unflatten(-1, [HEADS, -1]).transpose(1, 2);
                let [q, k, v] = <[Tensor; 3]>::try_from(qkv.forward(h).chunk(3, -1)).expect("three parts");
                let mixed = Tensor::scaled_dot_product_attention::<Tensor>(
                    &heads(q),
                    &heads(k),
                    &heads(v),
                    None,
                    0.0,
                    true,
                    None,
                    false,
                );
                out.forward(&mixed.transpose(1, 2).flatten(-2, -1))
            }
            Sublayer::Mlp { up, down } => down.forward(&up.forward(h).gelu("none")),
        }
    }
}

/// The parameters of a read. The last one, before the logits, needs no value and no gate.
struct ReadParameters {
    compress: Tensor,
    norm_weight: Tensor,
    gate_weight: Option<Tensor>,
    gate_bias: Option<Tensor>,
    value_weight: Option<Tensor>,
    value_bias: Option<Tensor>,
}

impl ReadParameters {
    fn new(path: nn::Path<'_>, is_last: bool) -> ReadParameters {
        let (d, m) = (HIDDEN_SIZE, VALUE_CHANNELS);
        let next = |name: &str, shape: &[i64], stdev: f64| {
            (!is_last).then(|| path.var(name, shape, nn::Init::Randn { mean: 0.0, stdev }))
        };
        ReadParameters {
            compress: path.var("compress", &[d, m], nn::Init::Const(1.0 / m as f64)),
            norm_weight: path.ones("norm_weight", &[d]),
            gate_weight: next("gate_weight", &[d], 0.0),
            gate_bias: next("gate_bias", &[], 0.0), // β = 2σ(0) = 1: each write replaces what was there
            value_weight: next("value_weight", &[m, d], 1.0 / (d as f64).sqrt()),
            value_bias: next("value_bias", &[m], 0.0),
        }
    }

    fn read(&self) -> Read<'_> {
        Read {
            compress: Some(&self.compress),
            norm_weight: Some(&self.norm_weight),
            norm_eps: Some(NORM_EPS),
            gate_weight: self.gate_weight.as_ref(),
            gate_bias: self.gate_bias.as_ref(),
            value_weight: self.value_weight.as_ref(),
            value_bias: self.value_bias.as_ref(),
            ..Read::default()
        }
    }
}

/// What the backward of one call needs: the state before it, the output of the sublayer before it with that sublayer's
/// graph, and the results.
struct Boundary {
    state: Tensor,
    output: Option<Tensor>,
    results: Forward,
    /// h, a leaf of the next sublayer's graph
    context: Tensor,
}

pub struct Model {
    tokens: nn::Embedding,
    positions: nn::Embedding,
    sublayers: Vec<Sublayer>,
    reads: Vec<ReadParameters>,
    head: nn::Linear,
}

impl Model {
    pub fn new(path: &nn::Path<'_>) -> Model {
        let block = |i| [Sublayer::attention(path / "attention" / i), Sublayer::mlp(path / "mlp" / i)];
        let sublayers: Vec<Sublayer> = (0..BLOCKS).flat_map(block).collect();
        let last = sublayers.len();
        let random = |stdev| nn::Init::Randn { mean: 0.0, stdev };
        let small = nn::EmbeddingConfig { ws_init: random(0.1), ..Default::default() };
        let head = nn::LinearConfig { ws_init: random(0.02), ..Default::default() };
        Model {
            tokens: nn::embedding(path / "tokens", 256, HIDDEN_SIZE, small),
            positions: nn::embedding(path / "positions", LENGTH, HIDDEN_SIZE, small),
            reads: (0..=last).map(|i| ReadParameters::new(path / "reads" / i, i == last)).collect(),
            head: nn::linear(path / "head", HIDDEN_SIZE, 256, head),
            sublayers,
        }
    }

    /// Computes the loss of tokens (batch, length + 1), and adds its gradients to the parameters'.
    pub fn loss_and_gradients(&self, tokens: &Tensor) -> ddl::error::Result<f64> {
        let (inputs, targets) = (tokens.narrow(1, 0, LENGTH), tokens.narrow(1, 1, LENGTH));
        let x = self.tokens.forward(&inputs) + &self.positions.ws;
        let boundaries = self.forward(Expand::new(&x.detach(), VALUE_CHANNELS).forward()?)?;

        let last = boundaries.last().expect("a read before the logits");
        let logits = self.head.forward(&last.context);
        let loss = logits.flatten(0, 1).cross_entropy_for_logits(&targets.flatten(0, 1));
        loss.backward();

        let grad_state = self.backward(&boundaries)?;
        let grad_x = Expand::new(&x.detach(), VALUE_CHANNELS).vjp(&grad_state)?.x;
        backward_from([(&x, &grad_x)]);
        Ok(loss.double_value(&[]))
    }

    fn forward(&self, state: Tensor) -> ddl::error::Result<Vec<Boundary>> {
        let mut boundaries = vec![self.boundary(0, state, None, None)?];
        for (i, sublayer) in self.sublayers.iter().enumerate() {
            let before = &boundaries[i];
            let output = sublayer.forward(&before.context);
            let state = before.results.new_state.as_ref().unwrap_or(&before.state).shallow_clone();
            boundaries.push(self.boundary(i + 1, state, Some(output), Some(before))?);
        }
        Ok(boundaries)
    }

    /// Rewrites the state with a sublayer's output, if there is one, and reads it.
    fn boundary(
        &self,
        index: usize,
        state: Tensor,
        output: Option<Tensor>,
        before: Option<&Boundary>,
    ) -> ddl::error::Result<Boundary> {
        let direction = output.as_ref().map(Tensor::detach);
        let results = self.call(index, &state, direction.as_ref(), before).forward()?;
        let context = results.context.as_ref().expect("every call reads").detach().set_requires_grad(true);
        Ok(Boundary { state, output, results, context })
    }

    fn call<'a>(
        &'a self,
        index: usize,
        state: &'a Tensor,
        direction: Option<&'a Tensor>,
        before: Option<&'a Boundary>,
    ) -> RewriteRead<'a> {
        let rewrite = direction.zip(before).map(|(direction, before)| Write {
            direction,
            value: before.results.new_value.as_ref().expect("the read before computed a value"),
            gate: before.results.new_gate.as_ref().expect("the read before computed a gate"),
            eps_k: EPS_K,
            erase: Erase::Tied,
        });
        RewriteRead { rewrite, read: Some(self.reads[index].read()), ..RewriteRead::new(state) }
    }

    /// Carries the gradient of the last context back to the first state, and returns the gradient of that.
    fn backward(&self, boundaries: &[Boundary]) -> ddl::error::Result<Tensor> {
        let [mut grad_new_state, mut grad_new_value, mut grad_new_gate] = [const { None::<Tensor> }; 3];
        for (index, boundary) in boundaries.iter().enumerate().rev() {
            let direction = boundary.output.as_ref().map(Tensor::detach);
            let before = index.checked_sub(1).map(|before| &boundaries[before]);
            let call = self.call(index, &boundary.state, direction.as_ref(), before);
            let incoming = Incoming {
                grad_new_state: grad_new_state.as_ref().filter(|_| call.rewrite.is_some()),
                grad_context: Some(&boundary.context.grad()),
                grad_new_value: grad_new_value.as_ref(),
                grad_new_gate: grad_new_gate.as_ref(),
            };
            let grads = call.vjp(&boundary.results, &incoming)?;

            let read = call.read.expect("every call reads");
            let parameters = [
                (read.compress, grads.compress),
                (read.norm_weight, grads.norm_weight),
                (read.gate_weight, grads.gate_weight),
                (read.gate_bias, grads.gate_bias),
                (read.value_weight, grads.value_weight),
                (read.value_bias, grads.value_bias),
                (boundary.output.as_ref(), grads.direction),
            ];
            backward_from(parameters.iter().filter_map(|(tensor, grad)| Some((*tensor)?).zip(grad.as_ref())));

            // The first call does not rewrite, so the gradient of its state is the sum of what comes from the next call and
            // from its own read.
            let passed_on = grad_new_state.filter(|_| call.rewrite.is_none());
            let grad_state = grads.state.expect("a state always has a gradient");
            grad_new_state = Some(match passed_on {
                Some(grad) => grad + grad_state,
                None => grad_state,
            });
            (grad_new_value, grad_new_gate) = (grads.value, grads.gate);
        }
        Ok(grad_new_state.expect("there is a boundary"))
    }
}

/// Continues libtorch's backward pass from tensors whose gradients are known.
fn backward_from<'a>(known: impl IntoIterator<Item = (&'a Tensor, &'a Tensor)>) {
    let products = known.into_iter().map(|(tensor, grad)| (tensor * grad).sum(Kind::Float));
    products.reduce(|sum, product| sum + product).expect("something is known").backward();
}

/// Trains on a text; `report` gets each step and its loss.
pub fn train(text: &[u8], steps: usize, mut report: impl FnMut(usize, f64)) -> Result<(), Box<dyn Error>> {
    let starts = text.len() as i64 - LENGTH;
    if starts < 1 {
        return Err(format!("the text must have more than {LENGTH} bytes, got {}", text.len()).into());
    }
    tch::manual_seed(1);
    let variables = nn::VarStore::new(Device::cuda_if_available());
    let model = Model::new(&variables.root());
    let mut optimizer = nn::AdamW::default().build(&variables, 1e-3)?;
    let text = Tensor::from_slice(text).to_device(variables.device());
    for step in 0..steps {
        let first = Tensor::randint(starts, [BATCH_SIZE, 1], (Kind::Int64, variables.device()));
        let places = first + Tensor::arange(LENGTH + 1, (Kind::Int64, variables.device()));
        let tokens = text.take(&places).to_kind(Kind::Int64);
        optimizer.zero_grad();
        report(step, model.loss_and_gradients(&tokens)?);
        optimizer.step();
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("name a text file: train TEXT [STEPS]")?;
    let steps = arguments.next().map_or(Ok(300), |steps| steps.parse())?;
    let text = std::fs::read(&path).map_err(|reason| format!("{path} could not be read: {reason}"))?;
    train(&text, steps, |step, loss| {
        if step % 10 == 0 || step + 1 == steps {
            println!("step {step:>4}  loss {loss:.4}");
        }
    })
}
