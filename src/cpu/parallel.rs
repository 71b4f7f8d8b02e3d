//! Runs the parts of an operator on the threads that torch already has.
//!
//! Torch's OpenMP workers spin for milliseconds after each of its parallel regions, so a second pool would
//! compete for the same cores in the middle of a training step (measured: benchmarks/LOG.md). On Linux torch's
//! `#pragma omp parallel` compiles to libgomp's `GOMP_parallel`, which is looked up in the running process.
//! Without it, rayon is used. If another OpenMP is preloaded, the loader gives its `GOMP_parallel` to torch and to us.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crate::environment;

/// Runs `work` once for every item, on up to `threads` threads. Returns the first failure; some items may then
/// not have run.
pub fn for_each<T: Send, E: Send>(
    items: Vec<T>,
    threads: usize,
    work: impl Fn(T) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let threads = threads.min(items.len());
    if threads <= 1 {
        return items.into_iter().try_for_each(work);
    }
    let Some(gomp_parallel) = gomp_parallel() else {
        return rayon_for_each(items, threads, work);
    };
    let queue = Queue {
        items: items.into_iter().map(|item| Mutex::new(Some(item))).collect(),
        next: AtomicUsize::new(0),
        outcome: Mutex::new(Ok(Ok(()))),
        work: &work,
    };
    // SAFETY: `drain` has the signature that GOMP_parallel calls and never unwinds into C. The queue outlives
    // the region, which ends before GOMP_parallel returns.
    unsafe {
        gomp_parallel(drain_extern(&queue), (&raw const queue).cast_mut().cast(), threads as u32, 0);
    }
    let outcome = queue.outcome.into_inner().expect("no thread holds the lock");
    outcome.unwrap_or_else(|panic| resume_unwind(panic))
}

struct Queue<'a, T, F, E> {
    items: Vec<Mutex<Option<T>>>,
    next: AtomicUsize,
    /// the first panic or failure
    outcome: Mutex<std::thread::Result<Result<(), E>>>,
    work: &'a F,
}

type Body = unsafe extern "C" fn(*mut c_void);
type GompParallel = unsafe extern "C" fn(Body, *mut c_void, u32, u32);

fn drain_extern<T: Send, E: Send, F: Fn(T) -> Result<(), E> + Sync>(_: &Queue<'_, T, F, E>) -> Body {
    drain::<T, E, F>
}

unsafe extern "C" fn drain<T: Send, E: Send, F: Fn(T) -> Result<(), E> + Sync>(queue: *mut c_void) {
    // SAFETY: `for_each` passes its own queue, which is Sync: items behind locks, shared work.
    let queue = unsafe { &*queue.cast::<Queue<'_, T, F, E>>() };
    while let Some(slot) = queue.items.get(queue.next.fetch_add(1, Ordering::Relaxed)) {
        let item = slot.lock().ok().and_then(|mut slot| slot.take());
        let outcome = catch_unwind(AssertUnwindSafe(|| item.map_or(Ok(()), queue.work)));
        if matches!(outcome, Ok(Ok(()))) {
            continue;
        }
        if let Ok(mut first) = queue.outcome.lock()
            && matches!(*first, Ok(Ok(())))
        {
            *first = outcome;
        }
    }
}

/// Looks up `GOMP_parallel` in the process's global scope, where torch's libgomp is, behind a preloaded one. Torch may
/// be loaded after the first call.
fn gomp_parallel() -> Option<GompParallel> {
    static FOUND: OnceLock<GompParallel> = OnceLock::new();
    if FOUND.get().is_none() && cfg!(target_os = "linux") && !environment::wants_rayon() {
        // SAFETY: `dlsym` only looks the name up.
        let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"GOMP_parallel".as_ptr()) };
        // SAFETY: if present, the symbol has had this signature since GCC 4.9; a null pointer becomes None.
        let found = unsafe { std::mem::transmute::<*mut c_void, Option<GompParallel>>(symbol) };
        return found.map(|found| *FOUND.get_or_init(|| found));
    }
    FOUND.get().copied()
}

fn rayon_for_each<T: Send, E: Send>(
    items: Vec<T>,
    threads: usize,
    work: impl Fn(T) -> Result<(), E> + Sync,
) -> Result<(), E> {
    use rayon::prelude::*;

    match rayon_pool(threads) {
        // one item at a time, so that no part waits behind a slow one
        Some(pool) => pool.install(|| items.into_par_iter().with_max_len(1).try_for_each(&work)),
        None => items.into_iter().try_for_each(work), // no thread could be started: run serially
    }
}

/// Returns the last call's pool, or a new one if the number of threads or the process has changed.
fn rayon_pool(threads: usize) -> Option<Arc<rayon::ThreadPool>> {
    static POOL: Mutex<Option<(u32, Arc<rayon::ThreadPool>)>> = Mutex::new(None);
    let mut kept = POOL.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let process = std::process::id();
    if let Some((owner, _)) = &*kept
        && *owner != process
    {
        std::mem::forget(kept.take()); // a forked process has none of its threads, so it cannot be shut down
    }
    if kept.as_ref().is_none_or(|(_, pool)| pool.current_num_threads() != threads) {
        let built = rayon::ThreadPoolBuilder::new().num_threads(threads).build().ok();
        *kept = built.map(|pool| (process, Arc::new(pool)));
    }
    kept.as_ref().map(|(_, pool)| pool.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_worked_on_once_and_failures_and_panics_come_back() {
        let done: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
        let count = |i: usize| {
            done[i].fetch_add(1, Ordering::Relaxed);
            Ok::<(), ()>(())
        };
        assert_eq!(for_each((0..100).collect(), 3, count), Ok(()));
        assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        for threads in [1, 2] {
            let not_two = |i| if i == 2 { Err("two") } else { Ok(()) };
            assert_eq!(for_each(vec![1, 2, 3], threads, not_two), Err("two"));
            let panics = |i| if i == 2 { panic!("two") } else { Ok::<(), ()>(()) };
            assert!(catch_unwind(|| for_each(vec![1, 2, 3], threads, panics)).is_err());
        }
    }

    #[test]
    fn calls_at_once_share_the_pools_of_every_size() {
        let calls = |caller: usize| {
            for call in 0..50 {
                let done: Vec<AtomicUsize> = (0..10).map(|_| AtomicUsize::new(0)).collect();
                let count = |i: usize| {
                    done[i].fetch_add(1, Ordering::Relaxed);
                    if (i + caller) % 10 == 3 { Err(caller) } else { Ok(()) }
                };
                let threads = 2 + (caller + call) % 3;
                assert_eq!(rayon_for_each((0..10).collect(), threads, count), Err(caller));
                assert!(done.iter().all(|count| count.load(Ordering::Relaxed) <= 1));
            }
        };
        std::thread::scope(|scope| (0..4).for_each(|caller| drop(scope.spawn(move || calls(caller)))));
    }
}
