//! Finds NVRTC, NVIDIA's run-time compiler, and compiles device code by it.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::OnceLock;

use crate::error::{Error, Result};
use crate::library::{Library, file_of, functions};

type Program = *mut c_void;

functions! {
    /// The part of nvrtc.h that is used; the same since CUDA 11.2.
    Functions {
        fn nvrtcVersion(*mut c_int, *mut c_int) -> c_int;
        fn nvrtcGetNumSupportedArchs(*mut c_int) -> c_int;
        fn nvrtcGetSupportedArchs(*mut c_int) -> c_int;
        fn nvrtcCreateProgram(
            *mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
        ) -> c_int;
        fn nvrtcCompileProgram(Program, c_int, *const *const c_char) -> c_int;
        fn nvrtcDestroyProgram(*mut Program) -> c_int;
        fn nvrtcGetProgramLogSize(Program, *mut usize) -> c_int;
        fn nvrtcGetProgramLog(Program, *mut c_char) -> c_int;
        fn nvrtcGetCUBINSize(Program, *mut usize) -> c_int;
        fn nvrtcGetCUBIN(Program, *mut c_char) -> c_int;
        fn nvrtcGetPTXSize(Program, *mut usize) -> c_int;
        fn nvrtcGetPTX(Program, *mut c_char) -> c_int;
        fn nvrtcGetErrorString(c_int) -> *const c_char;
    }
}

/// The compiler of this process.
pub struct Nvrtc {
    functions: Functions,
    pub version: (i32, i32),
    /// size of the library's file, which differs among builds of one version
    pub bytes: u64,
    /// compute capabilities it compiles for, as 90 for 9.0, ascending
    pub architectures: Vec<u32>,
}

/// The kind of device code: a GPU's own, or PTX that the driver of a newer GPU translates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    Cubin(u32),
    Ptx(u32),
}

impl Target {
    pub fn architecture(self) -> u32 {
        match self {
            Target::Cubin(architecture) | Target::Ptx(architecture) => architecture,
        }
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Target::Cubin(architecture) => write!(f, "sm_{architecture}"),
            Target::Ptx(architecture) => write!(f, "compute_{architecture}"),
        }
    }
}

/// The oldest architecture that has every instruction the kernels use.
pub const OLDEST: u32 = 80;

static ROOTS: OnceLock<Vec<PathBuf>> = OnceLock::new();

/// Sets the directories that hold torch and the libraries installed beside it: a site-packages, a prefix.
pub fn look_in(roots: Vec<PathBuf>) {
    ROOTS.get_or_init(|| roots);
}

/// Returns the compiler, found on the first call: the one torch has loaded or was installed with, else the system's.
pub fn nvrtc() -> Result<&'static Nvrtc> {
    static FOUND: OnceLock<std::result::Result<Nvrtc, String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let roots = ROOTS.get().map_or(&[][..], Vec::as_slice);
        let library = already_loaded().or_else(|| installed(roots)).or_else(system);
        Nvrtc::new(library.ok_or(
            "CUDA kernels are compiled by NVRTC, which was found neither beside torch nor on the system: \
             install a torch that is built for CUDA, or `pip install nvidia-cuda-nvrtc`",
        )?)
    });
    found.as_ref().map_err(|reason| Error::Cuda(reason.clone()))
}

fn sonames() -> impl Iterator<Item = String> {
    (12..20).rev().map(|major| format!("libnvrtc.so.{major}")).chain(["libnvrtc.so.11.2".into()])
}

fn already_loaded() -> Option<Library> {
    sonames().find_map(|name| Library::already_open(&name))
}

fn system() -> Option<Library> {
    let elsewhere = ["libnvrtc.so", "/usr/local/cuda/lib64/libnvrtc.so"].map(String::from);
    sonames().chain(elsewhere).find_map(|name| Library::open(&name).ok())
}

