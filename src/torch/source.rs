//! The arguments of a call by name, wherever they come from: the dispatcher's stack, or Python.

use crate::error::{Error, Result};
use crate::tensor::{Dtype, Tensor};

/// A Rust type of arguments.
pub trait Argument: Sized {
    const KIND: Kind;
    /// None for a value of another kind.
    fn of(value: Value) -> Option<Self>;
}

macro_rules! arguments {
    ($($kind:ident($type:ty)),+) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kind { $($kind),+ }

        pub enum Value { $($kind($type)),+ }

        $(impl Argument for $type {
            const KIND: Kind = Kind::$kind;

            fn of(value: Value) -> Option<Self> {
                if let Value::$kind(value) = value { Some(value) } else { None }
            }
        })+
    };
}
arguments! { Tensor(Tensor), Tensors(Vec<Tensor>), Float(f64), Integer(i64), Boolean(bool), Dtype(Dtype) }

pub trait Source {
    /// Takes an argument; None if it is None or left out.
    fn take(&mut self, name: &'static str, kind: Kind) -> Result<Option<Value>>;
}

impl dyn Source + '_ {
    pub fn optional<T: Argument>(&mut self, name: &'static str) -> Result<Option<T>> {
        let value = self.take(name, T::KIND)?;
        Ok(value.map(|value| T::of(value).expect("schemas have the types that the operators take")))
    }

    /// Takes a number; 0 or false if it is left out.
    pub fn number<T: Argument + Default>(&mut self, name: &'static str) -> Result<T> {
        self.optional(name).map(Option::unwrap_or_default)
    }

    pub fn tensor(&mut self, name: &'static str) -> Result<Tensor> {
        self.optional(name)?.ok_or_else(|| Error::Kind {
            name,
            expected: "a torch.Tensor",
            got: "NoneType".into(),
        })
    }
}
