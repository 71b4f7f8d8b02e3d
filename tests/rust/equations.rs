//! The equations in libtorch's operations, and the inputs of a call.

use ddl::tch::{Erase, Read, RewriteRead, Write};
use tch::{Device, Kind, Tensor};

pub const D: i64 = 12;
pub const M: i64 = 4;
pub const TIME: i64 = 7;
pub const EPS_K: f64 = 1e-3;
const NORM_EPS: f64 = 1e-5;

// --- the equations --------------------------------------------------------------------------------

pub fn wide(tensor: &Tensor) -> Tensor {
    tensor.to_kind(Kind::Double)
}

/// X ← X + k̂_j (β_j v_j − α_j k̂_jᵀX) for each rewrite j; k (…, n, d), v (…, n, m), β (…, n) and α = β or 0.
pub fn rewrite_reference(inputs: &Inputs) -> Tensor {
    let (state, gate) = (&inputs.state, wide(&inputs.gate));
    let (direction, value) = (wide(&inputs.direction), wide(&inputs.value));
    let erases = f64::from(inputs.erase == Erase::Tied);
    let norm = (direction.square().sum_dim_intlist(-1, true, Kind::Double) + EPS_K * EPS_K).sqrt();
    let unit = direction / norm;
    (0..unit.size()[unit.dim() - 2]).fold(wide(state), |x, j| {
        let (k, v) = (unit.select(-2, j), value.select(-2, j));
        let beta = gate.select(-1, j).unsqueeze(-1);
        let readout = (k.unsqueeze(-1) * &x).sum_dim_intlist(-2, false, Kind::Double);
        x + k.unsqueeze(-1) * (beta * (v - erases * readout)).unsqueeze(-2)
    })
}

/// The tensor `taps` tokens earlier, zeros before a document's start. Time is axis `axis`.
pub fn delayed(x: &Tensor, taps: i64, axis: i64, starts: Option<&Tensor>) -> Tensor {
    let time = x.size()[axis as usize];
    let mut sizes = x.size();
    sizes[axis as usize] = taps.min(time);
    let zeros = Tensor::zeros(sizes, (x.kind(), x.device()));
    let moved = Tensor::cat(&[zeros, x.narrow(axis, 0, (time - taps).max(0))], axis);
    let Some(starts) = starts else { return moved };
    let document = starts.to_kind(Kind::Int64).cumsum(-1, Kind::Int64);
    let before = Tensor::cat(&[document.narrow(-1, 0, taps) - 1, document.narrow(-1, 0, time - taps)], -1);
    let mut same = before.eq_tensor(&document);
    while same.dim() < x.dim() {
        same = same.unsqueeze(-1);
    }
    moved * same
}

pub struct Expected {
    pub context: Tensor,
    pub value: Tensor,
    pub gate: Tensor,
}

pub fn read_reference(state: &Tensor, read: &Read<'_>, starts: Option<&Tensor>) -> Expected {
    let weight = wide(read.compress.unwrap());
    let x = match weight.dim() {
        2 => (state * weight).sum_dim_intlist(-1, false, Kind::Double),
        _ => (0..weight.size()[2])
            .map(|s| {
                (delayed(state, s, 1, starts) * weight.select(-1, s)).sum_dim_intlist(-1, false, Kind::Double)
            })
            .reduce(|sum, part| sum + part)
            .unwrap(),
    };
    let rms = |eps: f64| (x.square().mean_dim(-1, true, Kind::Double) + eps).sqrt();
    let normed = read.norm_eps.map_or(x.shallow_clone(), |eps| &x / rms(eps));
    let context = normed * read.norm_weight.map_or(Tensor::from(1.0), wide);
    let from = if read.value_from_compressed { &x } else { &context };
    // (…, d) with (n, m, d) and (n, d)
    let (value_weight, gate_weight) = (wide(read.value_weight.unwrap()), wide(read.gate_weight.unwrap()));
    let value = Tensor::einsum("btd,nmd->btnm", &[from, &value_weight], None::<i64>)
        + read.value_bias.map_or(Tensor::from(0.0), wide);
    let value = read.value_scale.map_or(value.shallow_clone(), |scale| value.sigmoid() * scale);
    let form = if gate_weight.dim() == 3 { "btd,and->btan" } else { "btd,nd->btn" };
    let logits = Tensor::einsum(form, &[&context, &gate_weight], None::<i64>)
        + read.gate_bias.map_or(Tensor::from(0.0), wide);
    Expected { context, value, gate: logits.sigmoid() * 2.0 }
}

