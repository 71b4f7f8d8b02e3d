//! What a kernel of `expand` is compiled for.

use super::rewrite_read::{Compress, Kernel, Parts, RewriteRead, Types, arithmetic, c_name};
use crate::problem::{self, ParameterSums};
use crate::tensor::Dtype;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Expand {
    pub kernel: Kernel,
    pub d: usize,
    pub m: usize,
    /// 1 for a repetition
    pub taps: usize,
    pub state: Dtype,
    pub x: Dtype,
    /// of a convolution; None: a repetition
    pub weight: Option<Dtype>,
    /// sequences hold several documents
    pub documents: bool,
    /// every pointer is a multiple of 16 bytes
    pub aligned: bool,
}

impl Expand {
    pub fn new(kernel: Kernel, expand: &problem::Expand, state: Dtype) -> Expand {
        Expand {
            kernel,
            d: expand.sizes.d,
            m: expand.sizes.m,
            taps: expand.taps(),
            state,
            x: expand.x.dtype,
            weight: expand.weight.as_ref().map(|weight| weight.dtype),
            documents: expand.document_starts.is_some(),
            aligned: true,
        }
    }

    /// Returns the kernel that adds up the sums of this backward's blocks: that of a token read with nothing but its
    /// weight, whose sums lie in the same order.
    pub fn reduce(&self) -> RewriteRead {
        let real = self.real();
        RewriteRead {
            kernel: Kernel::Reduce,
            d: self.d,
            m: self.m,
            taps: self.taps,
            types: Types { compress: self.weight.unwrap_or(real), ..Types::all(real) },
            rewrite: false,
            rewrites: 1,
            erase: problem::Erase::default(),
            next: 1,
            compress: Compress::Token,
            parts: Parts::default(),
            sums: ParameterSums { compress: true, ..ParameterSums::default() },
            chain: false,
            cached: false,
            documents: false,
            aligned: true,
        }
    }

    /// Returns the type of the arithmetic.
    pub fn real(&self) -> Dtype {
        arithmetic(self.state)
    }

    pub(super) fn defines(&self) -> Vec<(&'static str, String)> {
        vec![
            ("REAL", c_name(self.real()).into()),
            ("STATE_T", c_name(self.state).into()),
            ("D", self.d.to_string()),
            ("M", self.m.to_string()),
            ("TAPS", self.taps.to_string()),
            ("X_T", c_name(self.x).into()),
            ("WEIGHT_T", c_name(self.weight.unwrap_or(self.real())).into()),
            ("CONV", u8::from(self.weight.is_some()).to_string()),
            ("DOCUMENTS", u8::from(self.documents).to_string()),
        ]
    }
}
