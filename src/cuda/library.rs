//! Shared libraries opened while the program runs: NVIDIA's driver and NVRTC, neither of which is linked.

use std::ffi::{CStr, CString, c_void};
use std::path::PathBuf;

/// An open library. It is never closed: what it handed out lives as long as the process.
pub struct Library {
    handle: *mut c_void,
    name: String,
}

// SAFETY: a handle of `dlopen` may be used from any thread.
unsafe impl Send for Library {}
unsafe impl Sync for Library {}

impl Library {
    /// Opens a library by path, or by the name under which the system finds it.
    pub fn open(name: &str) -> Result<Library, String> {
        Library::open_with(name, libc::RTLD_NOW)
    }

    /// The library if this process has it open already, under exactly this name.
    pub fn already_open(name: &str) -> Option<Library> {
        Library::open_with(name, libc::RTLD_NOW | libc::RTLD_NOLOAD).ok()
    }

    fn open_with(name: &str, flags: i32) -> Result<Library, String> {
        let path = CString::new(name).map_err(|_| format!("{name:?} is no file name"))?;
        // SAFETY: a terminated string; the libraries named here do nothing harmful when they are loaded.
        let handle = unsafe { libc::dlopen(path.as_ptr(), flags) };
        if handle.is_null() {
            return Err(last_error());
        }
        Ok(Library { handle, name: name.into() })
    }

    /// The address of a function, which is not null.
    pub fn symbol(&self, name: &str) -> Result<*mut c_void, String> {
        let symbol = CString::new(name).map_err(|_| format!("{name:?} is no symbol"))?;
        // SAFETY: an open handle and a terminated string.
        let address = unsafe { libc::dlsym(self.handle, symbol.as_ptr()) };
        if address.is_null() {
            return Err(format!("{} has no `{name}`", self.name));
        }
        Ok(address)
    }
}

/// The file that a function was loaded from.
pub fn file_of(function: *const c_void) -> Option<PathBuf> {
    let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `dladdr` takes any address and fills the record when it returns nonzero.
    let found = unsafe { (libc::dladdr(function, found.as_mut_ptr()) != 0).then(|| found.assume_init())? };
    if found.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's own terminated string.
    let name = unsafe { CStr::from_ptr(found.dli_fname) };
    Some(PathBuf::from(name.to_str().ok()?))
}

fn last_error() -> String {
    // SAFETY: null, or a terminated string that stays until this thread's next call.
    let message = unsafe { libc::dlerror().as_ref().map(|first| CStr::from_ptr(first)) };
    message.map_or("unknown error".into(), |text| text.to_string_lossy().into_owned())
}

/// A table of C functions, all of them looked up when it is made: a missing one is an error, no panic.
macro_rules! functions {
    ($(#[$about:meta])* $table:ident { $(fn $name:ident($($argument:ty),* $(,)?) -> $result:ty;)* }) => {
        $(#[$about])*
        #[allow(non_snake_case)]
        pub struct $table { $(pub $name: unsafe extern "C" fn($($argument),*) -> $result,)* }

        impl $table {
            pub fn load(library: &$crate::cuda::library::Library) -> std::result::Result<$table, String> {
                Ok($table { $($name: {
                    let address = library.symbol(stringify!($name))?;
                    // SAFETY: the declaration here is the one in the library's header.
                    unsafe { std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn($($argument),*) -> $result>(address) }
                },)* })
            }
        }
    };
}
pub(super) use functions;

#[cfg(test)]
mod tests {
    use super::*;

    functions! {
        Maths {
            fn labs(i64) -> i64;
        }
    }

    functions! {
        #[allow(dead_code)]
        Nothing {
            fn no_such_function(i32) -> i32;
        }
    }

    fn libc_itself() -> Library {
        Library::open(if cfg!(target_os = "macos") { "libSystem.dylib" } else { "libc.so.6" }).unwrap()
    }

    #[test]
    fn functions_are_found_by_name() {
        let maths = Maths::load(&libc_itself()).unwrap();
        // SAFETY: the C library's own declaration.
        assert_eq!(unsafe { (maths.labs)(-7) }, 7);
        assert!(file_of(maths.labs as *const c_void).is_some());
    }

    #[test]
    fn what_is_missing_is_named() {
        let error = Nothing::load(&libc_itself()).err().unwrap();
        assert!(error.ends_with("has no `no_such_function`"), "{error}");
        assert!(Library::open("libno_such_library.so").err().unwrap().contains("libno_such_library.so"));
        assert!(Library::already_open("libno_such_library.so").is_none());
    }
}
