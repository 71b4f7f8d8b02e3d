//! Registration with torch's dispatcher, the entry that it calls, and the exit by which a call is refused.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use super::dispatcher::{Kernel, Word, dispatcher, find};
use super::operators;
use super::run::Run;
use super::source::Source;
use super::stack::{Declared, Stack};
use crate::error::{Error, Result};
use crate::execute::Caller;

/// Takes an operator's arguments and runs it.
pub type Operator = fn(&mut dyn Source, &mut dyn Caller) -> Result<()>;

pub static OPERATORS: [(&str, Operator); 11] = [
    ("rewrite", operators::rewrite),
    ("rewrite_backward", operators::rewrite_backward),
    ("read", operators::read),
    ("read_backward", operators::read_backward),
    ("rewrite_read", operators::rewrite_read),
    ("rewrite_read_backward", operators::rewrite_read_backward),
    ("rewrite_read_backward_", operators::overwriting_backward),
    ("expand", operators::expand),
    ("expand_backward", operators::expand_backward),
    ("delta_rule", operators::delta_rule),
    ("delta_rule_backward", operators::delta_rule_backward),
];

/// The kernels of each operator, in the same order: a function that torch calls knows its operator by its type alone.
#[rustfmt::skip]
const KERNELS: [[Kernel; 2]; OPERATORS.len()] = [
    kernels::<0>(), kernels::<1>(), kernels::<2>(), kernels::<3>(), kernels::<4>(), kernels::<5>(),
    kernels::<6>(), kernels::<7>(), kernels::<8>(), kernels::<9>(), kernels::<10>(),
];

/// The schemas of the operators, in the same order.
static SCHEMAS: [OnceLock<Vec<Declared>>; OPERATORS.len()] = [const { OnceLock::new() }; OPERATORS.len()];

/// The kernel of an operator whose derivative Python records before it is called, and one that is refused where gradients
/// are recorded: the overload `kernel` of a forward, around which python/ddl/ops/autograd.py records them, and a backward.
const fn kernels<const AT: usize>() -> [Kernel; 2] {
    [kernel::<AT, false>, kernel::<AT, true>]
}

fn is_backward(name: &str) -> bool {
    name.trim_end_matches('_').ends_with("_backward")
}

fn records_no_gradients(name: &str) -> Error {
    let (overload, hint) = match is_backward(name) {
        true => ("", String::new()),
        false => (".kernel", format!(": `torch.ops.ddl.{name}` does")),
    };
    Error::Argument(format!(
        "`torch.ops.ddl.{name}{overload}` must be called under torch.no_grad(), because it records no gradients, got \
         a call outside of it{hint}"
    ))
}

/// Registers the kernels of an operator with these arguments, for dispatch keys such as `CPU`. Its schema is declared
/// already.
pub fn register(
    libtorch_cpu: &str,
    name: &str,
    arguments: Vec<String>,
    keys: &[CString],
) -> std::result::Result<(), String> {
    let dispatcher = find(libtorch_cpu)?;
    let at = OPERATORS.iter().position(|(known, _)| *known == name);
    let at = at.ok_or_else(|| format!("`{name}` has no kernel"))?;
    let schema = arguments.into_iter().map(|argument| Declared::parse(argument.leak()));
    let schema = schema.collect::<std::result::Result<_, _>>()?;
    SCHEMAS[at].get_or_init(|| schema);
    let [recorded, kernel] = KERNELS[at];
    let overload = |text: String| CString::new(text).expect("names have no zero");
    keys.iter().try_for_each(|key| {
        if is_backward(name) {
            return dispatcher.register(key, &overload(name.into()), kernel);
        }
        dispatcher.register(key, &overload(name.into()), recorded)?;
        dispatcher.register(key, &overload(format!("{name}.kernel")), kernel)
    })
}

/// The kernel of operator `AT`. torch throws through this frame, so nothing in it has a destructor.
unsafe extern "C-unwind" fn kernel<const AT: usize, const OUTSIDE_AUTOGRAD: bool>(
    stack: *mut Word,
    arguments: u64,
    outputs: u64,
) {
    let length = arguments.max(outputs) as usize;
    // SAFETY: the dispatcher's stack has room for all arguments and outputs, which this call owns.
    let refusal = unsafe { call(AT, OUTSIDE_AUTOGRAD, stack, arguments as usize, length) };
    if !refusal.is_null() {
        // SAFETY: C++ called this frame, the outermost one.
        unsafe { dispatcher().throw(refusal) };
    }
}

/// Runs an operator on the stack. Returns null, or the sentence that says why it was refused.
///
/// # Safety
/// The stack is the dispatcher's, for this operator, and holds `length` words.
unsafe fn call(
    at: usize,
    outside_autograd: bool,
    stack: *mut Word,
    arguments: usize,
    length: usize,
) -> *const c_char {
    let (name, operator) = OPERATORS[at];
    let done = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the contract above.
        let words = unsafe { std::slice::from_raw_parts_mut(stack, length) };
        let (schema, mut this) =
            (SCHEMAS[at].get().expect("torch calls what is registered"), Run::dispatched());
        // SAFETY: the contract above.
        let mut source = unsafe { Stack::take(&words[..arguments], schema) }?;
        if outside_autograd && dispatcher().grad_mode_is_enabled() {
            return Err(records_no_gradients(name));
        }
        operator(&mut source, &mut this)?;
        source.copy_back()?;
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

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    #[test]
    fn every_thread_takes_its_own_refusal() {
        let refuse = |thread: usize| {
            for call in 0..1000 {
                let own = format!("`k` must be {call}, got {thread}");
                // SAFETY: a terminated string, which this thread's next refusal frees.
                let sentence = unsafe { CStr::from_ptr(keep(Error::Argument(own.clone()))) };
                assert_eq!(sentence.to_str(), Ok(own.as_str()));
                assert!(take_refusal("`k` must be another one").is_none());
                let taken = take_refusal(&format!("{own}\nException raised from C++"));
                assert_eq!(taken.map(|reason| reason.to_string()), Some(own.clone()));
                assert!(take_refusal(&own).is_none(), "it is taken once");
            }
        };
        std::thread::scope(|scope| (0..8).for_each(|thread| drop(scope.spawn(move || refuse(thread)))));
    }
}