fn installed(roots: &[PathBuf]) -> Option<Library> {
    let folders = roots.iter().flat_map(|root| {
        let packages = listed(&root.join("nvidia")).into_iter().map(|package| package.join("lib"));
        packages.chain([root.join("torch/lib"), root.join("lib")])
    });
    folders.flat_map(|folder| compilers(&folder)).find_map(|path| {
        open_builtins(path.parent()?);
        Library::open(path.to_str()?).ok()
    })
}

/// Lists the files of a directory, sorted by name.
fn listed(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// Lists a folder's NVRTC libraries, the newest first: `libnvrtc.so.13`, or with a hash in the name if torch
/// brings its own.
fn compilers(folder: &Path) -> Vec<PathBuf> {
    let is_compiler = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.starts_with("libnvrtc") && name.contains(".so") && !is_part(name)
    };
    listed(folder).into_iter().rev().filter(is_compiler).collect()
}

fn is_part(name: &str) -> bool {
    name.contains("builtins") || name.contains(".alt.")
}

/// Opens NVRTC's second library. NVRTC looks it up by bare name, and finds it if it is already open.
fn open_builtins(folder: &Path) {
    for path in listed(folder) {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.starts_with("libnvrtc-builtins") && !name.contains(".alt.") {
            let _ = path.to_str().map(Library::open); // if it is missing, compiling reports that
        }
    }
}

impl Nvrtc {
    fn new(library: Library) -> std::result::Result<Nvrtc, String> {
        let functions = Functions::load(&library).map_err(|missing| {
            format!("NVRTC is too old: {missing}; install a torch for CUDA 12 or newer")
        })?;
        let file = file_of(functions.nvrtcVersion as *const c_void);
        if let Some(folder) = file.as_deref().and_then(Path::parent) {
            open_builtins(folder);
        }
        let bytes = file.and_then(|file| std::fs::metadata(file).ok()).map_or(0, |file| file.len());
        let (mut version, mut count) = ((0, 0), 0);
        // SAFETY: numbers to be filled; the list has the length that NVRTC gave.
        let architectures = unsafe {
            (functions.nvrtcVersion)(&mut version.0, &mut version.1);
            (functions.nvrtcGetNumSupportedArchs)(&mut count);
            let mut list = vec![0; count.max(0) as usize];
            (functions.nvrtcGetSupportedArchs)(list.as_mut_ptr());
            list
        };
        let mut architectures: Vec<u32> = architectures.into_iter().map(|each| each as u32).collect();
        architectures.sort_unstable();
        Ok(Nvrtc { functions, version, bytes, architectures })
    }

    /// Returns device code and the compiler's report; if it fails, the report alone.
    pub fn compile(
        &self,
        source: &str,
        headers: &[(&str, &str)],
        options: &[String],
        target: Target,
    ) -> std::result::Result<(Vec<u8>, String), String> {
        let text = |text: &str| CString::new(text).expect("kernels and options hold no zero byte");
        let bodies: Vec<CString> = headers.iter().map(|(_, body)| text(body)).collect();
        let names: Vec<CString> = headers.iter().map(|(name, _)| text(name)).collect();
        let options: Vec<CString> = options.iter().map(|option| text(option)).collect();
        let pointers =
            |texts: &[CString]| -> Vec<*const c_char> { texts.iter().map(|text| text.as_ptr()).collect() };
        let (source, bodies, names, options) = (
            text(source),
            (pointers(&bodies), bodies),
            (pointers(&names), names),
            (pointers(&options), options),
        );
        let f = &self.functions;
        let mut program = ProgramGuard { functions: f, program: null_mut() };
        // SAFETY: terminated strings in lists of the given lengths, all alive until the program is destroyed.
        unsafe {
            let count = headers.len() as c_int;
            self.succeed((f.nvrtcCreateProgram)(
                &mut program.program,
                source.as_ptr(),
                c"kernel.cu".as_ptr(),
                count,
                bodies.0.as_ptr(),
                names.0.as_ptr(),
            ))?;
            let done = (f.nvrtcCompileProgram)(program.program, options.0.len() as c_int, options.0.as_ptr());
            let log = self.fetch(program.program, f.nvrtcGetProgramLogSize, f.nvrtcGetProgramLog)?;
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_string();
            self.succeed(done).map_err(|reason| format!("{reason}\n{log}"))?;
            let image = match target {
                Target::Cubin(_) => self.fetch(program.program, f.nvrtcGetCUBINSize, f.nvrtcGetCUBIN)?,
                Target::Ptx(_) => self.fetch(program.program, f.nvrtcGetPTXSize, f.nvrtcGetPTX)?,
            };
            Ok((image, log))
        }
    }

