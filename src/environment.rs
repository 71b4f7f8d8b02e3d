//! Environment variables: nowhere else does Rust code read one. `docs/environment.md` lists them.

use std::env::{home_dir, var, var_os};
use std::path::PathBuf;

/// `DDL_CACHE_DIR`, else `ddl` in the user's cache directory: the place of compiled kernels.
pub fn cache_directory() -> Option<PathBuf> {
    let named = |name: &str| var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    named("DDL_CACHE_DIR").or_else(|| {
        let caches = named("XDG_CACHE_HOME").filter(|path| path.is_absolute());
        Some(caches.or_else(|| Some(home_dir()?.join(".cache")))?.join("ddl"))
    })
}

/// `DDL_LOG=debug`: lines on standard error for every kernel.
pub fn logs_kernels() -> bool {
    var_os("DDL_LOG").is_some_and(|level| level == "debug")
}

/// `DDL_PLAN`: choices about a kernel's plan, made by hand; empty if there are none.
pub fn plan() -> String {
    var("DDL_PLAN").unwrap_or_default()
}

/// `DDL_SIMD`: `portable` or `avx2`, to lower the choice of instructions.
pub fn simd() -> Option<String> {
    var("DDL_SIMD").ok()
}

/// `DDL_THREADS=rayon`: Rayon's threads even if torch's are there.
pub fn wants_rayon() -> bool {
    var_os("DDL_THREADS").is_some_and(|kind| kind == "rayon")
}
