//! Compiled kernels on disk, so that a process compiles only kernels that no earlier process has compiled.
//!
//! An entry is a file named by a hash of its key. It also holds the whole key, so that a collision of hashes is a
//! miss. It is written under a temporary name and renamed, so readers see all of it or nothing; if several processes
//! write at once, the last one wins with the same bytes. If the checksum does not match on load, the kernel is
//! compiled again. Code is loaded from here into the process, so the directory must belong to the user, and
//! others must not be able to write to it.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use super::log::say;
use crate::environment;
use crate::error::{Error, Result};

/// Device code, and the compiler's report on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binary {
    pub image: Vec<u8>,
    /// per thread
    pub registers: u32,
    /// bytes per thread that were spilled from registers to memory
    pub spilled: u32,
    /// static shared memory of a block, in bytes
    pub shared: u32,
}

pub struct Cache {
    directory: PathBuf,
}

const MAGIC: &[u8] = b"ddl kernel 1\n";
const CHECKSUM: usize = size_of::<u128>();

impl Cache {
    /// Opens the user's cache directory; None if it cannot be created or written. Fails if others can write to it,
    /// or if its `~` cannot be expanded.
    pub fn open() -> Result<Option<Cache>> {
        let Some(directory) = environment::kernels::cache_directory().map_err(refuse_home)? else {
            return Ok(None);
        };
        match prepare(&directory) {
            Ok(found) => refuse_open_directory(&directory, &found).map(|()| Some(Cache { directory })),
            Err(error) => {
                warn_once(&directory, &error);
                Ok(None)
            }
        }
    }

    pub fn path(&self, key: &str) -> PathBuf {
        self.directory.join(format!("{:032x}.kernel", hash(&[key.as_bytes()])))
    }

    /// Returns the binary of a key; None if it is missing or damaged.
    pub fn get(&self, key: &str) -> Option<Binary> {
        decode(&fs::read(self.path(key)).ok()?, key)
    }

    /// Stores a binary. A failure is only a warning, because the caller has the binary.
    pub fn put(&self, key: &str, binary: &Binary) {
        if let Err(error) = self.write(key, binary) {
            warn_once(&self.directory, &error);
        }
    }

    fn write(&self, key: &str, binary: &Binary) -> io::Result<()> {
        // The name is unique among the threads, processes and machines that share the directory.
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let (count, process) = (COUNT.fetch_add(1, Ordering::Relaxed), std::process::id());
        let nanoseconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
        let path = self.path(key);
        let unfinished = path.with_extension(format!("{process}-{count}-{nanoseconds}"));
        let written = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&unfinished)
            .and_then(|mut file: File| file.write_all(&encode(key, binary)))
            .and_then(|()| fs::rename(&unfinished, &path));
        if written.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        written
    }
}

/// Creates the directory unless it is there, and examines it. Another process may delete it at any moment.
fn prepare(directory: &Path) -> io::Result<Metadata> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    fs::metadata(directory)
}

fn refuse_home(given: PathBuf) -> Error {
    Error::Cuda(format!(
        "DDL_CACHE_DIR must begin with the ~ of a user whose home directory is known, got {}: write the whole path",
        given.display()
    ))
}

fn refuse_open_directory(directory: &Path, found: &Metadata) -> Result<()> {
    let refuse = |fault: String| {
        Err(Error::Cuda(format!(
            "compiled kernels are kept in {}, {fault}: make it yours alone (chmod go-w), or name another \
             directory in DDL_CACHE_DIR",
            directory.display()
        )))
    };
    // SAFETY: `geteuid` has no preconditions.
    let me = unsafe { libc::geteuid() };
    if found.uid() != me && found.uid() != 0 {
        return refuse(format!("which belongs to user {}", found.uid()));
    }
    if found.mode() & 0o022 != 0 {
        return refuse(format!("which others can write to (mode {:o})", found.mode() & 0o7777));
    }
    Ok(())
}

fn warn_once(directory: &Path, error: &io::Error) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        say(&format!(
            "compiled kernels are kept for this process only, because {} cannot be written ({error}); \
             name another directory in DDL_CACHE_DIR",
            directory.display()
        ));
    });
}

fn encode(key: &str, binary: &Binary) -> Vec<u8> {
    let mut body = Vec::with_capacity(binary.image.len() + key.len() + 64);
    for number in [binary.registers, binary.spilled, binary.shared, key.len() as u32] {
        body.extend(number.to_le_bytes());
    }
    body.extend(key.as_bytes());
    body.extend(&binary.image);
    [MAGIC, &hash(&[&body]).to_le_bytes(), &body].concat()
}

fn decode(data: &[u8], key: &str) -> Option<Binary> {
    let (checksum, body) = data.strip_prefix(MAGIC)?.split_at_checked(CHECKSUM)?;
    if hash(&[body]).to_le_bytes() != checksum {
        return None;
    }
    let (numbers, rest) = body.split_at_checked(16)?;
    let number = |at: usize| u32::from_le_bytes(numbers[4 * at..][..4].try_into().expect("four bytes"));
    let (stored, image) = rest.split_at_checked(number(3) as usize)?;
    (stored == key.as_bytes()).then(|| Binary {
        image: image.to_vec(),
        registers: number(0),
        spilled: number(1),
        shared: number(2),
    })
}

/// FNV-1a in 128 bits. This suffices: no adversary writes here, and the key in an entry reveals a collision.
pub fn hash(parts: &[&[u8]]) -> u128 {
    const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let bytes = parts.iter().copied().flatten();
    bytes.fold(OFFSET, |hash, &byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn binary() -> Binary {
        Binary { image: (0..=255).collect(), registers: 64, spilled: 8, shared: 1024 }
    }

    #[test]
    fn entries_come_back() {
        assert_eq!(decode(&encode("key", &binary()), "key"), Some(binary()));
        assert_eq!(decode(&encode("key", &binary()), "another key"), None);
    }

    #[test]
    fn every_damaged_byte_and_every_cut_is_seen() {
        let whole = encode("key", &binary());
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x10;
            assert_eq!(decode(&damaged, "key"), None, "byte {at}");
            assert_eq!(decode(&whole[..at], "key"), None, "cut to {at} bytes");
        }
    }

    #[test]
    fn threads_that_write_one_entry_leave_a_whole_one() {
        let name = format!("ddl-cache-threads-{}", std::process::id());
        let cache = Cache { directory: std::env::temp_dir().join(name) };
        prepare(&cache.directory).unwrap();
        let work = || {
            for _ in 0..20 {
                let found = cache.get("key"); // missing at first, and then whole at every moment
                assert!(found.is_none_or(|found| found == binary()));
                cache.put("key", &binary());
                assert_eq!(cache.get("key"), Some(binary()));
            }
        };
        std::thread::scope(|scope| (0..8).for_each(|_| drop(scope.spawn(work))));
        let left = fs::read_dir(&cache.directory).unwrap().count();
        fs::remove_dir_all(&cache.directory).unwrap();
        assert_eq!(left, 1, "no unfinished file is left");
    }

    #[test]
    fn the_hash_is_fnv_1a() {
        assert_eq!(hash(&[b""]), 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
        assert_eq!(hash(&[b"a"]), 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
        assert_eq!(hash(&[b"fo", b"obar"]), hash(&[b"foobar"]));
    }
}
