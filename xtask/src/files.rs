//! Files and folders that are either whole or not there: hashes, temporary folders, space on the disk.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use rustix::fs::statvfs;
use sha2::{Digest, Sha256};

use crate::process;
use crate::ui::bytes;

const CHUNK: usize = 1 << 20;

/// SHA-256 of a file in lower-case hexadecimal; `progress` hears of each chunk.
pub(crate) fn sha256(path: &Path, mut progress: impl FnMut(u64)) -> Result<String> {
    let mut file = File::open(path).with_context(|| format!("{} can't be read", path.display()))?;
    let mut hash = Sha256::new();
    let mut chunk = vec![0; CHUNK];
    loop {
        process::check()?;
        let count = file.read(&mut chunk).with_context(|| format!("{} can't be read", path.display()))?;
        if count == 0 {
            return Ok(hex(&hash.finalize()));
        }
        hash.update(&chunk[..count]);
        progress(count as u64);
    }
}

/// SHA-256 of a text.
pub(crate) fn sha256_of(text: &[u8]) -> String {
    hex(&Sha256::digest(text))
}

fn hex(digest: &[u8]) -> String {
    let digit = |value: u8| char::from_digit(u32::from(value), 16).unwrap_or('0');
    digest.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

/// What a file must be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Expected<'a> {
    /// Its length.
    pub bytes: u64,
    /// SHA-256 of its content in lower-case hexadecimal.
    pub sha256: &'a str,
}

/// What is wrong with the file, in words; `None` when it is what it must be.
pub(crate) fn fault(path: &Path, expected: Expected, progress: impl FnMut(u64)) -> Result<Option<String>> {
    let length = fs::metadata(path).with_context(|| format!("{} can't be read", path.display()))?.len();
    if length != expected.bytes {
        let kind = if length < expected.bytes { "truncated" } else { "too long" };
        return Ok(Some(format!("it is {kind}: {length} bytes instead of {}", expected.bytes)));
    }
    let found = sha256(path, progress)?;
    Ok((found != expected.sha256).then(|| format!("its SHA-256 is {found} instead of {}", expected.sha256)))
}

/// A folder that goes away with its owner, unless it is moved to its final name first.
#[derive(Debug)]
pub(crate) struct Temporary {
    path: PathBuf,
}

impl Temporary {
    /// Makes an empty folder `parent/.part-…`. Those of earlier processes are removed: the caller holds the cache's lock,
    /// so nobody works in them any more.
    pub(crate) fn inside(parent: &Path) -> Result<Self> {
        fs::create_dir_all(parent).with_context(|| format!("the folder {} can't be made", parent.display()))?;
        if let Ok(entries) = fs::read_dir(parent) {
            for entry in entries.flatten() {
                if entry.file_name().to_string_lossy().starts_with(".part-") {
                    let _ = fs::remove_dir_all(entry.path());
                }
            }
        }
        Self::at(parent.join(format!(".part-{}", std::process::id())))
    }

    /// Makes an empty folder beside `target`, in a place that isn't ours alone: nothing else is touched there.
    pub(crate) fn beside(target: &Path) -> Result<Self> {
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        Self::at(target.with_file_name(format!(".{name}.part-{}", std::process::id())))
    }

    fn at(path: PathBuf) -> Result<Self> {
        fs::create_dir_all(&path).with_context(|| format!("the folder {} can't be made", path.display()))?;
        Ok(Self { path })
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the folder its final name; what was there before goes.
    pub(crate) fn keep_as(self, target: &Path) -> Result<()> {
        let mut old = self.path.clone().into_os_string();
        old.push("-old");
        if target.symlink_metadata().is_ok() {
            fs::rename(target, &old).with_context(|| format!("{} can't be moved away", target.display()))?;
        }
        fs::rename(&self.path, target).with_context(|| format!("{} can't be put in place", target.display()))?;
        let _ = fs::remove_dir_all(&old);
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// The size of all files below a folder; what vanishes meanwhile counts nothing.
pub(crate) fn size_below(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else {
        return 0;
    };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(data) if data.is_dir() => size_below(&entry.path()),
            Ok(data) => data.len(),
            Err(_) => 0,
        })
        .sum()
}

/// Copies `from` into a new file; a failed write leaves no file.
pub(crate) fn write_from(from: &mut impl Read, to: &Path, mut progress: impl FnMut(u64)) -> Result<()> {
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder).map_err(|error| write_error(folder, error))?;
    }
    let mut copy = || -> Result<()> {
        let mut file = File::create(to).map_err(|error| write_error(to, error))?;
        let mut chunk = vec![0; CHUNK];
        loop {
            process::check()?;
            let count =
                from.read(&mut chunk).with_context(|| format!("what should become {} can't be read", to.display()))?;
            if count == 0 {
                return Ok(());
            }
            file.write_all(&chunk[..count]).map_err(|error| write_error(to, error))?;
            progress(count as u64);
        }
    };
    copy().inspect_err(|_| {
        let _ = fs::remove_file(to);
    })
}

/// Writes a small file under a temporary name and renames it.
pub(crate) fn write_whole(path: &Path, content: &[u8]) -> Result<()> {
    let part = path.with_extension(format!("part-{}", std::process::id()));
    write_from(&mut &content[..], &part, |_| {})?;
    fs::rename(&part, path).map_err(|error| write_error(path, error))
}

