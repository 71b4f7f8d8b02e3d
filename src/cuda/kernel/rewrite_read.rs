//! What a kernel of `rewrite_read` is compiled for: sizes, types and the parts of the operator that are present.

use crate::problem::{self, Erase, ParameterSums, Read};
use crate::tensor::{Dtype, Tensor};

/// A `__global__` function of kernels/.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    Forward,
    Backward,
    Parameters,
    Reduce,
    ExpandForward,
    ExpandBackward,
}

impl Kernel {
    pub fn name(self) -> &'static str {
        match self {
            Kernel::Forward => "rewrite_read_fwd",
            Kernel::Backward => "rewrite_read_bwd",
            Kernel::Parameters => "parameters_bwd",
            Kernel::Reduce => "reduce",
            Kernel::ExpandForward => "expand_fwd",
            Kernel::ExpandBackward => "expand_bwd",
        }
    }

    /// Returns the file of kernels/ that defines it.
    pub fn file(self) -> &'static str {
        match self {
            Kernel::Forward => "rewrite_read_fwd.cu",
            Kernel::Backward => "rewrite_read_bwd.cu",
            Kernel::Parameters => "parameters_bwd.cu",
            Kernel::Reduce => "reduce.cu",
            Kernel::ExpandForward | Kernel::ExpandBackward => "expand.cu",
        }
    }
}

/// The read's compression of the state, numbered as READ in common.cuh: `None` is no read at all, `Identity` a read
/// without compression.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compress {
    None = 0,
    Identity = 1,
    Channel = 2,
    Token = 3,
}

/// Storage types; a tensor that is absent has the type of the arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Types {
    pub state: Dtype,
    /// k
    pub direction: Dtype,
    /// h forward, its gradient backward
    pub context: Dtype,
    /// w
    pub compress: Dtype,
    pub norm: Dtype,
    pub gate: Dtype,
    pub gate_bias: Dtype,
    pub value: Dtype,
    pub value_bias: Dtype,
}

impl Types {
    pub fn all(dtype: Dtype) -> Types {
        Types {
            state: dtype,
            direction: dtype,
            context: dtype,
            compress: dtype,
            norm: dtype,
            gate: dtype,
            gate_bias: dtype,
            value: dtype,
            value_bias: dtype,
        }
    }
}

/// The parts of a read that are present.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Parts {
    pub norm: bool,
    pub norm_weight: bool,
    pub gate: bool,
    pub gate_bias: bool,
    pub value: bool,
    pub value_bias: bool,
    pub value_sigmoid: bool,
    pub value_from_compressed: bool,
}

/// A kernel of `rewrite_read`, of either half alone, or `reduce`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RewriteRead {
    pub kernel: Kernel,
    pub d: usize,
    pub m: usize,
    pub taps: usize,
    pub types: Types,
    pub rewrite: bool,
    /// rewrites one after the other; 1 if there is none
    pub rewrites: usize,
    /// what they erase
    pub erase: Erase,
    /// rewrites whose values and gates are read; 1 if none are
    pub next: usize,
    pub compress: Compress,
    pub parts: Parts,
    /// all false forward
    pub sums: ParameterSums,
    /// the backward's state is an anchor
    pub chain: bool,
    /// the forward saves nothing for a backward, and its sums of x start and end outside its tokens
    pub cached: bool,
    /// sequences hold several documents
    pub documents: bool,
    /// every pointer is a multiple of 16 bytes
    pub aligned: bool,
}

impl RewriteRead {
    /// `context` is the dtype of h forward, of its gradient backward, if there is one.
    pub fn new(kernel: Kernel, problem: &problem::RewriteRead, context: Option<Dtype>) -> RewriteRead {
        let real = problem.gate_dtype();
        let dtype = |tensor: Option<&Tensor>| tensor.map_or(real, |tensor| tensor.dtype);
        let read = problem.read.as_ref();
        let parameter = |field: fn(&Read) -> Option<&Tensor>| dtype(read.and_then(field));
        RewriteRead {
            kernel,
            d: problem.sizes.d,
            m: problem.sizes.m,
            taps: read.map_or(1, Read::taps),
            types: Types {
                state: problem.state.dtype,
                direction: dtype(problem.rewrite.as_ref().map(|rewrite| &rewrite.direction)),
                context: context.unwrap_or(real),
                compress: parameter(|read| read.compress.as_ref()),
                norm: parameter(|read| read.norm_weight.as_ref()),
                gate: parameter(|read| read.gate_weight.as_ref()),
                gate_bias: parameter(|read| read.gate_bias.as_ref()),
                value: parameter(|read| read.value_weight.as_ref()),
                value_bias: parameter(|read| read.value_bias.as_ref()),
            },
            rewrite: problem.rewrite.is_some(),
            rewrites: problem.rewrites.count(),
            erase: problem.rewrite.as_ref().map(|write| write.erase).unwrap_or_default(),
            next: problem.next.count(),
            compress: match read {
                None => Compress::None,
                Some(read) if read.over_time() => Compress::Token,
                Some(read) if read.compress.is_some() => Compress::Channel,
                Some(_) => Compress::Identity,
            },
            parts: read.map(parts).unwrap_or_default(),
            sums: ParameterSums::default(),
            chain: !problem.chain.is_empty(),
            cached: problem.cached,
            documents: problem.document_starts.is_some(),
            aligned: true,
        }
    }

