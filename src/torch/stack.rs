//! The arguments of a call, in the order of the operator's schema, each decoded once.
//!
//! `arguments!` lists a structure's fields in that order. From the list follow what is decoded and what Python
//! compares its own declaration with ([`Argument::declare`]).

use super::dispatcher::{Word, dispatcher};
use super::memory::{Owned, dtype_of};
use super::shims::Handle;
use crate::error::{Error, Result};
use crate::problem::{Incoming, Read, Rewrite};
use crate::tensor::{Dtype, Tensor};

/// Arguments in the order of the schema: on the dispatcher's stack, or described by Python.
///
/// A tensor that is refused is replaced by an empty one, and the reason kept for [`Source::finish`]: everything on
/// the stack is owned, so all of it has to be taken.
pub trait Source {
    fn tensor(&mut self, name: &'static str) -> Tensor;
    fn optional_tensor(&mut self, name: &'static str) -> Option<Tensor>;
    /// Takes a tensor that may stand in for an absent one.
    fn saved_tensor(&mut self, name: &'static str) -> Option<Tensor>;
    fn overwritten_tensor(&mut self, name: &'static str) -> Overwritten;
    fn tensors(&mut self, name: &'static str) -> Vec<Tensor>;
    fn optional_tensors(&mut self, name: &'static str) -> Option<Vec<Tensor>>;
    fn float(&mut self) -> f64;
    fn optional_float(&mut self) -> Option<f64>;
    fn integer(&mut self) -> i64;
    fn boolean(&mut self) -> bool;
    fn optional_dtype(&mut self) -> Option<Dtype>;
    /// Fails with the first reason to refuse an argument.
    fn finish(&mut self) -> Result<()>;
}

/// An argument, or a structure of several.
pub trait Argument: Sized {
    /// Adds its schema to `list`, as in `Tensor? compress`.
    fn declare(name: &str, list: &mut Vec<String>);
    fn take(name: &'static str, source: &mut dyn Source) -> Self;
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

/// A tensor that the forward saved; None if it was absent.
pub struct Saved(pub Option<Tensor>);

macro_rules! single {
    ($($kind:ty, $schema:literal, |$source:ident, $name:ident| $take:expr;)*) => { $(
        impl Argument for $kind {
            fn declare(name: &str, list: &mut Vec<String>) {
                list.push(format!(concat!($schema, " {}"), name));
            }
            fn take($name: &'static str, $source: &mut dyn Source) -> $kind {
                $take
            }
        }
    )* };
}

single! {
    Tensor, "Tensor", |source, name| source.tensor(name);
    Option<Tensor>, "Tensor?", |source, name| source.optional_tensor(name);
    Saved, "Tensor", |source, name| Saved(source.saved_tensor(name));
    Overwritten, "Tensor(a!)", |source, name| source.overwritten_tensor(name);
    Vec<Tensor>, "Tensor[]", |source, name| source.tensors(name);
    Option<Vec<Tensor>>, "Tensor[]?", |source, name| source.optional_tensors(name);
    f64, "float", |source, _name| source.float();
    Option<f64>, "float?", |source, _name| source.optional_float();
    i64, "int", |source, _name| source.integer();
    bool, "bool", |source, _name| source.boolean();
    Option<Dtype>, "ScalarType?", |source, _name| source.optional_dtype();
}

/// Implements [`Argument`] for a structure, or defines the structure as well.
macro_rules! arguments {
    ($group:ident { $($field:ident: $kind:ty),* $(,)? }) => {
        impl $crate::torch::stack::Argument for $group {
            fn declare(_: &str, list: &mut Vec<String>) {
                $(<$kind as $crate::torch::stack::Argument>::declare(stringify!($field), list);)*
            }
            fn take(_: &'static str, source: &mut dyn $crate::torch::stack::Source) -> $group {
                $group { $($field: <$kind as $crate::torch::stack::Argument>::take(stringify!($field), source)),* }
            }
        }
    };
    (struct $group:ident { $($field:ident: $kind:ty),* $(,)? }) => {
        pub struct $group { $($field: $kind),* }
        $crate::torch::stack::arguments! { $group { $($field: $kind),* } }
    };
}
pub(super) use arguments;

arguments! { Rewrite { direction: Tensor, value: Tensor, gate: Tensor, eps_k: f64 } }

arguments! { Read {
    compress: Option<Tensor>,
    norm_weight: Option<Tensor>,
    norm_eps: Option<f64>,
    gate_weight: Option<Tensor>,
    gate_bias: Option<Tensor>,
    value_weight: Option<Tensor>,
    value_bias: Option<Tensor>,
    value_scale: Option<f64>,
    value_from_compressed: bool,
} }

arguments! { Incoming {
    grad_new_state: Option<Tensor>,
    grad_context: Option<Tensor>,
    grad_new_value: Option<Tensor>,
    grad_new_gate: Option<Tensor>,
} }

/// The dispatcher's stack.
pub struct Stack<'a> {
    words: std::slice::Iter<'a, Word>,
    /// the tensors taken, alive until the call ends
    held: Vec<Owned>,
    refused: Option<Error>,
}

impl<'a> Stack<'a> {
    /// # Safety
    /// `words` are the arguments that the dispatcher passed, and they are taken in the order of the operator's schema.
    pub unsafe fn new(words: &'a [Word]) -> Stack<'a> {
        Stack { words: words.iter(), held: Vec::with_capacity(words.len()), refused: None }
    }

    fn word(&mut self) -> Word {
        *self.words.next().expect("the schema has as many arguments as the declaration")
    }

    fn optional(&mut self) -> Option<Word> {
        let word = self.word();
        // SAFETY: the schema has an optional here (`Stack::new`).
        unsafe { dispatcher().optional(word) }
    }

    fn owned(&mut self) -> Owned {
        let word = self.word();
        // SAFETY: the schema has a tensor here (`Stack::new`).
        unsafe { Owned::new(word as Handle) }
    }

    fn hold(&mut self, name: &'static str, owned: Owned) -> Tensor {
        if self.refused.is_some() {
            return nothing(name); // not copied for nothing
        }
        let viewed = owned.contiguous(name);
        self.keep(name, viewed.map(|(tensor, owned, _)| (tensor, owned)))
    }

    /// Takes a list of tensors.
    ///
    /// # Safety
    /// `list` is one that this call owns, and that is not used again.
    unsafe fn list(&mut self, name: &'static str, list: Word) -> Vec<Tensor> {
        // SAFETY: the contract above.
        let words = unsafe { dispatcher().list(list) };
        // All are owned before the first is looked at.
        // SAFETY: the elements are tensors, which are owned one by one.
        let owned: Vec<Owned> = words.into_iter().map(|word| unsafe { Owned::new(word as Handle) }).collect();
        owned.into_iter().map(|owned| self.hold(name, owned)).collect()
    }

    fn keep(&mut self, name: &'static str, viewed: Result<(Tensor, Owned)>) -> Tensor {
        match viewed {
            Ok((tensor, owned)) => {
                self.held.push(owned);
                tensor
            }
            Err(reason) => {
                self.refused.get_or_insert(reason);
                nothing(name)
            }
        }
    }
}

/// An empty tensor in place of one that is refused.
fn nothing(name: &'static str) -> Tensor {
    Tensor::fake(name, vec![0], Dtype::F32, 0)
}

impl Source for Stack<'_> {
    fn tensor(&mut self, name: &'static str) -> Tensor {
        let owned = self.owned();
        self.hold(name, owned)
    }

    fn optional_tensor(&mut self, name: &'static str) -> Option<Tensor> {
        let handle = self.optional()? as Handle;
        // SAFETY: an optional tensor is owned, too.
        let owned = unsafe { Owned::new(handle) };
        Some(self.hold(name, owned))
    }

    fn saved_tensor(&mut self, name: &'static str) -> Option<Tensor> {
        let owned = self.owned();
        (!owned.is_absent()).then(|| self.hold(name, owned))
    }

    fn overwritten_tensor(&mut self, name: &'static str) -> Overwritten {
        match self.owned().contiguous(name) {
            Ok((tensor, copy, Some(original))) => Overwritten { tensor, copy: Some((copy, original)) },
            Ok((tensor, owned, None)) => {
                self.held.push(owned);
                Overwritten { tensor, copy: None }
            }
            Err(reason) => {
                self.refused.get_or_insert(reason);
                Overwritten { tensor: nothing(name), copy: None }
            }
        }
    }

    fn tensors(&mut self, name: &'static str) -> Vec<Tensor> {
        let list = self.word();
        // SAFETY: the schema has a list of tensors here (`Stack::new`), and it is taken once.
        unsafe { self.list(name, list) }
    }

    fn optional_tensors(&mut self, name: &'static str) -> Option<Vec<Tensor>> {
        let list = self.optional()?;
        // SAFETY: as above.
        Some(unsafe { self.list(name, list) })
    }

    fn float(&mut self) -> f64 {
        f64::from_bits(self.word())
    }

    fn optional_float(&mut self) -> Option<f64> {
        self.optional().map(f64::from_bits)
    }

    fn integer(&mut self) -> i64 {
        self.word() as i64
    }

    fn boolean(&mut self) -> bool {
        self.word() as u8 != 0
    }

    fn optional_dtype(&mut self) -> Option<Dtype> {
        let number = self.optional()? as i32;
        let dtype = dtype_of(number);
        if dtype.is_none() {
            let got = format!("torch's dtype number {number}");
            let expected = "float32, float64, bfloat16 or float16".into();
            self.refused.get_or_insert(Error::Dtype { name: "context_dtype", expected, got });
        }
        dtype
    }

    fn finish(&mut self) -> Result<()> {
        self.refused.take().map_or(Ok(()), Err)
    }
}
