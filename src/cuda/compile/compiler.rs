//! A kernel's device code: from memory, from disk, or compiled now.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::cache::{Binary, Cache, hash};
use super::log::say;
use super::nvrtc::{Nvrtc, Target, nvrtc};
use crate::cuda::kernel::Specialisation;
use crate::cuda::plan::Plan;
use crate::error::{Error, Result};

macro_rules! kernel_files {
    ($($name:literal),* $(,)?) => {
        /// The sources in kernels/, by file name.
        const FILES: &[(&str, &str)] = &[$(($name, include_str!(concat!("../../../kernels/", $name)))),*];
    };
}
kernel_files!(
    "backward.cuh",
    "block_sum.cuh",
    "chain.cuh",
    "common.cuh",
    "config.cuh",
    "earlier_tokens.cuh",
    "expand.cu",
    "expand_by_tap.cuh",
    "forward.cuh",
    "later_tokens.cuh",
    "parameters_bwd.cu",
    "ptx.cuh",
    "reduce.cu",
    "rewrite_read.cuh",
    "rewrite_read_bwd.cu",
    "rewrite_read_fwd.cu",
    "rewrites_bwd.cuh",
    "sums.cuh",
    "tile.cuh",
    "token_stream.cuh",
);

/// A kernel ready to be loaded, and its origin.
#[derive(Clone, Debug)]
pub struct Built {
    pub specialisation: Specialisation,
    pub plan: Plan,
    pub target: Target,
    pub binary: Arc<Binary>,
    pub seconds: f64,
    /// found in memory or on disk
    pub cached: bool,
}

/// Builds a kernel by exactly this plan.
pub(super) fn build_as_planned(specialisation: &Specialisation, plan: Plan, target: Target) -> Result<Built> {
    let nvrtc = nvrtc()?;
    let options = options(specialisation, &plan, target);
    let key = key(specialisation, &options, nvrtc.version, nvrtc.bytes, FILES);
    let (binary, cached) = match remembered(&key) {
        Some(binary) => (binary, true),
        None => {
            let cache = Cache::open()?;
            let stored = cache.as_ref().and_then(|cache| cache.get(&key));
            let cached = stored.is_some();
            let binary = stored.map_or_else(|| compile(nvrtc, specialisation, &options, target), Ok)?;
            if let (Some(cache), false) = (&cache, cached) {
                cache.put(&key, &binary);
            }
            (remember(key, binary), cached)
        }
    };
    Ok(Built { specialisation: *specialisation, plan, target, binary, seconds: 0.0, cached })
}

/// Kernels that this process has compiled or found: for a second GPU, and in case the disk cannot be written.
static MEMORY: Mutex<BTreeMap<String, Arc<Binary>>> = Mutex::new(BTreeMap::new());

fn remembered(key: &str) -> Option<Arc<Binary>> {
    MEMORY.lock().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
}

fn remember(key: String, binary: Binary) -> Arc<Binary> {
    let mut memory = MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
    memory.entry(key).or_insert_with(|| Arc::new(binary)).clone()
}

fn options(specialisation: &Specialisation, plan: &Plan, target: Target) -> Vec<String> {
    let defines = specialisation.defines().into_iter().chain(plan.defines());
    [format!("--gpu-architecture={target}"), "--std=c++17".into(), "--ptxas-options=-v".into()]
        .into_iter()
        .chain(defines.map(|(name, value)| format!("-D{name}={value}")))
        .collect()
}

/// Returns the key of a binary: everything that changes it.
fn key(
    specialisation: &Specialisation,
    options: &[String],
    version: (i32, i32),
    bytes: u64,
    files: &[(&str, &str)],
) -> String {
    let texts: Vec<&[u8]> =
        files.iter().flat_map(|(name, text)| [name.as_bytes(), text.as_bytes()]).collect();
    let (name, (major, minor)) = (specialisation.kernel().name(), version);
    let options = options.join(" ");
    format!("{name}\nnvrtc {major}.{minor}, {bytes} bytes\n{options}\nsources {:032x}\n", hash(&texts))
}

fn compile(
    nvrtc: &Nvrtc,
    specialisation: &Specialisation,
    options: &[String],
    target: Target,
) -> Result<Binary> {
    let (headers, kernels): (Vec<_>, Vec<_>) = FILES.iter().partition(|(name, _)| name.ends_with(".cuh"));
    let file = specialisation.kernel().file();
    let (_, source) =
        kernels.iter().find(|(name, _)| *name == file).expect("every kernel's file is embedded");
    match nvrtc.compile(source, &headers, options, target) {
        Ok((image, log)) => {
            let report = report_on(specialisation.kernel().name(), &log);
            Ok(Binary {
                image,
                registers: number_before(report, " registers"),
                spilled: local_memory(report),
                shared: number_before(report, " bytes smem"),
            })
        }
        Err(log) => Err(Error::Cuda(format!(
            "`{}` did not compile for {target} with NVRTC {}.{}; please report this with what follows: {} {log}",
            specialisation.kernel().name(),
            nvrtc.version.0,
            nvrtc.version.1,
            options.join(" "),
        ))),
    }
}

/// Returns the part of the compiler's report that is about one kernel of the file.
fn report_on<'a>(name: &str, log: &'a str) -> &'a str {
    let mine = log.split_once(&format!("entry function '{name}'")).map_or("", |(_, mine)| mine);
    mine.split("entry function").next().unwrap_or_default()
}

