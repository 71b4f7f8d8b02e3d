//! Shared libraries that are opened at run time: torch's, NVIDIA's driver and compiler. None is linked.

use std::error::Error;
use std::ffi::{CStr, c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::PathBuf;

use libloading::os::unix;

/// An open library. It is never closed, because its functions are kept as long as the process lives.
pub struct Library {
    handle: ManuallyDrop<unix::Library>,
    name: String,
}

/// The address of a function of any type.
pub type Symbol = unsafe extern "C" fn();

impl Library {
    /// Opens a library by path, or by the name under which the system finds it.
    pub fn open(name: &str) -> Result<Library, String> {
        Library::open_with(name, libc::RTLD_NOW)
    }

    /// Returns the library if this process already has it open, under exactly this name.
    pub fn already_open(name: &str) -> Option<Library> {
        Library::open_with(name, libc::RTLD_NOW | libc::RTLD_NOLOAD).ok()
    }

    /// Returns the global scope, where the loader looks first: the program and preloaded libraries.
    pub fn global() -> Library {
        Library { handle: ManuallyDrop::new(unix::Library::this()), name: "this process".into() }
    }

    fn open_with(name: &str, flags: c_int) -> Result<Library, String> {
        // SAFETY: the libraries named here do nothing harmful when they are loaded.
        let opened = unsafe { unix::Library::open(Some(name), flags) };
        // libloading's own message is "dlopen failed"; the system's reason is its source.
        let reason = |error: libloading::Error| error.source().unwrap_or(&error).to_string();
        Ok(Library { handle: ManuallyDrop::new(opened.map_err(reason)?), name: name.into() })
    }

    pub fn symbol(&self, name: &str) -> Result<Symbol, String> {
        // SAFETY: the address is only copied. The caller gives it its type.
        let found = unsafe { self.handle.get::<Option<Symbol>>(name) };
        let address = found.ok().and_then(|symbol| *symbol);
        address.ok_or_else(|| format!("{} has no `{name}`", self.name))
    }
}

/// Returns the file that a function was loaded from, which libloading does not tell.
pub fn file_of(function: *const c_void) -> Option<PathBuf> {
    let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `dladdr` takes any address and fills the record if it returns nonzero.
    let found = unsafe { (libc::dladdr(function, found.as_mut_ptr()) != 0).then(|| found.assume_init())? };
    if found.dli_fname.is_null() {
        return None;
    }
    // SAFETY: a terminated string of the loader.
    let name = unsafe { CStr::from_ptr(found.dli_fname) };
    Some(PathBuf::from(name.to_str().ok()?))
}

/// A table of C functions, all of which are looked up when it is made: a missing one is an error, not a panic.
macro_rules! functions {
    ($(#[$about:meta])* $table:ident { $(fn $name:ident($($argument:ty),* $(,)?) $(-> $result:ty)?;)* }) => {
        $(#[$about])*
        #[allow(non_snake_case)]
        pub struct $table { $(pub $name: unsafe extern "C-unwind" fn($($argument),*) $(-> $result)?,)* }

        impl $table {
            fn load(library: &$crate::library::Library) -> std::result::Result<$table, String> {
                use $crate::library::Symbol;
                Ok($table { $($name: {
                    let address = library.symbol(stringify!($name))?;
                    // SAFETY: the declaration here is the one in the library's header.
                    unsafe {
                        std::mem::transmute::<Symbol, unsafe extern "C-unwind" fn($($argument),*) $(-> $result)?>(address)
                    }
                },)* })
            }
        }
    };
}
pub(crate) use functions;
