//! Registration with torch's dispatcher, the entry that it calls, and the exit by which a call is refused.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::dispatcher::{Kernel, Word, dispatcher, find};
use super::operators::{
    CachedExpand, CachedRead, CachedRewriteRead, ExpandBackward, ExpandOperator, Operator,
    OverwritingBackward, ReadBackward, ReadOperator, RewriteBackward, RewriteOperator, RewriteReadBackward,
    RewriteReadOperator, run,
};
use super::run::Run;
use super::stack::{Argument, Source, Stack};
use crate::error::{Error, Result};

/// An operator as torch and Python see it.
pub struct Entry {
    pub name: &'static CStr,
    pub outputs: &'static [&'static str],
    /// its arguments' schemas, in order
    pub arguments: fn() -> Vec<String>,
    /// runs it on arguments from any source
    pub run: fn(&mut dyn Source, &mut Run) -> Result<()>,
    kernel: Kernel,
    keys: &'static [&'static CStr],
}

const EVERYWHERE: &[&CStr] = &[c"CPU", c"CUDA"];

pub static OPERATORS: [Entry; 12] = [
    entry::<RewriteOperator>(EVERYWHERE),
    entry::<ReadOperator>(EVERYWHERE),
    entry::<RewriteReadOperator>(EVERYWHERE),
    entry::<ExpandOperator>(EVERYWHERE),
    entry::<CachedRead>(EVERYWHERE),
    entry::<CachedRewriteRead>(EVERYWHERE),
    entry::<CachedExpand>(EVERYWHERE),
    entry::<RewriteBackward>(EVERYWHERE),
    entry::<ReadBackward>(EVERYWHERE),
    entry::<RewriteReadBackward>(EVERYWHERE),
    entry::<OverwritingBackward>(&[c"CPU"]),
    entry::<ExpandBackward>(EVERYWHERE),
];

const fn entry<O: Operator>(keys: &'static [&'static CStr]) -> Entry {
    let arguments = || {
        let mut list = Vec::new();
        O::Arguments::declare("", &mut list);
        list
    };
    Entry { name: O::NAME, outputs: O::OUTPUTS, arguments, run: run::<O>, kernel: kernel::<O>, keys }
}

/// Registers the kernels of all operators; their schemas are declared already.
pub fn register(libtorch_cpu: &str) -> std::result::Result<(), String> {
    let dispatcher = find(libtorch_cpu)?;
    OPERATORS.iter().try_for_each(|operator| {
        operator.keys.iter().try_for_each(|key| dispatcher.register(key, operator.name, operator.kernel))
    })
}

/// The kernel of an operator. torch throws through this frame, so nothing in it has a destructor.
unsafe extern "C-unwind" fn kernel<O: Operator>(stack: *mut Word, arguments: u64, outputs: u64) {
    let length = arguments.max(outputs) as usize;
    // SAFETY: the dispatcher's stack has room for all arguments and outputs, which this call owns.
    let refusal = unsafe { call::<O>(stack, arguments as usize, length) };
    if !refusal.is_null() {
        // SAFETY: C++ called this frame, the outermost one.
        unsafe { dispatcher().throw(refusal) };
    }
}

/// Runs an operator on the stack. Returns null, or the sentence that says why it was refused.
///
/// # Safety
/// The stack is the dispatcher's, for this operator, and holds `length` words.
unsafe fn call<O: Operator>(stack: *mut Word, arguments: usize, length: usize) -> *const c_char {
    let done = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the contract above.
        let words = unsafe { std::slice::from_raw_parts_mut(stack, length) };
        let mut this = Run::default();
        // SAFETY: the contract above.
        let mut source = unsafe { Stack::new(&words[..arguments]) };
        run::<O>(&mut source, &mut this)?;
        drop(source);
        words
            .iter_mut()
            .zip(this.into_outputs())
            .for_each(|(word, output)| *word = output.into_handle() as Word);
        Ok(())
    }));
    let panicked = |_| {
        Err(Error::Internal("an assertion of ddl-rs failed; please report it with the lines above".into()))
    };
    match done.unwrap_or_else(panicked) {
        Ok(()) => std::ptr::null(),
        Err(reason) => keep(reason),
    }
}

thread_local! {
    /// The last refusal of this thread, and its sentence, which torch copies.
    static REFUSAL: RefCell<(CString, Option<Error>)> = RefCell::default();
}

fn keep(reason: Error) -> *const c_char {
    let sentence = CString::new(reason.to_string().replace('\0', " ")).expect("no zero is left");
    REFUSAL.with_borrow_mut(|refusal| {
        *refusal = (sentence, Some(reason));
        refusal.0.as_ptr()
    })
}

/// Takes this thread's last refusal if its sentence begins `text`, as it does in the exception that torch throws.
pub fn take_refusal(text: &str) -> Option<Error> {
    REFUSAL.with_borrow_mut(|(sentence, reason)| {
        let said = sentence.to_str().is_ok_and(|sentence| text.starts_with(sentence));
        reason.take_if(|_| said)
    })
}
