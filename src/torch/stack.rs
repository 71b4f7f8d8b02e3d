//! The dispatcher's stack, from which a call's arguments are taken in the order of the operator's schema.

use super::dispatcher::{Word, dispatcher};
use super::memory::{Owned, dtype_of};
use super::shims::Handle;
use super::source::{Kind, Source, Value};
use crate::error::{Error, Result};
use crate::tensor::{Tensor, dtypes_of};

/// An argument in an operator's schema.
pub struct Declared {
    name: &'static str,
    kind: Kind,
    is_optional: bool,
    is_overwritten: bool,
}

impl Declared {
    /// Parses a declaration such as `Tensor? compress`, which lives as long as the process.
    pub fn parse(declaration: &'static str) -> std::result::Result<Declared, String> {
        let (kind, name) = declaration.split_once(' ').unwrap_or_default();
        let (is_optional, is_overwritten) = (kind.ends_with('?'), kind.contains('!'));
        let kind = match kind.trim_end_matches('?') {
            "Tensor" | "Tensor(a!)" => Kind::Tensor,
            "Tensor[]" => Kind::Tensors,
            "float" => Kind::Float,
            "int" => Kind::Integer,
            "bool" => Kind::Boolean,
            "ScalarType" => Kind::Dtype,
            _ => return Err(format!("`{declaration}` has a type that no operator takes")),
        };
        Ok(Declared { name, kind, is_optional, is_overwritten })
    }
}

/// The arguments of a call.
pub struct Stack {
    values: Vec<(&'static str, Option<Value>)>,
    /// the tensors taken, alive until the call ends
    held: Vec<Owned>,
    /// (contiguous copy, original) of a tensor that the operator overwrites and that is not contiguous
    overwritten: Option<(Owned, Owned)>,
}

impl Stack {
    /// Takes all words, which this call owns, before the first argument is refused.
    ///
    /// # Safety
    /// `words` are the arguments that the dispatcher passed to an operator with this schema.
    pub unsafe fn take(words: &[Word], schema: &[Declared]) -> Result<Stack> {
        let values = Vec::with_capacity(words.len());
        let mut stack = Stack { values, held: Vec::with_capacity(words.len()), overwritten: None };
        let mut refused = None;
        for (word, declared) in words.iter().zip(schema) {
            // SAFETY: the contract above.
            match unsafe { stack.value(*word, declared) } {
                Ok(value) => stack.values.push((declared.name, value)),
                Err(reason) => _ = refused.get_or_insert(reason),
            }
        }
        refused.map_or(Ok(stack), Err)
    }

    /// # Safety
    /// `word` is an argument that was declared so, and is not used again.
    unsafe fn value(&mut self, mut word: Word, declared: &Declared) -> Result<Option<Value>> {
        if declared.is_optional {
            // SAFETY: the contract above.
            let Some(value) = (unsafe { dispatcher().optional(word) }) else { return Ok(None) };
            word = value;
        }
        // SAFETY: for tensors and the elements of lists, which are owned one by one.
        let owned = |word: Word| unsafe { Owned::new(word as Handle) };
        Ok(Some(match declared.kind {
            Kind::Tensor => Value::Tensor(self.view(declared, owned(word))?),
            Kind::Tensors => {
                // SAFETY: the contract above. All tensors are owned before the first is viewed.
                let list: Vec<Owned> = unsafe { dispatcher().list(word) }.into_iter().map(owned).collect();
                let views = list.into_iter().map(|owned| self.view(declared, owned));
                Value::Tensors(views.collect::<Result<_>>()?)
            }
            Kind::Float => Value::Float(f64::from_bits(word)),
            Kind::Integer => Value::Integer(word as i64),
            Kind::Boolean => Value::Boolean(word as u8 != 0),
            Kind::Dtype => Value::Dtype(dtype_of(word as i32).ok_or_else(|| {
                let (name, got) = (declared.name, format!("torch's dtype number {}", word as i32));
                Error::Dtype { name, expected: dtypes_of(name), got }
            })?),
        }))
    }

    fn view(&mut self, declared: &Declared, owned: Owned) -> Result<Tensor> {
        let (tensor, owned, original) = owned.contiguous(declared.name)?;
        match original.filter(|_| declared.is_overwritten) {
            Some(original) => self.overwritten = Some((owned, original)),
            None => self.held.push(owned),
        }
        Ok(tensor)
    }

    /// Copies the result back if the copy of a tensor was overwritten.
    pub fn copy_back(self) -> Result<()> {
        self.overwritten.map_or(Ok(()), |(copy, original)| original.copy_from(&copy))
    }
}

impl Source for Stack {
    fn take(&mut self, name: &'static str, _: Kind) -> Result<Option<Value>> {
        let found = self.values.iter_mut().find(|(known, _)| *known == name);
        Ok(found.and_then(|(_, value)| value.take()))
    }
}
