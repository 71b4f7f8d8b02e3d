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
