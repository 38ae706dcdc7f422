//! `cargo xtask data`: the packages of `crates/datasets/data.toml`, fetched, verified and unpacked into the cache.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::fetch::{self, Archive, Fetcher, MissingClient, Source, Unreachable};
use crate::files::{self, Expected, Lock, Temporary};
use crate::places::Places;
use crate::process::Interrupted;
use crate::setup;
use crate::ui::{bytes, note, table};
use crate::unpack::{Take, unpack};

/// `crates/datasets/data.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Catalogue {
    set: Vec<Set>,
}

/// One data set.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Set {
    /// Its name, and its folder below `data/`.
    pub name: String,
    /// What it is.
    pub title: String,
    /// Which client fetches it.
    pub source: Source,
    package: Option<String>,
    version: Option<String>,
    archive: Option<String>,
    bytes: Option<u64>,
    sha256: Option<String>,
    /// Its licence.
    pub licence: String,
    /// Where it comes from.
    pub note: Option<String>,
    #[serde(default)]
    file: Vec<DataFile>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DataFile {
    from: String,
    to: String,
    bytes: u64,
    sha256: String,
}

/// What lies in the cache of a set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum State {
    /// Compiled into the crate `datasets`.
    BuiltIn,
    /// All files are there, with the right length (and, where asked for, the right hash).
    Present,
    /// No file is there.
    Missing,
    /// A file is not what it must be.
    Damaged(String),
}

impl Set {
    fn archive(&self) -> Result<Archive> {
        let missing =
            |field| format!("data.toml: the set {} has source = \"{}\" and no `{field}`", self.name, self.source);
        Ok(Archive {
            source: self.source,
            package: self.package.clone().with_context(|| missing("package"))?,
            version: self.version.clone().with_context(|| missing("version"))?,
            file: self.archive.clone().with_context(|| missing("archive"))?,
            bytes: self.bytes.with_context(|| missing("bytes"))?,
            sha256: self.sha256.clone().with_context(|| missing("sha256"))?,
        })
    }

    /// Looks at the files; their hashes only where `thorough`.
    pub(crate) fn state(&self, places: &Places, thorough: bool) -> Result<State> {
        if self.source == Source::Repository {
            return Ok(State::BuiltIn);
        }
        let folder = places.data(&self.name);
        if !folder.exists() {
            return Ok(State::Missing);
        }
        for file in &self.file {
            if let Some(fault) = file.fault(&folder, thorough)? {
                return Ok(State::Damaged(format!("{}: {fault}", file.to)));
            }
        }
        Ok(State::Present)
    }

    /// Whether a client fetches it, as opposed to those that are compiled in.
    pub(crate) fn is_packaged(&self) -> bool {
        self.source != Source::Repository
    }

    /// Whether it lies in the cache with the right lengths; one that is compiled in does not.
    pub(crate) fn is_cached(&self, places: &Places) -> bool {
        matches!(self.state(places, false), Ok(State::Present))
    }

    /// The package that it comes from, with the client that fetches it.
    pub(crate) fn origin(&self) -> String {
        match (&self.package, &self.version) {
            (Some(package), Some(version)) => format!("{} {package} {version}", self.source),
            _ => "this repository".to_owned(),
        }
    }

    /// The size of its files.
    pub(crate) fn size(&self) -> u64 {
        self.file.iter().map(|file| file.bytes).sum()
    }

    fn fetch(&self, places: &Places, offline: bool) -> Result<()> {
        let archive = self.archive()?;
        if self.source == Source::Apt && !offline {
            fetch::refresh_apt(places, &archive.package)?;
        }
        let path = Fetcher::new(places, offline).get(&archive)?;
        let folder = places.data(&self.name);
        files::need_space(&places.cache, self.size(), &format!("the data set {}", self.name))?;
        let part = Temporary::inside(&places.cache.join("data"))?;
        let (whole, inside): (Vec<&DataFile>, Vec<&DataFile>) = self.file.iter().partition(|file| file.from == ".");
        for file in whole {
            fs::copy(&path, part.path().join(&file.to))
                .with_context(|| format!("{} can't be copied", path.display()))?;
        }
        let take = |file: &DataFile| Take { from: file.from.clone(), to: file.to.clone(), only: None };
        let takes: Vec<Take> = inside.into_iter().map(take).collect();
        if !takes.is_empty() {
            unpack(&path, &takes, part.path(), &mut |_| {})?;
        }
        for file in &self.file {
            if let Some(fault) = file.fault(part.path(), true)? {
                bail!("{} of {} is not what data.toml says: {fault}", file.from, archive.file);
            }
        }
        part.keep_as(&folder)
    }
}

