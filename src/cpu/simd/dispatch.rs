//! The choice of an instruction set, made once.
//!
//! A loop over rows implements [`WithSimd`] with an `#[inline(always)]` body. [`dispatch`] compiles that body
//! once for every instruction set and picks at run time.

use std::sync::LazyLock;

use fearless_simd::Level;
use fearless_simd::prelude::*;

use crate::environment;

/// A body of code to run with the best instructions of this machine. A function that it calls must be inlined
/// into it, or that function is compiled without them.
pub trait WithSimd {
    type Output;
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// The widest vectors present, asked of the processor once. `DDL_SIMD=portable` or `=avx2` in the environment
/// lowers the choice, so that every path is tested on one machine.
static LEVEL: LazyLock<Level> = LazyLock::new(|| {
    let present = Level::new();
    match environment::simd().as_deref() {
        Some("portable") => Level::baseline(),
        #[cfg(target_arch = "x86_64")]
        Some("avx2") => present.as_avx2().map_or(present, Simd::level),
        _ => present,
    }
});

/// Runs `body` compiled for the widest vectors present.
#[inline]
pub fn dispatch<B: WithSimd>(body: B) -> B::Output {
    #[cfg(target_arch = "x86_64")]
    match *LEVEL {
        // Three of the four there are: processors with SSE4.2 and no AVX2 are rare, and code is long.
        Level::Avx512(simd) => simd.vectorize(
            #[inline(always)]
            || body.run(simd),
        ),
        Level::Avx2(simd) => simd.vectorize(
            #[inline(always)]
            || body.run(simd),
        ),
        level => {
            let simd = level.as_sse2().expect("every x86-64 processor has SSE2");
            simd.vectorize(
                #[inline(always)]
                || body.run(simd),
            )
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    fearless_simd::dispatch!(*LEVEL, simd => body.run(simd))
}
