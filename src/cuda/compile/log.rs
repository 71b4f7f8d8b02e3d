//! Lines on stderr.

/// Whether every kernel that is built or found is written down: DDL_LOG=debug.
pub fn is_debug() -> bool {
    std::env::var_os("DDL_LOG").is_some_and(|level| level == "debug")
}

/// Writes a line to stderr, or nothing if nobody reads that any more (`eprintln!` would panic).
pub fn say(line: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "ddl: {line}");
}
