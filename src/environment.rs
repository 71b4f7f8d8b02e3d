//! Environment variables: nowhere else does Rust code read one. `docs/environment.md` lists them.

use std::env::{var, var_os};

/// Variables about kernels on a GPU.
#[cfg(feature = "torch")]
pub mod kernels {
    use std::env::{home_dir, var, var_os};
    use std::ffi::{CStr, CString, OsStr};
    use std::os::unix::ffi::OsStrExt;
    use std::path::{Path, PathBuf};

    /// `DDL_CACHE_DIR`, else `ddl` in the user's cache directory: the place of compiled kernels.
    ///
    /// Fails, with the directory as it was given, if its `~` cannot be expanded.
    pub fn cache_directory() -> Result<Option<PathBuf>, PathBuf> {
        let named = |name: &str| var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        if let Some(given) = named("DDL_CACHE_DIR") {
            return at_home(&given).map(Some).ok_or(given);
        }
        let caches = named("XDG_CACHE_HOME").filter(|path| path.is_absolute());
        Ok(caches.or_else(|| Some(home_dir()?.join(".cache"))).map(|caches| caches.join("ddl")))
    }

    /// The path with `~` or `~user` at its beginning replaced by that home directory; None if there is none.
    fn at_home(path: &Path) -> Option<PathBuf> {
        let mut parts = path.iter();
        let Some(user) = parts.next().and_then(|first| first.as_bytes().strip_prefix(b"~")) else {
            return Some(path.to_owned());
        };
        let home = if user.is_empty() { home_dir() } else { home_of(user) };
        Some(home?.join(parts.as_path()))
    }

    /// The home directory of a user, by the system's list of users.
    fn home_of(user: &[u8]) -> Option<PathBuf> {
        let name = CString::new(user).ok()?;
        let (mut entry, mut found) = (std::mem::MaybeUninit::<libc::passwd>::uninit(), std::ptr::null_mut());
        let mut text = [0; 1 << 14]; // the entry's strings
        // SAFETY: `name` is a terminated string, and `text` has the size that is given.
        let status = unsafe {
            libc::getpwnam_r(name.as_ptr(), entry.as_mut_ptr(), text.as_mut_ptr(), text.len(), &mut found)
        };
        if status != 0 || found.is_null() {
            return None;
        }
        // SAFETY: the user was found, so `found` points to `entry`, whose strings are terminated and in `text`.
        let home = unsafe { CStr::from_ptr((*found).pw_dir) };
        Some(PathBuf::from(OsStr::from_bytes(home.to_bytes())))
    }

    /// `DDL_LOG=debug`: lines on standard error for every kernel.
    pub fn logs_kernels() -> bool {
        var_os("DDL_LOG").is_some_and(|level| level == "debug")
    }

    /// `DDL_PLAN`: choices about a kernel's plan, made by hand; empty if there are none.
    pub fn plan() -> String {
        var("DDL_PLAN").unwrap_or_default()
    }
}

/// `DDL_SIMD`: `portable` or `avx2`, to lower the choice of instructions.
pub fn simd() -> Option<String> {
    var("DDL_SIMD").ok()
}

/// `DDL_THREADS=rayon`: Rayon's threads even if torch's are there.
pub fn wants_rayon() -> bool {
    var_os("DDL_THREADS").is_some_and(|kind| kind == "rayon")
}