/// An error of a write, with the way out when the disk is full.
fn write_error(path: &Path, error: io::Error) -> anyhow::Error {
    if error.kind() == io::ErrorKind::StorageFull || error.kind() == io::ErrorKind::QuotaExceeded {
        return anyhow!(
            "the disk is full: {} can't be written. Free some space, or move the cache: set TESSERA_CACHE to a folder on another disk. Nothing half-written was left",
            path.display()
        );
    }
    anyhow::Error::new(error).context(format!("{} can't be written", path.display()))
}

/// The bytes that the user may still write below the folder, which need not exist yet.
pub(crate) fn space(folder: &Path) -> Result<u64> {
    let existing = folder
        .ancestors()
        .find(|folder| folder.exists())
        .with_context(|| format!("{} lies nowhere", folder.display()))?;
    let disk = statvfs(existing)
        .with_context(|| format!("the disk of {} can't be asked for its space", existing.display()))?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
}

/// An error unless `needed` bytes fit below `folder`.
pub(crate) fn need_space(folder: &Path, needed: u64, what: &str) -> Result<()> {
    let available = space(folder)?;
    if available < needed {
        bail!(
            "{what} needs {} in {}, and {} are free there. Free some space, or move the cache: set TESSERA_CACHE to a folder on another disk",
            bytes(needed),
            folder.display(),
            bytes(available)
        );
    }
    Ok(())
}

/// One process at a time works in the cache; held until the value goes.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Waits for it, and says so.
    pub(crate) fn on(cache: &Path) -> Result<Self> {
        fs::create_dir_all(cache).with_context(|| {
            format!(
                "the cache folder {} can't be made; set TESSERA_CACHE to a folder that you may write",
                cache.display()
            )
        })?;
        let path = cache.join(".lock");
        let file = File::create(&path).with_context(|| {
            format!("{} can't be written; set TESSERA_CACHE to a folder that you may write", path.display())
        })?;
        let mut said = false;
        loop {
            match file.try_lock() {
                // On a file system without locks the work goes on without.
                Ok(()) | Err(fs::TryLockError::Error(_)) => return Ok(Self { _file: file }),
                Err(fs::TryLockError::WouldBlock) => {
                    if !said {
                        crate::ui::note(format!("another `cargo xtask` works in {}; waiting for it", cache.display()));
                        said = true;
                    }
                    process::check()?;
                    std::thread::sleep(std::time::Duration::from_millis(200));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELLO: Expected =
        Expected { bytes: 5, sha256: "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824" };

    fn fault_of(content: &str) -> Option<String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, content).unwrap();
        fault(&path, HELLO, |_| {}).unwrap()
    }

    #[test]
    fn the_right_file_has_no_fault() {
        assert_eq!(fault_of("hello"), None);
    }

    #[test]
    fn a_truncated_file_and_a_changed_one_are_told_apart() {
        let truncated = fault_of("hell").unwrap();
        assert!(truncated.contains("truncated: 4 bytes instead of 5"), "{truncated}");
        let changed = fault_of("hellO").unwrap();
        assert!(changed.contains(HELLO.sha256), "{changed}");
    }

    #[test]
    fn too_little_space_names_both_numbers_and_the_way_out() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("not/yet/there");
        let error = need_space(&deep, u64::MAX, "libtorch").unwrap_err().to_string();
        for part in ["libtorch needs 18446744073.7 GB", "are free", "TESSERA_CACHE"] {
            assert!(error.contains(part), "{error}");
        }
        need_space(&deep, 1, "nothing").unwrap();
    }

    #[test]
    fn a_full_disk_is_said_in_plain_words() {
        let error = write_error(Path::new("/x"), io::ErrorKind::StorageFull.into()).to_string();
        assert!(error.contains("disk is full") && error.contains("TESSERA_CACHE"), "{error}");
    }

    #[test]
    fn a_failed_copy_leaves_no_file() {
        struct Broken(bool);
        impl Read for Broken {
            fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
                if std::mem::replace(&mut self.0, true) {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                to[0] = 1;
                Ok(1)
            }
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/file");
        write_from(&mut Broken(false), &path, |_| {}).unwrap_err();
        assert!(!path.exists());
    }

    #[test]
    fn a_temporary_folder_goes_unless_it_is_kept_and_stale_ones_go_too() {
        let parent = tempfile::tempdir().unwrap();
        fs::create_dir(parent.path().join(".part-1")).unwrap();
        let dropped = Temporary::inside(parent.path()).unwrap();
        assert!(!parent.path().join(".part-1").exists());
        let path = dropped.path().to_path_buf();
        drop(dropped);
        assert!(!path.exists());

        let target = parent.path().join("target");
        fs::create_dir(&target).unwrap();
        fs::write(target.join("old"), "").unwrap();
        let kept = Temporary::inside(parent.path()).unwrap();
        fs::write(kept.path().join("new"), "").unwrap();
        kept.keep_as(&target).unwrap();
        assert!(target.join("new").exists() && !target.join("old").exists());
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 1);
    }
}
