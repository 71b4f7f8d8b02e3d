//! The shims that only kernels which torch's dispatcher calls need. Traps of the ABI:
//!
//! - A tensor on the dispatcher's stack is a handle that the callee owns and deletes. So is one that it returns.
//! - An optional is null, or points to a word on torch's heap, which the callee deletes: by a shim since torch 2.13, by
//!   C++'s `operator delete` before.
//! - A list is a handle that the callee owns and deletes; so are the tensors in it, one by one.
//! - A float is its bits, a dtype an i32 and a bool a byte of the word.
//! - `aoti_torch_check` throws.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use super::shims;
use crate::library::{Library, functions};

/// One place of the dispatcher's stack, torch's `StableIValue`.
pub type Word = u64;

/// A kernel as the dispatcher calls it: the stack, then the numbers of its arguments and outputs.
pub type Kernel = unsafe extern "C-unwind" fn(*mut Word, u64, u64);

functions! {
    Functions {
        fn aoti_torch_library_init_impl(*const c_char, *const c_char, *const c_char, u32, *mut *mut c_void) -> i32;
        fn torch_library_impl(*mut c_void, *const c_char, Kernel, u64) -> i32;
        fn aoti_torch_grad_mode_is_enabled() -> bool;
        fn aoti_torch_check(bool, *const c_char, *const c_char, u32, *const c_char);
        fn torch_list_size(*mut c_void, *mut usize) -> i32;
        fn torch_list_get_item(*mut c_void, usize, *mut Word) -> i32;
        fn torch_delete_list(*mut c_void) -> i32;
    }
}

functions! {
    /// Since torch 2.13.
    WordFunctions { fn torch_delete_stable_ivalue(*mut Word) -> i32; }
}

functions! {
    /// C++'s `operator delete`.
    OperatorDelete { fn _ZdlPv(*mut c_void); }
}

/// Deletes the words of optionals.
enum Delete {
    Shim(WordFunctions),
    Operator(OperatorDelete),
}

/// The version of torch whose words this library decodes and encodes: the oldest one that it runs with. Newer versions
/// keep to it for a kernel that names it.
const ABI_VERSION: u64 = 2 << 56 | 10 << 48;

/// The dispatcher of this process.
pub struct Dispatcher {
    functions: Functions,
    delete: Delete,
}

static DISPATCHER: OnceLock<Dispatcher> = OnceLock::new();

/// Finds the shims in `libtorch_cpu`, the path of the library that Python has open.
pub fn find(libtorch_cpu: &str) -> std::result::Result<&'static Dispatcher, String> {
    let library =
        Library::already_open(libtorch_cpu).ok_or_else(|| format!("torch has not opened {libtorch_cpu}"))?;
    shims::find(&library, libtorch_cpu)?;
    let functions = Functions::load(&library)?;
    let delete = match WordFunctions::load(&library) {
        Ok(shim) => Delete::Shim(shim),
        // As torch finds it: that of a preloaded allocator or sanitizer, or else the C++ library's.
        Err(_) => Delete::Operator(
            OperatorDelete::load(&Library::global()).or_else(|_| OperatorDelete::load(&library))?,
        ),
    };
    Ok(DISPATCHER.get_or_init(|| Dispatcher { functions, delete }))
}

/// Returns the dispatcher. Only code that it calls may call this.
pub fn dispatcher() -> &'static Dispatcher {
    DISPATCHER.get().expect("torch calls only what was registered")
}

impl Dispatcher {
    /// Registers a kernel of the library `ddl` for a dispatch key such as `CPU`.
    pub fn register(&self, key: &CStr, name: &CStr, kernel: Kernel) -> std::result::Result<(), String> {
        let f = &self.functions;
        let mut library = null_mut();
        // SAFETY: terminated strings; torch keeps the library for the life of the process.
        let status = unsafe {
            (f.aoti_torch_library_init_impl)(
                c"ddl".as_ptr(),
                key.as_ptr(),
                FILE.as_ptr(),
                line!(),
                &mut library,
            )
        };
        // SAFETY: the library that torch has just made, and a terminated string.
        if status != 0 || unsafe { (f.torch_library_impl)(library, name.as_ptr(), kernel, ABI_VERSION) } != 0
        {
            let refused = format!("torch refused the {key:?} kernel of {name:?}");
            return Err(shims::shims().with_reason(&refused));
        }
        Ok(())
    }

    /// Returns true outside of `torch.no_grad()`.
    pub fn grad_mode_is_enabled(&self) -> bool {
        // SAFETY: it takes nothing.
        unsafe { (self.functions.aoti_torch_grad_mode_is_enabled)() }
    }

    /// Takes the word that an optional of the stack points to; None if it is null.
    ///
    /// # Safety
    /// `word` is an optional that the caller owns, and does not use again.
    pub unsafe fn optional(&self, word: Word) -> Option<Word> {
        let pointer = word as *mut Word;
        // SAFETY: null, or a word on torch's heap, by the contract above.
        let value = unsafe { pointer.as_ref() }.copied()?;
        match &self.delete {
            // SAFETY: as above; it is not read again.
            Delete::Shim(shim) => _ = unsafe { (shim.torch_delete_stable_ivalue)(pointer) },
            // SAFETY: as above.
            Delete::Operator(operator) => unsafe { (operator._ZdlPv)(pointer.cast()) },
        }
        Some(value)
    }

    /// Takes the words of a list, which the caller owns one by one from here on.
    ///
    /// # Safety
    /// `list` is a list that the caller owns, and does not use again.
    pub unsafe fn list(&self, list: Word) -> Vec<Word> {
        let (f, list, mut size) = (&self.functions, list as *mut c_void, 0);
        // SAFETY: the contract above, and room for the result.
        unsafe { (f.torch_list_size)(list, &mut size) };
        let mut words = vec![0; size];
        for (index, word) in words.iter_mut().enumerate() {
            // SAFETY: an index within the list, and room for the result.
            unsafe { (f.torch_list_get_item)(list, index, word) };
        }
        // SAFETY: owned, and not used again.
        unsafe { (f.torch_delete_list)(list) };
        words
    }

    /// Throws a C++ exception, which Python sees as a RuntimeError. No frame that it leaves may have a destructor.
    ///
    /// # Safety
    /// C++ called this thread's outermost Rust frame, which is `extern "C-unwind"`.
    pub unsafe fn throw(&self, sentence: *const c_char) {
        // SAFETY: terminated strings, which torch copies.
        unsafe {
            (self.functions.aoti_torch_check)(false, c"ddl".as_ptr(), FILE.as_ptr(), line!(), sentence);
        }
    }
}

const FILE: &CStr = c"src/torch/dispatcher.rs";
