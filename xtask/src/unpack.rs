//! Takes chosen files out of archives: wheels (zip), npm packages (tar, gzip) and Debian packages.

use std::fs::{self, File};
use std::io::BufReader;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::files;
use crate::process::{self, on_path, watch};

/// One rule of what to take: a file, or everything below a folder when `from` ends in `/`.
#[derive(Debug, Clone, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(crate) struct Take {
    /// The path inside the archive.
    pub from: String,
    /// The path below the target folder; ends in `/` when `from` does.
    pub to: String,
    /// Only files whose name contains this.
    #[serde(default)]
    pub only: Option<String>,
}

impl Take {
    /// Where the archive's file goes, if this rule takes it.
    fn target(&self, name: &str) -> Option<String> {
        let name = name.trim_start_matches("./");
        if !self.from.ends_with('/') {
            return (name == self.from).then(|| self.to.clone());
        }
        let rest = name.strip_prefix(&self.from)?;
        let base = rest.rsplit('/').next().unwrap_or(rest);
        let wanted = self.only.as_ref().is_none_or(|only| base.contains(only.as_str()));
        (!base.is_empty() && wanted).then(|| format!("{}{rest}", self.to))
    }
}

fn target_of(takes: &[Take], name: &str, folder: &Path) -> Option<PathBuf> {
    let target = takes.iter().find_map(|take| take.target(name))?;
    // An archive must not write outside the folder.
    let inside = Path::new(&target).components().all(|part| matches!(part, Component::Normal(_)));
    inside.then(|| folder.join(target))
}

/// Unpacks what the rules take into `folder`; `progress` hears of the bytes written.
pub(crate) fn unpack(archive: &Path, takes: &[Take], folder: &Path, progress: &mut dyn FnMut(u64)) -> Result<()> {
    let name = archive.to_string_lossy();
    let done = if name.ends_with(".whl") || name.ends_with(".zip") {
        unzip(archive, takes, folder, progress)
    } else if name.ends_with(".tgz") || name.ends_with(".tar.gz") {
        untar(archive, takes, folder, progress)
    } else if name.ends_with(".deb") {
        undeb(archive, takes, folder, progress)
    } else {
        bail!("{name} is no wheel, zip, tar.gz or deb: it can't be unpacked")
    };
    done.with_context(|| format!("{name} can't be unpacked"))
}

fn unzip(archive: &Path, takes: &[Take], folder: &Path, progress: &mut dyn FnMut(u64)) -> Result<()> {
    let mut zip = zip::ZipArchive::new(BufReader::new(File::open(archive)?))?;
    for index in 0..zip.len() {
        let mut entry = zip.by_index(index)?;
        if entry.is_dir() {
            continue;
        }
        if let Some(target) = target_of(takes, entry.name(), folder) {
            files::write_from(&mut entry, &target, &mut *progress)?;
        }
    }
    Ok(())
}

fn untar(archive: &Path, takes: &[Take], folder: &Path, progress: &mut dyn FnMut(u64)) -> Result<()> {
    let plain = flate2::read::GzDecoder::new(BufReader::new(File::open(archive)?));
    for entry in tar::Archive::new(plain).entries()? {
        let mut entry = entry?;
        if !entry.header().entry_type().is_file() {
            continue;
        }
        let name = entry.path()?.to_string_lossy().into_owned();
        if let Some(target) = target_of(takes, &name, folder) {
            files::write_from(&mut entry, &target, &mut *progress)?;
        }
    }
    Ok(())
}

/// A Debian package is unpacked whole by dpkg-deb, or by ar and tar where there is no dpkg; then the files are moved.
fn undeb(archive: &Path, takes: &[Take], folder: &Path, progress: &mut dyn FnMut(u64)) -> Result<()> {
    let whole = folder.join(".whole");
    fs::create_dir_all(&whole)?;
    let mut command = if on_path("dpkg-deb") {
        let mut command = Command::new("dpkg-deb");
        command.arg("-x").arg(archive).arg(&whole);
        command
    } else if on_path("ar") && on_path("tar") {
        let mut command = Command::new("sh");
        command.args(["-c", r#"cd "$2" && ar x "$1" && tar -xf data.tar.*"#, "sh"]).arg(archive).arg(&whole);
        command
    } else {
        bail!("neither dpkg-deb nor ar and tar are here: `apt-get install dpkg` or `binutils`")
    };
    let finished = watch(&mut command, |_| {})?;
    if !finished.status.success() {
        bail!("{} failed: {}", process::describe(&command), finished.lines.join(" "));
    }
    for take in takes {
        process::check()?;
        let from = whole.join(&take.from);
        let to = folder.join(&take.to);
        if from.is_file() {
            fs::rename(&from, &to).with_context(|| format!("{} can't be moved", from.display()))?;
            progress(fs::metadata(&to)?.len());
        }
    }
    fs::remove_dir_all(&whole).with_context(|| format!("{} can't be removed", whole.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(from: &str, to: &str, only: Option<&str>) -> Take {
        Take { from: from.into(), to: to.into(), only: only.map(Into::into) }
    }

    #[test]
    fn rules_take_files_folders_and_names() {
        let takes = [
            take("torch/lib/libc10.so", "lib/libc10.so", None),
            take("torch/include/", "include/", None),
            take("nvidia/", "nvidia/", Some(".so")),
        ];
        let to = |name| target_of(&takes, name, Path::new("/t")).map(|path| path.display().to_string());
        assert_eq!(to("torch/lib/libc10.so"), Some("/t/lib/libc10.so".into()));
        assert_eq!(to("torch/lib/libc10.so.1"), None);
        assert_eq!(to("./torch/include/a/b.h"), Some("/t/include/a/b.h".into()));
        assert_eq!(to("torch/include/"), None);
        assert_eq!(to("nvidia/cu13/lib/libx.so.1"), Some("/t/nvidia/cu13/lib/libx.so.1".into()));
        assert_eq!(to("nvidia/cu13/include/x.so.d/x.h"), None);
    }

    #[test]
    fn no_archive_writes_outside_its_folder() {
        let takes = [take("torch/include/", "include/", None)];
        assert_eq!(target_of(&takes, "torch/include/../../../etc/x", Path::new("/t")), None);
    }
}
