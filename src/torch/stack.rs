//! The dispatcher's stack, from which a call's arguments are taken in the order of the operator's schema.

use super::dispatcher::{Word, dispatcher};
use super::memory::{Owned, dtype_of};
use super::shims::Handle;
use super::source::{Overwritten, Source, placeholder};
use crate::error::{Error, Result};
use crate::tensor::{Dtype, Tensor, dtypes_of};

/// The dispatcher's stack.
pub struct Stack<'a> {
    words: std::slice::Iter<'a, Word>,
    /// the tensors taken, alive until the call ends
    held: Vec<Owned>,
    refused: Option<Error>,
}

impl<'a> Stack<'a> {
    /// refused: why the call is refused whatever its arguments are.
    ///
    /// # Safety
    /// `words` are the arguments that the dispatcher passed, and they are taken in the order of the operator's schema.
    pub unsafe fn new(words: &'a [Word], refused: Option<Error>) -> Stack<'a> {
        Stack { words: words.iter(), held: Vec::with_capacity(words.len()), refused }
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
            return placeholder(name); // not copied for nothing
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
                placeholder(name)
            }
        }
    }
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

    fn overwritten_tensor(&mut self, name: &'static str) -> Overwritten {
        match self.owned().contiguous(name) {
            Ok((tensor, copy, Some(original))) => Overwritten { tensor, copy: Some((copy, original)) },
            Ok((tensor, owned, None)) => {
                self.held.push(owned);
                Overwritten { tensor, copy: None }
            }
            Err(reason) => {
                self.refused.get_or_insert(reason);
                Overwritten { tensor: placeholder(name), copy: None }
            }
        }
    }

    fn optional_tensors(&mut self, name: &'static str) -> Option<Vec<Tensor>> {
        let list = self.optional()?;
        // SAFETY: the schema has a list of tensors here (`Stack::new`), and it is taken once.
        Some(unsafe { self.list(name, list) })
    }

    fn float(&mut self, _: &'static str) -> f64 {
        f64::from_bits(self.word())
    }

    fn optional_float(&mut self, _: &'static str) -> Option<f64> {
        self.optional().map(f64::from_bits)
    }

    fn integer(&mut self, _: &'static str) -> i64 {
        self.word() as i64
    }

    fn boolean(&mut self, _: &'static str) -> bool {
        self.word() as u8 != 0
    }

    fn optional_dtype(&mut self, name: &'static str) -> Option<Dtype> {
        let number = self.optional()? as i32;
        let dtype = dtype_of(number);
        if dtype.is_none() {
            let got = format!("torch's dtype number {number}");
            let expected = dtypes_of(name);
            self.refused.get_or_insert(Error::Dtype { name, expected, got });
        }
        dtype
    }

    fn finish(&mut self) -> Result<()> {
        self.refused.take().map_or(Ok(()), Err)
    }
}
