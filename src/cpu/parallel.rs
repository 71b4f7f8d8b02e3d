//! A fixed partition of the tokens, shared out among however many threads there are.
//!
//! The partition depends on the problem alone, never on the thread count, and partial sums are added
//! in the order of the parts: results repeat bit for bit with 1 thread or 64.
//!
//! Threads are those torch already has. Its OpenMP workers spin for milliseconds after each of its own
//! parallel regions, so a second pool next to them would fight for the same cores in the middle of a
//! training step (measured: benchmarks/LOG.md). libgomp's `GOMP_parallel` — what every `#pragma omp
//! parallel` of torch compiles to on Linux — is found in the running process; rayon serves elsewhere.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

/// Ends of the parts of `tokens` tokens: at most 64 parts of at least `smallest` tokens.
pub fn partition(tokens: usize, smallest: usize) -> Vec<usize> {
    let parts = (tokens / smallest).clamp(1, 64);
    (0..=parts).map(|part| (tokens as u128 * part as u128 / parts as u128) as usize).collect()
}

/// Runs `work` once for every item, on up to `threads` threads; each item goes to exactly one.
pub fn for_each<T: Send>(items: Vec<T>, threads: usize, work: impl Fn(T) + Sync) {
    let threads = threads.min(items.len());
    if threads <= 1 {
        return items.into_iter().for_each(work);
    }
    let Some(gomp_parallel) = gomp_parallel() else {
        return rayon_for_each(items, threads, work);
    };
    let queue = Queue {
        items: items.into_iter().map(|item| Mutex::new(Some(item))).collect(),
        next: AtomicUsize::new(0),
        panicked: Mutex::new(None),
        work: &work,
    };
    // SAFETY: `drain` has the signature GOMP_parallel calls, unwinds nothing into C, and the queue
    // outlives the region, which ends before GOMP_parallel returns.
    unsafe {
        gomp_parallel(drain_extern(&queue), (&raw const queue).cast_mut().cast(), threads as u32, 0);
    }
    if let Some(panic) = queue.panicked.into_inner().expect("no thread holds the lock") {
        std::panic::resume_unwind(panic);
    }
}

struct Queue<'a, T, F> {
    items: Vec<Mutex<Option<T>>>,
    next: AtomicUsize,
    panicked: Mutex<Option<Box<dyn std::any::Any + Send>>>,
    work: &'a F,
}

type Body = unsafe extern "C" fn(*mut c_void);
type GompParallel = unsafe extern "C" fn(Body, *mut c_void, u32, u32);

fn drain_extern<T: Send, F: Fn(T) + Sync>(_queue: &Queue<'_, T, F>) -> Body {
    drain::<T, F>
}

unsafe extern "C" fn drain<T: Send, F: Fn(T) + Sync>(queue: *mut c_void) {
    // SAFETY: `for_each` passes its own queue, which is Sync: items behind locks, shared work.
    let queue = unsafe { &*queue.cast::<Queue<'_, T, F>>() };
    while let Some(slot) = queue.items.get(queue.next.fetch_add(1, Ordering::Relaxed)) {
        let item = slot.lock().ok().and_then(|mut slot| slot.take());
        let outcome = catch_unwind(AssertUnwindSafe(|| item.map(queue.work)));
        if let (Err(panic), Ok(mut seen)) = (outcome, queue.panicked.lock()) {
            seen.get_or_insert(panic);
        }
    }
}

/// torch's libgomp, if this process has one in its global scope.
fn gomp_parallel() -> Option<GompParallel> {
    static FOUND: OnceLock<Option<GompParallel>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        if !cfg!(target_os = "linux") || std::env::var_os("DDL_THREADS").is_some_and(|v| v == "rayon") {
            return None;
        }
        // SAFETY: a lookup; the symbol, when present, has had this signature since GCC 4.9.
        let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"GOMP_parallel".as_ptr()) };
        // SAFETY: as above; a null pointer becomes None.
        unsafe { std::mem::transmute::<*mut c_void, Option<GompParallel>>(symbol) }
    })
}

fn rayon_for_each<T: Send>(items: Vec<T>, threads: usize, work: impl Fn(T) + Sync) {
    use rayon::prelude::*;

    static POOL: Mutex<Option<(usize, std::sync::Arc<rayon::ThreadPool>)>> = Mutex::new(None);
    let pool = {
        let mut kept = POOL.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match kept.as_ref() {
            Some((size, pool)) if *size == threads => Some(pool.clone()),
            _ => {
                let built = rayon::ThreadPoolBuilder::new().num_threads(threads).build().ok();
                let built = built.map(std::sync::Arc::new);
                *kept = built.clone().map(|pool| (threads, pool));
                built
            }
        }
    };
    match pool {
        // one item at a time, so that a slow part is not queued behind another
        Some(pool) => pool.install(|| items.into_par_iter().with_max_len(1).for_each(&work)),
        None => items.into_iter().for_each(work), // no threads to be had: slower, still right
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_all_tokens_in_order() {
        for tokens in [0, 1, 63, 64, 129, 100_000] {
            let ends = partition(tokens, 64);
            assert_eq!((ends[0], *ends.last().unwrap()), (0, tokens));
            assert!(ends.windows(2).all(|pair| pair[0] <= pair[1]) && ends.len() <= 65);
        }
    }

    #[test]
    fn every_item_is_worked_on_once_and_panics_come_back() {
        let done: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
        for_each((0..100).collect(), 3, |i: usize| {
            done[i].fetch_add(1, Ordering::Relaxed);
        });
        assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        let panic = catch_unwind(|| for_each(vec![1, 2, 3], 2, |i| assert!(i != 2, "two")));
        assert!(panic.is_err());
    }
}
