//! Lines on stderr.

/// Writes a line to stderr, or nothing if nobody reads that any more (`eprintln!` would panic).
pub fn say(line: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "ddl: {line}");
}
