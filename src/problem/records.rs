//! The records of [`crate::records`] on the tensors of a call.

use crate::records;
pub use crate::records::Erase;
use crate::tensor::Tensor;

pub type Write = records::Write<Tensor>;
pub type Link = records::Link<Tensor>;
pub type Read = records::Read<Option<Tensor>>;
pub type Outputs = records::Outputs<Option<Tensor>>;
/// Those outputs of a forward that its backward needs.
pub type Saved = Outputs;
pub type Incoming = records::Incoming<Option<Tensor>>;
pub type Gradients = records::Gradients<Option<Tensor>>;
pub type Expanded = records::Expanded<Tensor, Option<Tensor>>;
pub type ExpandGradients = records::ExpandGradients<Tensor, Option<Tensor>>;

/// The parameters whose gradients a backward sums; biases cost nothing, and are always summed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ParameterSums {
    pub compress: bool,
    pub norm: bool,
    pub gate: bool,
    pub value: bool,
}

impl ParameterSums {
    pub fn new(gradients: &Gradients) -> ParameterSums {
        ParameterSums {
            compress: gradients.compress.is_some(),
            norm: gradients.norm_weight.is_some(),
            gate: gradients.gate_weight.is_some(),
            value: gradients.value_weight.is_some(),
        }
    }
}
