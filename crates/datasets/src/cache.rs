//! Where the sets lie, and reading them with their lengths and hashes checked.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use crate::catalog::{FileInfo, SetInfo, catalog};
use crate::{Error, Result};

/// The root of the cache: `$TESSERA_CACHE`, else `$XDG_CACHE_HOME/tessera`, else `$HOME/.cache/tessera`.
///
/// The folder need not exist.
///
/// # Errors
/// [`Error::NoCacheFolder`] when none of the three variables is set.
pub fn cache_dir() -> Result<PathBuf> {
    resolve(|name| std::env::var_os(name))
}

/// The folder of all unpacked sets, `data` below [`cache_dir`].
///
/// # Errors
/// As [`cache_dir`].
pub fn data_dir() -> Result<PathBuf> {
    Ok(cache_dir()?.join("data"))
}

/// The folder of the set called `name`.
///
/// # Errors
/// As [`cache_dir`]; [`Error::UnknownSet`] for a name that the catalog doesn't have.
pub fn set_dir(name: &str) -> Result<PathBuf> {
    Ok(data_dir()?.join(&catalog().set(name)?.name))
}

/// Whether all files of the set lie in the cache with the right lengths. Hashes are checked when the set is loaded.
///
/// # Errors
/// As [`set_dir`].
pub fn is_present(name: &str) -> Result<bool> {
    let set = catalog().set(name)?;
    if set.files.is_empty() {
        return Ok(true);
    }
    let dir = set_dir(name)?;
    Ok(set.files.iter().all(|file| dir.join(&file.to).metadata().is_ok_and(|m| m.is_file() && m.len() == file.bytes)))
}

/// An unset, empty or (for the folder that the XDG specification defines) relative value counts as not there.
fn resolve(variable: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf> {
    let path = |name: &str| variable(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    path("TESSERA_CACHE")
        .or_else(|| path("XDG_CACHE_HOME").filter(|p| p.is_absolute()).map(|p| p.join("tessera")))
        .or_else(|| path("HOME").map(|p| p.join(".cache").join("tessera")))
        .ok_or(Error::NoCacheFolder)
}

/// The file `to` of `set` in `dir`, opened, with its path and what the catalog says of it. Its length has been checked.
fn open<'a>(set: &'a SetInfo, to: &str, dir: &Path) -> Result<(File, PathBuf, &'a FileInfo)> {
    let info =
        set.file(to).ok_or_else(|| Error::argument("to", format!("the set `{}` has no file `{to}`", set.name)))?;
    let path = dir.join(to);
    let io_error = |source| Error::Io { path: path.clone(), source };
    let file = File::open(&path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            Error::Missing { set: set.name.clone(), file: to.to_owned(), folder: dir.to_owned() }
        }
        _ => io_error(source),
    })?;
    let length = file.metadata().map_err(io_error)?.len();
    if length != info.bytes {
        return Err(wrong_length(set, path, info, length));
    }
    Ok((file, path, info))
}

fn wrong_length(set: &SetInfo, path: PathBuf, info: &FileInfo, actual: u64) -> Error {
    Error::WrongLength { set: set.name.clone(), path, expected: info.bytes, actual }
}

fn wrong_hash(set: &SetInfo, path: PathBuf, info: &FileInfo, actual: String) -> Error {
    Error::WrongHash { set: set.name.clone(), path, expected: info.sha256.clone(), actual }
}

/// Checks the file `to` of `set` in `dir` without keeping it, and returns its path. For files that are read elsewhere, piece by piece.
pub(crate) fn verified_path(set: &SetInfo, to: &str, dir: &Path) -> Result<PathBuf> {
    let (file, path, info) = open(set, to, dir)?;
    let mut hash = Sha256::new();
    let copied = io::copy(&mut file.take(info.bytes + 1), &mut hash)
        .map_err(|source| Error::Io { path: path.clone(), source })?;
    if copied != info.bytes {
        return Err(wrong_length(set, path, info, copied));
    }
    let actual = hex(&hash.finalize());
    if actual != info.sha256 {
        return Err(wrong_hash(set, path, info, actual));
    }
    Ok(path)
}

