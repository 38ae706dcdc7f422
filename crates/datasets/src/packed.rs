//! Files of a packed folder (tar, gzip) that is kept as it came.

use std::io::Read as _;

use crate::{Error, Result};

/// Largest file that is read out of an archive. All of ours are far smaller; a damaged length must not fill the memory.
const LARGEST: u64 = 64 << 20;

/// Calls `each` with name and bytes of every file of the archive that `wanted` wants. `file` names the archive in errors.
pub(crate) fn read_each(
    file: &str,
    bytes: &[u8],
    wanted: impl Fn(&str) -> bool,
    mut each: impl FnMut(&str, Vec<u8>) -> Result<()>,
) -> Result<()> {
    let bad = |source: std::io::Error| Error::malformed(file, format!("it can't be unpacked: {source}"));
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(bytes));
    for entry in archive.entries().map_err(bad)? {
        let entry = entry.map_err(bad)?;
        let name = entry.path().map_err(bad)?.to_string_lossy().into_owned();
        if !entry.header().entry_type().is_file() || !wanted(&name) {
            continue;
        }
        let mut content = Vec::new();
        entry.take(LARGEST + 1).read_to_end(&mut content).map_err(bad)?;
        if content.len() as u64 > LARGEST {
            return Err(Error::malformed(file, format!("{name} in it is larger than {LARGEST} bytes")));
        }
        each(&name, content)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_no_archive_are_an_error_that_names_the_file() {
        let message = read_each("x.tgz", b"nothing", |_| true, |_, _| Ok(())).unwrap_err().to_string();
        assert!(message.starts_with("x.tgz: it can't be unpacked"), "{message}");
    }
}
