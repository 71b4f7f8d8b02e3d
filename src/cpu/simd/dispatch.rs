//! Chooses an instruction set, once.
//!
//! A loop over rows implements [`WithSimd`] with an `#[inline(always)]` body. [`dispatch`] compiles that body
//! once for every instruction set and picks at run time.

use std::sync::LazyLock;

use fearless_simd::Level;
use fearless_simd::prelude::*;

use super::interleaved::Interleaved;
use crate::environment;

/// Code to run with the widest vectors of this machine. A function that it calls must be inlined, or that
/// function is compiled without them, unless it enters `vectorize` itself.
pub trait WithSimd {
    type Output;
    /// Whether to compile it for AVX-512, too. Code in float64 is left out: it is used to check, and takes much
    /// room.
    const AVX512: bool = true;
    fn run<S: Interleaved>(self, simd: S) -> Self::Output;
}

/// The widest vectors that the processor has, detected once. `DDL_SIMD=portable` or `=avx2` in the environment
/// lowers the choice, so that every path can be tested on one machine.
static LEVEL: LazyLock<Level> = LazyLock::new(|| {
    let present = Level::new();
    match environment::simd().as_deref() {
        Some("portable") => Level::baseline(),
        #[cfg(target_arch = "x86_64")]
        Some("avx2") => present.as_avx2().map_or(present, Simd::level),
        _ => present,
    }
});

/// The name of the vectors in use, for a report.
#[cfg(feature = "python")]
pub fn level_name() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    return match *LEVEL {
        Level::Avx512(_) => "AVX-512",
        level if level.as_avx2().is_some() => "AVX2",
        _ => "SSE2",
    };
    #[cfg(target_arch = "aarch64")]
    return "NEON";
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    "portable"
}

/// Runs `body` compiled for the widest vectors present.
#[inline]
pub fn dispatch<B: WithSimd>(body: B) -> B::Output {
    run_at(*LEVEL, body)
}

/// Runs `body` compiled for the vectors of `level`.
#[inline]
fn run_at<B: WithSimd>(level: Level, body: B) -> B::Output {
    #[cfg(target_arch = "x86_64")]
    match level {
        // SSE4.2 is left out: processors with it and without AVX2 are rare, and each level adds much code.
        Level::Avx512(simd) if B::AVX512 => simd.vectorize(
            #[inline(always)]
            || body.run(simd),
        ),
        level => match level.as_avx2() {
            Some(simd) => simd.vectorize(
                #[inline(always)]
                || body.run(simd),
            ),
            None => {
                let simd = level.as_sse2().expect("every x86-64 processor has SSE2");
                simd.vectorize(
                    #[inline(always)]
                    || body.run(simd),
                )
            }
        },
    }
    #[cfg(not(target_arch = "x86_64"))]
    fearless_simd::dispatch!(level, simd => body.run(simd))
}

/// Runs a body for all kinds of vectors that the processor has.
#[cfg(test)]
pub fn dispatch_all<B: WithSimd>(body: impl Fn() -> B) {
    let present = Level::new();
    run_at(Level::baseline(), body());
    #[cfg(target_arch = "x86_64")]
    if let Some(simd) = present.as_avx2() {
        run_at(simd.level(), body());
    }
    run_at(present, body());
}