/// Reads the file `to` of `set` from `dir`. Its length is checked before it is read, its hash after.
pub(crate) fn read_verified(set: &SetInfo, to: &str, dir: &Path) -> Result<Vec<u8>> {
    let (file, path, info) = open(set, to, dir)?;
    let mut bytes = Vec::with_capacity(info.bytes as usize);
    // One byte more than expected shows a file that grew meanwhile.
    file.take(info.bytes + 1).read_to_end(&mut bytes).map_err(|source| Error::Io { path: path.clone(), source })?;
    if bytes.len() as u64 != info.bytes {
        return Err(wrong_length(set, path, info, bytes.len() as u64));
    }
    let actual = sha256_hex(&bytes);
    if actual != info.sha256 {
        return Err(wrong_hash(set, path, info, actual));
    }
    Ok(bytes)
}

/// The SHA-256 of `bytes` in lower-case hexadecimal, as the catalog writes it.
pub fn sha256_hex(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(digest: &[u8]) -> String {
    let mut hex = String::with_capacity(2 * digest.len());
    for byte in digest {
        // Invariant: writing to a String can't fail.
        let _ = write!(hex, "{byte:02x}");
    }
    hex
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::Source;

    fn with(variables: &[(&str, &str)]) -> Result<PathBuf> {
        resolve(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| OsString::from(v)))
    }

    #[test]
    fn the_first_variable_that_is_set_wins() {
        let all = [("TESSERA_CACHE", "/t"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h")];
        let place = |v: &[(&str, &str)]| with(v).unwrap();
        assert_eq!(place(&all), Path::new("/t"));
        assert_eq!(place(&all[1..]), Path::new("/x/tessera"));
        assert_eq!(place(&all[2..]), Path::new("/h/.cache/tessera"));
        assert_eq!(place(&[("TESSERA_CACHE", ""), ("XDG_CACHE_HOME", "x"), all[2]]), Path::new("/h/.cache/tessera"));
        assert!(matches!(with(&[]), Err(Error::NoCacheFolder)));
    }

    fn one_file(content: &[u8]) -> SetInfo {
        SetInfo {
            name: "toy".to_owned(),
            title: String::new(),
            source: Source::Npm,
            package: None,
            version: None,
            archive: None,
            bytes: None,
            sha256: None,
            licence: String::new(),
            note: String::new(),
            files: vec![FileInfo {
                from: "a".to_owned(),
                to: "a.bin".to_owned(),
                bytes: content.len() as u64,
                sha256: sha256_hex(content),
            }],
        }
    }

    #[test]
    fn the_hash_is_the_standard_one() {
        assert_eq!(sha256_hex(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }

    #[test]
    fn an_intact_file_is_read() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a.bin"), b"hello").unwrap();
        assert_eq!(read_verified(&one_file(b"hello"), "a.bin", dir.path()).unwrap(), b"hello");
    }

    #[test]
    fn a_missing_file_names_set_folder_and_command() {
        let dir = tempfile::tempdir().unwrap();
        let message = read_verified(&one_file(b"hello"), "a.bin", dir.path()).unwrap_err().to_string();
        assert_eq!(
            message,
            format!(
                "The data set `toy` is missing: there is no `a.bin` in {}. Fetch it with `cargo xtask data fetch toy`.",
                dir.path().display()
            )
        );
    }

    #[test]
    fn a_truncated_file_names_both_lengths() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a.bin"), b"hell").unwrap();
        let error = read_verified(&one_file(b"hello"), "a.bin", dir.path()).unwrap_err();
        assert!(matches!(error, Error::WrongLength { expected: 5, actual: 4, .. }));
        assert!(error.to_string().contains("4 bytes long, but 5"));
    }

    #[test]
    fn a_flipped_bit_names_both_hashes() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a.bin"), b"hellp").unwrap();
        let message = read_verified(&one_file(b"hello"), "a.bin", dir.path()).unwrap_err().to_string();
        assert!(message.contains(&sha256_hex(b"hello")) && message.contains(&sha256_hex(b"hellp")));
        assert!(message.contains("cargo xtask data fetch toy"));
    }

    #[test]
    fn a_file_that_is_only_checked_is_held_to_the_same_as_one_that_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.bin");
        let check = |content: &[u8]| {
            std::fs::write(&path, content).unwrap();
            verified_path(&one_file(b"hello"), "a.bin", dir.path())
        };
        assert_eq!(check(b"hello").unwrap(), path);
        assert!(matches!(check(b"hell"), Err(Error::WrongLength { actual: 4, .. })));
        assert!(matches!(check(b"hellp"), Err(Error::WrongHash { .. })));
    }
}
