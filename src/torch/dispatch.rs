//! Registration with torch's dispatcher, the entry that it calls, and the exit by which a call is refused.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::dispatcher::{Kernel, Word, dispatcher, find};
use super::operators;
use super::run::{Caller, Run};
use super::shims::shims;
use super::source::{Listing, Source};
use super::stack::Stack;
use crate::error::{Error, Result};

/// Takes an operator's arguments and runs it.
type Operator = fn(&mut dyn Source, &mut dyn Caller) -> Result<()>;

/// An operator as torch and Python see it.
pub struct Entry {
    pub name: &'static str,
    /// names, apart by spaces
    pub outputs: &'static str,
    pub run: Operator,
    /// the dispatch keys of its kernel
    keys: &'static [&'static CStr],
}

pub static OPERATORS: [Entry; 11] = [
    entry("rewrite", operators::rewrite, "new_state stats"),
    entry("read", operators::read, "context new_value new_gate stats compressed new_pending"),
    entry(
        "rewrite_read",
        operators::rewrite_read,
        "new_state context new_value new_gate stats compressed new_pending",
    ),
    entry("expand", operators::expand, "state new_before"),
    entry("rewrite_backward", operators::rewrite_backward, "grad_state grad_direction grad_value grad_gate"),
    entry(
        "read_backward",
        operators::read_backward,
        "grad_state grad_compress grad_norm_weight grad_gate_weight grad_gate_bias grad_value_weight \
         grad_value_bias",
    ),
    entry(
        "rewrite_read_backward",
        operators::rewrite_read_backward,
        "grad_state grad_direction grad_value grad_gate grad_compress grad_norm_weight grad_gate_weight \
         grad_gate_bias grad_value_weight grad_value_bias",
    ),
    Entry {
        keys: &[c"CPU"],
        ..entry(
            "rewrite_read_backward_",
            operators::overwriting_backward,
            "grad_direction grad_value grad_gate grad_compress grad_norm_weight grad_gate_weight \
             grad_gate_bias grad_value_weight grad_value_bias",
        )
    },
    entry("expand_backward", operators::expand_backward, "grad_x grad_weight"),
    Entry { keys: &[c"CPU"], ..entry("delta_rule", operators::delta_rule, "y final_state errors states") },
    Entry {
        keys: &[c"CPU"],
        ..entry(
            "delta_rule_backward",
            operators::delta_rule_backward,
            "grad_q grad_k grad_v grad_beta grad_g grad_initial_state",
        )
    },
];

/// The kernel of each operator, in the same order: a function that torch calls knows its operator by its type alone.
#[rustfmt::skip]
const KERNELS: [[Kernel; 2]; OPERATORS.len()] = [
    kernels::<0>(), kernels::<1>(), kernels::<2>(), kernels::<3>(), kernels::<4>(), kernels::<5>(),
    kernels::<6>(), kernels::<7>(), kernels::<8>(), kernels::<9>(), kernels::<10>(),
];

/// The kernel of an operator whose derivative Python records before it is called, and one that is refused where gradients
/// are recorded: the overload `kernel` of a forward, around which python/ddl/ops/autograd.py records them, and a backward.
const fn kernels<const AT: usize>() -> [Kernel; 2] {
    [kernel::<AT, false>, kernel::<AT, true>]
}

const fn entry(name: &'static str, run: Operator, outputs: &'static str) -> Entry {
    Entry { name, outputs, run, keys: &[c"CPU", c"CUDA"] }
}

impl Entry {
    fn is_backward(&self) -> bool {
        self.name.trim_end_matches('_').ends_with("_backward")
    }

    fn records_no_gradients(&self) -> String {
        let name = self.name;
        let (overload, hint) = match self.is_backward() {
            true => ("", String::new()),
            false => (".kernel", format!(": `torch.ops.ddl.{name}` does")),
        };
        format!(
            "`torch.ops.ddl.{name}{overload}` must be called under torch.no_grad(), because it records no gradients, got \
             a call outside of it{hint}"
        )
    }

    /// Returns its arguments' schemas, in order.
    pub fn arguments(&self) -> Vec<String> {
        let mut listing = Listing::default();
        let stopped = (self.run)(&mut listing, &mut Run::default());
        assert!(stopped.is_err(), "an operator takes all its arguments first");
        listing.0
    }
}

/// Registers the kernels of all operators; their schemas are declared already.
pub fn register(libtorch_cpu: &str) -> std::result::Result<(), String> {
    let dispatcher = find(libtorch_cpu)?;
    let name = |text: String| CString::new(text).expect("names have no zero");
    OPERATORS.iter().zip(KERNELS).try_for_each(|(operator, [recorded, kernel])| {
        operator.keys.iter().try_for_each(|key| {
            if operator.is_backward() {
                return dispatcher.register(key, &name(operator.name.into()), kernel);
            }
            dispatcher.register(key, &name(operator.name.into()), recorded)?;
            dispatcher.register(key, &name(format!("{}.kernel", operator.name)), kernel)
        })
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
    let refusal = unsafe { call(&OPERATORS[AT], OUTSIDE_AUTOGRAD, stack, arguments as usize, length) };
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
    operator: &Entry,
    outside_autograd: bool,
    stack: *mut Word,
    arguments: usize,
    length: usize,
) -> *const c_char {
    let done = catch_unwind(AssertUnwindSafe(|| {
        let refused = outside_autograd && shims().grad_mode_is_enabled();
        let refused = refused.then(|| Error::Argument(operator.records_no_gradients()));
        // SAFETY: the contract above.
        let words = unsafe { std::slice::from_raw_parts_mut(stack, length) };
        let mut this = Run::dispatched();
        // SAFETY: the contract above.
        let mut source = unsafe { Stack::new(&words[..arguments], refused) };
        (operator.run)(&mut source, &mut this)?;
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

#[cfg(test)]
mod tests {
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
