//! Lines on stderr.

/// Writes a line to stderr and ignores failures: `eprintln!` would panic if stderr is closed.
pub fn say(line: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "ddl: {line}");
}