/// Returns the bytes of local memory per thread: spilled registers, and arrays not indexed by constants.
fn local_memory(report: &str) -> u32 {
    number_before(report, " bytes spill stores").max(number_before(report, " bytes stack frame"))
}

/// Returns the number directly before `unit`; 0 if the report has none.
fn number_before(report: &str, unit: &str) -> u32 {
    let before = report.split_once(unit).map_or("", |(before, _)| before);
    let digits = before.rsplit(|c: char| !c.is_ascii_digit()).next();
    digits.and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

impl Built {
    /// Returns the macros as text, for the log and reports.
    pub fn macros(&self) -> String {
        let defines = self.specialisation.defines().into_iter().chain(self.plan.defines());
        defines.map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
    }

    /// Writes a line to stderr.
    pub(super) fn log(&self) {
        let Built { binary, target, seconds, .. } = self;
        say(&format!(
            "{} {} for {target} in {seconds:.2} s: {} registers, {} bytes spilled, \
             {} bytes of shared memory ({})",
            if self.cached { "found" } else { "compiled" },
            self.specialisation.kernel().name(),
            binary.registers,
            binary.spilled,
            binary.shared as usize + self.plan.shared,
            self.macros(),
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernel::Kernel;
    use crate::cuda::plan::Overrides;
    use crate::cuda::plan::samples;
    use crate::tensor::Dtype;

    fn specialisation(kernel: Kernel) -> Specialisation {
        (&samples::specialisation(kernel, 768, 4, 1, Dtype::Bf16)).into()
    }

    fn key_of(
        specialisation: &Specialisation,
        plan: &Plan,
        target: Target,
        files: &[(&str, &str)],
    ) -> String {
        key(specialisation, &options(specialisation, plan, target), (13, 0), 7, files)
    }

    #[test]
    fn the_key_is_of_everything_that_changes_the_binary() {
        let s = specialisation(Kernel::Forward);
        let plan = Plan::new(s, &samples::CLUSTERED, &Overrides::default()).unwrap();
        let (target, files) = (Target::Cubin(90), &[("a.cuh", "one"), ("b.cu", "two")][..]);
        let options = options(&s, &plan, target);
        let mut keys = vec![
            key_of(&s, &plan, target, files),
            key_of(&s, &plan, Target::Cubin(80), files),
            key_of(&s, &plan, Target::Ptx(90), files),
            key_of(&s, &plan, target, &[("a.cuh", "one"), ("b.cu", "three")]),
            key_of(&s, &plan, target, &[("a.cuh", "two"), ("b.cu", "one")]),
            key(&s, &options, (13, 1), 7, files),
            key(&s, &options, (12, 0), 7, files),
            key(&s, &options, (13, 0), 8, files),
            key_of(&specialisation(Kernel::Backward), &plan, target, files),
        ];
        // Changing the value of any macro must change the key.
        let macros = s.defines().into_iter().chain(plan.defines());
        for (name, value) in macros {
            let changed: Vec<String> = options
                .iter()
                .map(|option| match option.strip_prefix(&format!("-D{name}=")) {
                    Some(_) => format!("-D{name}={value}0"),
                    None => option.clone(),
                })
                .collect();
            assert_ne!(changed, options, "{name} is not among the options");
            keys.push(key(&s, &changed, (13, 0), 7, files));
        }
        let count = keys.len();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), count, "two of them are the same");
        assert_eq!(key_of(&s, &plan, target, files), key_of(&s, &plan, target, files));
    }

    #[test]
    fn threads_that_compile_one_kernel_remember_one_binary() {
        let remember = |image: u8| {
            let binary = Binary { image: vec![image], registers: 1, spilled: 0, shared: 0 };
            let kept = remember("threads".into(), binary);
            assert!(remembered("threads").is_some_and(|again| Arc::ptr_eq(&again, &kept)));
            kept
        };
        let all: Vec<Arc<Binary>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|image| scope.spawn(move || remember(image))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(all.iter().all(|kept| Arc::ptr_eq(kept, &all[0])));
    }

    #[test]
    fn every_file_of_kernels_is_embedded() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");
        let mut names: Vec<_> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.ends_with(".cu") || name.ends_with(".cuh"))
            .collect();
        names.sort();
        assert_eq!(names, FILES.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    }

    #[test]
    fn the_report_is_read_kernel_by_kernel() {
        let log = "ptxas info    : Compiling entry function 'expand_bwd' for 'sm_90'\n\
                   ptxas         .     0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n\
                   ptxas info    : Used 101 registers, used 1 barriers, 32 bytes smem\n\
                   ptxas info    : Compiling entry function 'expand_fwd' for 'sm_90'\n\
                   ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
                   ptxas info    : Used 56 registers, used 0 barriers\n";
        let numbers = |name| {
            let report = report_on(name, log);
            [number_before(report, " registers"), local_memory(report), number_before(report, " bytes smem")]
        };
        assert_eq!(numbers("expand_bwd"), [101, 8, 32]);
        assert_eq!(local_memory("448 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"), 448);
        assert_eq!(numbers("expand_fwd"), [56, 0, 0]);
        assert_eq!(numbers("reduce"), [0, 0, 0]);
    }
}