impl DataFile {
    fn fault(&self, folder: &Path, thorough: bool) -> Result<Option<String>> {
        let path = folder.join(&self.to);
        let Ok(found) = fs::metadata(&path) else {
            return Ok(Some("it is missing".to_owned()));
        };
        if !thorough && found.len() == self.bytes {
            return Ok(None);
        }
        let expected = Expected { bytes: self.bytes, sha256: &self.sha256 };
        files::fault(&path, expected, |_| {})
    }
}

/// The sets of the checkout; none when the crate `datasets` isn't there.
pub(crate) fn sets(places: &Places) -> Result<Vec<Set>> {
    let path = places.root.join("crates/datasets/data.toml");
    let Ok(text) = fs::read_to_string(&path) else {
        return Ok(Vec::new());
    };
    parse(&text).with_context(|| format!("{} is not right", path.display()))
}

fn parse(text: &str) -> Result<Vec<Set>> {
    let catalogue: Catalogue = toml::from_str(text)?;
    let mut names = BTreeSet::new();
    for set in &catalogue.set {
        anyhow::ensure!(names.insert(set.name.as_str()), "two sets are named {}", set.name);
        if set.source != Source::Repository {
            set.archive()?;
            anyhow::ensure!(!set.file.is_empty(), "the set {} has no files", set.name);
        }
    }
    Ok(catalogue.set)
}

/// `data list`.
pub(crate) fn list(places: &Places) -> Result<()> {
    let mut rows = table(["data set", "what it is", "from", "size", "state", "licence"]);
    for set in sets(places)? {
        let state = match set.state(places, false)? {
            State::BuiltIn => "in the crate".to_owned(),
            State::Present => "there".to_owned(),
            State::Missing => format!("`cargo xtask data fetch {}`", set.name),
            State::Damaged(fault) => format!("damaged ({fault})"),
        };
        let size = match set.source {
            Source::Repository => "-".to_owned(),
            _ => bytes(set.size()),
        };
        rows.add_row([set.name, set.title, set.source.to_string(), size, state, set.licence]);
    }
    println!("{rows}\nin {}", places.cache.join("data").display());
    Ok(())
}

/// `data verify`: every hash of every set that is there.
pub(crate) fn verify(places: &Places) -> Result<()> {
    let mut damaged = Vec::new();
    for set in sets(places)? {
        let line = match set.state(places, true)? {
            State::BuiltIn => "in the crate, checked by its tests".to_owned(),
            State::Present => "all files right".to_owned(),
            State::Missing => "not fetched".to_owned(),
            State::Damaged(fault) => {
                damaged.push(set.name.clone());
                format!("damaged: {fault}")
            }
        };
        println!("{}: {line}", set.name);
    }
    if let Some(first) = damaged.first() {
        bail!("damaged: {}. `cargo xtask data fetch {first}` fetches a set again", damaged.join(", "));
    }
    Ok(())
}

/// What became of the sets that were asked for.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Sets that aren't there because their client is missing.
    pub skipped: Vec<String>,
    /// Sets that could not be fetched.
    pub failed: Vec<String>,
}

/// `data fetch NAME…`: a missing client is an error, because the set was asked for by name.
pub(crate) fn fetch_named(places: &Places, names: &[String], offline: bool) -> Result<()> {
    let outcome = fetch(places, Some(names), offline, true)?;
    let absent = [outcome.failed, outcome.skipped].concat();
    if !absent.is_empty() {
        bail!("not fetched: {}", absent.join(", "));
    }
    Ok(())
}

/// `data fetch --all`: a missing client skips its sets.
pub(crate) fn fetch_all(places: &Places, offline: bool) -> Result<()> {
    let outcome = fetch(places, None, offline, true)?;
    if !outcome.failed.is_empty() {
        bail!("not fetched: {}", outcome.failed.join(", "));
    }
    Ok(())
}

