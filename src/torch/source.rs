//! Where a call's arguments come from, and how they make up the records.

use super::memory::Owned;
use crate::error::{Error, Result};
use crate::problem::{Erase, Incoming, Read, Saved, Write};
use crate::tensor::{Dtype, Tensor};

/// Arguments in the order of the schema: on the dispatcher's stack, described by Python, or only listed.
///
/// A tensor that is refused is replaced by an empty one, and the reason kept for [`Source::finish`]: everything on
/// the stack is owned, so all of it has to be taken.
pub trait Source {
    fn tensor(&mut self, name: &'static str) -> Tensor;
    fn optional_tensor(&mut self, name: &'static str) -> Option<Tensor>;
    fn overwritten_tensor(&mut self, name: &'static str) -> Overwritten;
    fn optional_tensors(&mut self, name: &'static str) -> Option<Vec<Tensor>>;
    fn float(&mut self, name: &'static str) -> f64;
    fn optional_float(&mut self, name: &'static str) -> Option<f64>;
    fn integer(&mut self, name: &'static str) -> i64;
    fn boolean(&mut self, name: &'static str) -> bool;
    fn optional_dtype(&mut self, name: &'static str) -> Option<Dtype>;
    /// Fails with the first reason to refuse an argument.
    fn finish(&mut self) -> Result<()>;

    /// Takes the tensors of a rewrite.
    fn write(&mut self) -> Write {
        Write {
            direction: self.tensor("direction"),
            value: self.tensor("value"),
            gate: self.tensor("gate"),
            eps_k: 0.0,
            erase: Erase::default(),
        }
    }

    fn erase(&mut self) -> Result<Erase> {
        match self.integer("erase") {
            0 => Ok(Erase::Tied),
            1 => Ok(Erase::None),
            other => Err(Error::Argument(format!("`erase` must be 0 or 1, got {other}"))),
        }
    }

    /// Takes the tensors of a read.
    fn read(&mut self) -> Read {
        Read {
            compress: self.optional_tensor("compress"),
            norm_weight: self.optional_tensor("norm_weight"),
            gate_weight: self.optional_tensor("gate_weight"),
            gate_bias: self.optional_tensor("gate_bias"),
            value_weight: self.optional_tensor("value_weight"),
            value_bias: self.optional_tensor("value_bias"),
            ..Read::default()
        }
    }

    /// Takes the other parameters of a read.
    fn numbers_of(&mut self, read: &mut Read) {
        read.norm_eps = self.optional_float("norm_eps");
        read.value_scale = self.optional_float("value_scale");
        read.value_from_compressed = self.boolean("value_from_compressed");
    }

    fn gradients_of_read(&mut self) -> Incoming {
        Incoming {
            grad_new_state: None,
            grad_context: self.optional_tensor("grad_context"),
            grad_new_value: self.optional_tensor("grad_new_value"),
            grad_new_gate: self.optional_tensor("grad_new_gate"),
        }
    }

    /// Takes what a forward with a read saved, the statistics by themselves.
    fn saved(&mut self) -> (Saved, Option<Tensor>) {
        let [new_value, new_gate] = ["new_value", "new_gate"].map(|name| self.optional_tensor(name));
        let [stats, compressed] = ["stats", "compressed"].map(|name| self.optional_tensor(name));
        (Saved { new_value, new_gate, compressed, ..Saved::default() }, stats)
    }
}

/// A tensor that the operator overwrites.
pub struct Overwritten {
    pub tensor: Tensor,
    /// (contiguous copy, original), if the original is not contiguous
    pub copy: Option<(Owned, Owned)>,
}

impl Overwritten {
    /// Copies the result back if a copy was overwritten.
    pub fn copy_back(copy: Option<(Owned, Owned)>) -> Result<()> {
        copy.map_or(Ok(()), |(copy, original)| original.copy_from(&copy))
    }
}

/// An empty tensor in place of one that is refused.
pub fn placeholder(name: &'static str) -> Tensor {
    Tensor::fake(name, vec![0], Dtype::F32, 0)
}

/// Lists the schemas of the arguments that an operator takes, as in `Tensor? compress`, and then stops it.
#[derive(Default)]
pub struct Listing(pub Vec<String>);

impl Listing {
    fn add<T>(&mut self, kind: &str, name: &str, empty: T) -> T {
        self.0.push(format!("{kind} {name}"));
        empty
    }
}

impl Source for Listing {
    fn tensor(&mut self, name: &'static str) -> Tensor {
        self.add("Tensor", name, placeholder(name))
    }

    fn optional_tensor(&mut self, name: &'static str) -> Option<Tensor> {
        self.add("Tensor?", name, None)
    }

    fn overwritten_tensor(&mut self, name: &'static str) -> Overwritten {
        self.add("Tensor(a!)", name, Overwritten { tensor: placeholder(name), copy: None })
    }

    fn optional_tensors(&mut self, name: &'static str) -> Option<Vec<Tensor>> {
        self.add("Tensor[]?", name, None)
    }

    fn float(&mut self, name: &'static str) -> f64 {
        self.add("float", name, 0.0)
    }

    fn optional_float(&mut self, name: &'static str) -> Option<f64> {
        self.add("float?", name, None)
    }

    fn integer(&mut self, name: &'static str) -> i64 {
        self.add("int", name, 0)
    }

    fn boolean(&mut self, name: &'static str) -> bool {
        self.add("bool", name, false)
    }

    fn optional_dtype(&mut self, name: &'static str) -> Option<Dtype> {
        self.add("ScalarType?", name, None)
    }

    fn finish(&mut self) -> Result<()> {
        Err(Error::Internal("the arguments are listed, not used".into()))
    }
}