    /// Returns the kernel that adds up the sums of this backward's blocks. Fields that it does not depend on are
    /// set to one value, so that several backwards share it.
    pub fn reduce(self) -> RewriteRead {
        let real = self.real();
        let types = Types { state: real, direction: real, context: real, ..self.types };
        RewriteRead {
            kernel: Kernel::Reduce,
            types,
            rewrite: false,
            rewrites: 1,
            erase: Erase::default(),
            chain: false,
            cached: false,
            documents: false,
            aligned: true,
            ..self
        }
    }

    /// Returns the kernel that sums the parameters' gradients if this backward has no room for them.
    pub fn parameters(self) -> RewriteRead {
        RewriteRead { kernel: Kernel::Parameters, ..self }
    }

    /// Returns the type of the arithmetic.
    pub fn real(&self) -> Dtype {
        arithmetic(self.types.state)
    }

    /// Returns how many vectors of `d` sums of parameter gradients there are.
    pub fn slots(&self) -> usize {
        let ParameterSums { compress, norm, gate, value } = self.sums;
        let of_next = self.next * (usize::from(value) * self.m + usize::from(gate));
        usize::from(compress) * self.m * self.taps + usize::from(norm) + of_next
    }

    /// Returns the numbers that one block leaves in `partial`: the slots, then the biases' sums.
    pub fn sums_per_block(&self) -> usize {
        self.slots() * self.d + (self.next * (1 + self.m)).next_multiple_of(8)
    }

    pub(super) fn defines(&self) -> Vec<(&'static str, String)> {
        let types = &self.types;
        let mut defines = vec![
            ("REAL", c_name(self.real()).into()),
            ("STATE_T", c_name(types.state).into()),
            ("D", self.d.to_string()),
            ("M", self.m.to_string()),
            ("TAPS", self.taps.to_string()),
        ];
        for (name, dtype) in [
            ("DIRECTION_T", types.direction),
            ("CONTEXT_T", types.context),
            ("COMPRESS_T", types.compress),
            ("NORM_T", types.norm),
            ("GATE_T", types.gate),
            ("GATE_BIAS_T", types.gate_bias),
            ("VALUE_T", types.value),
            ("VALUE_BIAS_T", types.value_bias),
        ] {
            defines.push((name, c_name(dtype).into()));
        }
        let (parts, sums) = (&self.parts, &self.sums);
        for (name, there) in [
            ("BACKWARD", matches!(self.kernel, Kernel::Backward | Kernel::Parameters)),
            ("FEATURE_SLICED", self.kernel == Kernel::Parameters),
            ("REWRITE", self.rewrite),
            ("NORM", parts.norm),
            ("NORM_WEIGHT", parts.norm_weight),
            ("GATE", parts.gate),
            ("GATE_BIAS", parts.gate_bias),
            ("VALUE", parts.value),
            ("VALUE_BIAS", parts.value_bias),
            ("VALUE_SIGMOID", parts.value_sigmoid),
            ("VALUE_FROM_COMPRESSED", parts.value_from_compressed),
            ("SUM_COMPRESS", sums.compress),
            ("SUM_NORM", sums.norm),
            ("SUM_GATE", sums.gate),
            ("SUM_VALUE", sums.value),
            ("CHAIN", self.chain),
            ("SAVES", !self.cached),
            ("PENDING", self.cached && self.taps > 1),
            ("DOCUMENTS", self.documents),
        ] {
            defines.push((name, u8::from(there).to_string()));
        }
        defines.push(("REWRITES", self.rewrites.to_string()));
        defines.push(("ERASE", (self.erase as u8).to_string()));
        defines.push(("NEXT", self.next.to_string()));
        defines.push(("READ", (self.compress as u8).to_string()));
        defines
    }
}

fn parts(read: &Read) -> Parts {
    let value = read.value_weight.is_some();
    Parts {
        norm: read.norm_eps.is_some(),
        norm_weight: read.norm_weight.is_some(),
        gate: read.gate_weight.is_some(),
        gate_bias: read.gate_bias.is_some(),
        value,
        value_bias: read.value_bias.is_some(),
        value_sigmoid: value && read.value_scale.is_some(),
        value_from_compressed: value && read.value_from_compressed,
    }
}

/// Returns the type of the arithmetic on a state of this one.
pub(super) fn arithmetic(state: Dtype) -> Dtype {
    if state == Dtype::F64 { Dtype::F64 } else { Dtype::F32 }
}

pub(super) fn c_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "float",
        Dtype::F64 => "double",
        Dtype::Bf16 => "bf16",
        Dtype::F16 => "f16",
        Dtype::Bool => "unsigned char",
    }
}