/// Fetches what can be fetched, one line for what can't; for commands that go on without.
pub(crate) fn fetch_if_possible(places: &Places, names: Option<&[String]>) -> Result<Outcome> {
    fetch(places, names, false, false)
}

fn fetch(places: &Places, names: Option<&[String]>, offline: bool, speak: bool) -> Result<Outcome> {
    let all = sets(places)?;
    if let Some(unknown) = names.unwrap_or_default().iter().find(|name| !all.iter().any(|set| set.name == **name)) {
        let known: Vec<&str> = all.iter().map(|set| set.name.as_str()).collect();
        bail!("there is no data set named {unknown}; the sets are {}", known.join(", "));
    }
    let chosen = all.iter().filter(|set| names.is_none_or(|names| names.contains(&set.name)));
    let mut outcome = Outcome::default();
    let mut unreachable = Vec::new();
    for set in chosen {
        // Commands that go on anyway look at lengths only; the loaders check hashes.
        if matches!(set.state(places, speak)?, State::BuiltIn | State::Present) {
            if speak {
                note(format!("{}: there", set.name));
            }
            continue;
        }
        let _lock = Lock::on(&places.cache)?;
        // Another process may have made it while we waited.
        match set.state(places, speak)? {
            State::BuiltIn | State::Present => {
                note(format!("{}: there", set.name));
                continue;
            }
            State::Missing => {}
            State::Damaged(fault) => {
                note(format!("{}: damaged ({fault}), made again", set.name));
            }
        }
        if unreachable.contains(&set.source) && !fetch::still_to_fetch(places, &[set.archive()?]).is_empty() {
            note(format!("{}: not tried, because the registry of {} can't be reached", set.name, set.source));
            outcome.failed.push(set.name.clone());
            continue;
        }
        match set.fetch(places, offline) {
            Ok(()) => {
                note(format!("{}: fetched, {} in {}", set.name, bytes(set.size()), places.data(&set.name).display()));
            }
            Err(error) if error.is::<Interrupted>() => return Err(error),
            Err(error) if error.is::<MissingClient>() => {
                note(format!("{}: skipped: {error}", set.name));
                outcome.skipped.push(set.name.clone());
            }
            Err(error) => {
                note(format!("{}: {error:#}", set.name));
                // In continuous integration everything is tried.
                if error.is::<Unreachable>() && !setup::in_ci() {
                    unreachable.push(set.source);
                }
                outcome.failed.push(set.name.clone());
            }
        }
    }
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = r#"
        [[set]]
        name = "digits"
        title = "Digits"
        source = "npm"
        package = "digits"
        version = "1.0.0"
        archive = "digits-1.0.0.tgz"
        bytes = 3
        sha256 = "00"
        licence = "MIT"
        [[set.file]]
        from = "package/0.json"
        to = "0.json"
        bytes = 2
        sha256 = "11"
    "#;

    fn fault(text: &str) -> String {
        format!("{:#}", parse(text).unwrap_err())
    }

    #[test]
    fn a_set_is_read() {
        let sets = parse(ONE).unwrap();
        assert_eq!(sets[0].archive().unwrap().file, "digits-1.0.0.tgz");
        assert_eq!(sets[0].size(), 2);
    }

    #[test]
    fn unknown_fields_are_refused_at_both_levels() {
        assert!(fault(&ONE.replace("licence", "license")).contains("license"));
        assert!(fault(&ONE.replace("to =", "into =")).contains("into"));
        assert!(fault(&ONE.replace("npm", "ftp")).contains("ftp"));
    }

    #[test]
    fn a_packaged_set_without_archive_or_files_is_refused() {
        assert!(fault(&ONE.replace("version = \"1.0.0\"", "")).contains("no `version`"));
        let without = ONE.split("[[set.file]]").next().unwrap();
        assert!(fault(without).contains("has no files"));
        assert!(fault(&format!("{ONE}{ONE}")).contains("two sets are named digits"));
    }

    #[test]
    fn the_checkouts_own_file_is_right() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/datasets/data.toml");
        let sets = parse(&fs::read_to_string(path).unwrap()).unwrap();
        assert!(sets.iter().any(|set| set.name == "optdigits"));
    }
}