// --- inputs ---------------------------------------------------------------------------------------

pub fn random(shape: &[i64], kind: Kind) -> Tensor {
    Tensor::randn(shape, (Kind::Double, Device::Cpu)).to_kind(kind)
}

/// The tensors of a call; `kind` is the state's, `n` the rewrites before and after.
pub struct Inputs {
    pub state: Tensor,
    pub direction: Tensor,
    pub value: Tensor,
    pub gate: Tensor,
    pub compress: Tensor,
    pub norm_weight: Tensor,
    pub gate_weight: Tensor,
    pub gate_bias: Tensor,
    pub value_weight: Tensor,
    pub value_bias: Tensor,
    pub starts: Tensor,
    pub erase: Erase,
}

impl Inputs {
    pub fn new(kind: Kind, n: i64, taps: Option<i64>) -> Inputs {
        Inputs::erasing(Erase::Tied, kind, n, taps)
    }

    pub fn erasing(erase: Erase, kind: Kind, n: i64, taps: Option<i64>) -> Inputs {
        tch::manual_seed(7);
        let small = if kind == Kind::Double { kind } else { Kind::Float };
        let over_time: Vec<i64> = [D, M].into_iter().chain(taps).collect();
        let mut starts = vec![false; (2 * TIME) as usize];
        [0, 3, 7, 12].iter().for_each(|&start: &usize| starts[start] = true);
        Inputs {
            state: random(&[2, TIME, D, M], kind),
            direction: random(&[2, TIME, n, D], kind),
            value: random(&[2, TIME, n, M], small),
            gate: Tensor::rand([2, TIME, n], (Kind::Double, Device::Cpu)).to_kind(small) * 2.0,
            compress: random(&over_time, kind),
            norm_weight: random(&[D], kind),
            gate_weight: random(&[n, D], kind),
            gate_bias: random(&[n], kind),
            value_weight: random(&[n, M, D], kind),
            value_bias: random(&[n, M], kind),
            starts: Tensor::from_slice(&starts).view([2, TIME]),
            erase,
        }
    }

    pub fn all(&mut self) -> [(&'static str, &mut Tensor); 10] {
        [
            ("state", &mut self.state),
            ("direction", &mut self.direction),
            ("value", &mut self.value),
            ("gate", &mut self.gate),
            ("compress", &mut self.compress),
            ("norm_weight", &mut self.norm_weight),
            ("gate_weight", &mut self.gate_weight),
            ("gate_bias", &mut self.gate_bias),
            ("value_weight", &mut self.value_weight),
            ("value_bias", &mut self.value_bias),
        ]
    }

    pub fn rewrite(&self) -> Write<'_> {
        let (direction, value, gate) = (&self.direction, &self.value, &self.gate);
        Write { direction, value, gate, eps_k: EPS_K, erase: self.erase }
    }

    pub fn read(&self) -> Read<'_> {
        Read {
            compress: Some(&self.compress),
            norm_weight: Some(&self.norm_weight),
            norm_eps: Some(NORM_EPS),
            gate_weight: Some(&self.gate_weight),
            gate_bias: Some(&self.gate_bias),
            value_weight: Some(&self.value_weight),
            value_bias: Some(&self.value_bias),
            value_scale: Some(3.0),
            value_from_compressed: false,
        }
    }

    pub fn both(&self) -> RewriteRead<'_> {
        RewriteRead {
            rewrite: Some(self.rewrite()),
            read: Some(self.read()),
            ..RewriteRead::new(&self.state)
        }
    }
}
