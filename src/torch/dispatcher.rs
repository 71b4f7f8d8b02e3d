//! The shims that only kernels which torch's dispatcher calls need. Traps of the ABI:
//!
//! - A tensor on the dispatcher's stack is a handle that the callee owns and deletes. So is one that it returns.
//! - An optional is null, or points to a word that C++'s `new` made and that the callee deletes.
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
        fn aoti_torch_library_impl(*mut c_void, *const c_char, Kernel) -> i32;
        fn aoti_torch_check(bool, *const c_char, *const c_char, u32, *const c_char);
        fn torch_list_size(*mut c_void, *mut usize) -> i32;
        fn torch_list_get_item(*mut c_void, usize, *mut Word) -> i32;
        fn torch_delete_list(*mut c_void) -> i32;
    }
}

functions! {
    /// C++'s `operator delete`.
    Delete {
        fn _ZdlPv(*mut c_void);
    }
}

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
    // As torch finds it: that of a preloaded allocator or sanitizer, or else the C++ library's.
    let delete = Delete::load(&Library::global()).or_else(|_| Delete::load(&library))?;
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
            ) | (f.aoti_torch_library_impl)(library, name.as_ptr(), kernel)
        };
        if status == 0 { Ok(()) } else { Err(format!("torch refused the {key:?} kernel of {name:?}")) }
    }

    /// Takes the word that an optional of the stack points to; None if it is null.
    ///
    /// # Safety
    /// `word` is an optional that the caller owns, and does not use again.
    pub unsafe fn optional(&self, word: Word) -> Option<Word> {
        let pointer = word as *mut Word;
        // SAFETY: null, or a word from C++'s `new`, by the contract above.
        let value = unsafe { pointer.as_ref() }.copied()?;
        // SAFETY: as above; it is not read again.
        unsafe { (self.delete._ZdlPv)(pointer.cast()) };
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