    /// # Safety
    /// `program` is live, and `size` gives the number of bytes that `get` writes.
    unsafe fn fetch(
        &self,
        program: Program,
        size: unsafe extern "C-unwind" fn(Program, *mut usize) -> c_int,
        get: unsafe extern "C-unwind" fn(Program, *mut c_char) -> c_int,
    ) -> std::result::Result<Vec<u8>, String> {
        let mut bytes = 0;
        // SAFETY: as above.
        unsafe {
            self.succeed(size(program, &mut bytes))?;
            let mut data = vec![0u8; bytes];
            self.succeed(get(program, data.as_mut_ptr().cast()))?;
            Ok(data)
        }
    }

    fn succeed(&self, result: c_int) -> std::result::Result<(), String> {
        if result == 0 {
            return Ok(());
        }
        // SAFETY: the function takes any number and returns a static string.
        let name =
            unsafe { (self.functions.nvrtcGetErrorString)(result).as_ref().map(|s| CStr::from_ptr(s)) };
        Err(name.map_or(format!("NVRTC error {result}"), |name| name.to_string_lossy().into_owned()))
    }
}

/// Returns the target for a GPU, given the architectures `known` to the compiler; the error says why there is none.
pub fn target(known: &[u32], capability: u32) -> std::result::Result<Target, String> {
    let dotted = |number: u32| format!("{}.{}", number / 10, number % 10);
    if capability < OLDEST {
        return Err(format!(
            "its compute capability is {}, and the kernels need {} or newer: \
             move the model and its tensors to the CPU",
            dotted(capability),
            dotted(OLDEST),
        ));
    }
    // A GPU runs code of its own major number that is no newer: 8.9 runs code for 8.6.
    let known = known.iter().copied().filter(|&known| known <= capability);
    if let Some(same) = known.clone().filter(|known| known / 10 == capability / 10).max() {
        return Ok(Target::Cubin(same));
    }
    known.max().filter(|&known| known >= OLDEST).map(Target::Ptx).ok_or_else(|| {
        format!(
            "its compute capability is {}, for which this NVRTC does not compile: \
             install a torch whose CUDA version supports this GPU",
            dotted(capability),
        )
    })
}

struct ProgramGuard<'a> {
    functions: &'a Functions,
    program: Program,
}

impl Drop for ProgramGuard<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: made by nvrtcCreateProgram, destroyed once.
            unsafe { (self.functions.nvrtcDestroyProgram)(&mut self.program) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_gets_code_of_its_own_or_ptx() {
        let known = [75, 80, 86, 90, 100, 103, 120];
        let code_for = |capability| target(&known, capability).map(|target| target.to_string());
        assert_eq!(code_for(80).unwrap(), "sm_80");
        assert_eq!(code_for(89).unwrap(), "sm_86");
        assert_eq!(code_for(103).unwrap(), "sm_103");
        assert_eq!(code_for(121).unwrap(), "sm_120");
        assert_eq!(code_for(130).unwrap(), "compute_120");
        assert_eq!(target(&[80, 86], 90).unwrap(), Target::Ptx(86));
    }

    #[test]
    fn a_gpu_that_cannot_be_served_is_told_why() {
        let old = target(&[75, 80], 75).unwrap_err();
        assert!(old.starts_with("its compute capability is 7.5, and the kernels need 8.0 or newer"), "{old}");
        let dropped = target(&[90, 100], 86).unwrap_err();
        assert!(
            dropped.starts_with("its compute capability is 8.6, for which this NVRTC does not"),
            "{dropped}"
        );
    }
}
