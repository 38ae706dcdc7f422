//! Runs on the disk: which is the last, which does a name mean, what was one asked to do.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::places::{Places, plain};

/// A run on the disk.
#[derive(Debug)]
pub(super) struct Run {
    /// Its folder.
    pub(super) folder: PathBuf,
    /// When something was last written there.
    pub(super) changed: SystemTime,
}

/// The part of a run's `meta.json` that matters here.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Asked {
    /// Crates or experiments; all when there is none.
    #[serde(default)]
    pub(super) names: Vec<String>,
    /// Whether the peers were asked for.
    #[serde(default)]
    pub(super) peers: bool,
}

impl Run {
    /// The run in a folder, if there is one.
    fn at(folder: PathBuf) -> Option<Self> {
        let files = ["results.jsonl", "meta.json"].map(|name| folder.join(name));
        let changed = files.iter().filter_map(|file| fs::metadata(file).ok()?.modified().ok()).max()?;
        Some(Self { folder, changed })
    }

    /// The one whose results changed last.
    pub(super) fn latest(places: &Places) -> Option<Self> {
        let entries = fs::read_dir(places.runs()).ok()?.flatten();
        entries.filter_map(|entry| Self::at(entry.path())).max_by_key(|run| run.changed)
    }

    /// The one of that name or in that folder.
    pub(super) fn find(places: &Places, name: &str) -> Option<Self> {
        Self::at(places.runs().join(name)).or_else(|| Self::at(std::path::absolute(name).ok()?))
    }

    /// The one whose folder the benchmark wrote into a file.
    pub(super) fn named_in(places: &Places, file: &Path) -> Option<Self> {
        let text = fs::read_to_string(file).ok()?;
        let folder = text.trim();
        // The benchmark runs at the workspace's root.
        if folder.is_empty() { None } else { Self::at(plain(&places.root.join(folder))) }
    }

    /// What `--resume` calls it.
    pub(super) fn name(&self, places: &Places) -> String {
        let name = self.folder.strip_prefix(places.runs()).unwrap_or(&self.folder);
        name.display().to_string()
    }

    /// What it was asked to do; nothing in particular if that can't be read.
    pub(super) fn asked(&self) -> Asked {
        let text = fs::read_to_string(self.folder.join("meta.json")).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }
}

/// The folders of the runs of these names; of the last when there are none.
pub(super) fn chosen_runs(places: &Places, names: &[String]) -> Result<Vec<PathBuf>> {
    if names.is_empty() {
        let run = Run::latest(places).with_context(|| {
            format!("there is no run in {}; `cargo xtask bench` makes one", places.runs().display())
        })?;
        return Ok(vec![run.folder]);
    }
    let found = names.iter().map(|name| {
        let below = places.runs().join(name);
        let folder = if below.exists() { below } else { PathBuf::from(name) };
        if !folder.join("results.jsonl").exists() {
            bail!(
                "{name} is no run: neither {} nor the path itself holds a results.jsonl",
                places.runs().join(name).display()
            );
        }
        Ok(std::path::absolute(folder)?)
    });
    found.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_run_is_the_one_whose_results_changed_last() {
        let root = tempfile::tempdir().unwrap();
        let places = Places { root: root.path().to_path_buf(), cache: root.path().join("cache") };
        assert!(Run::latest(&places).is_none());
        for (name, age) in [("a", 10), ("b", 5), ("c", 20)] {
            let folder = places.runs().join(name);
            fs::create_dir_all(&folder).unwrap();
            let file = fs::File::create(folder.join("results.jsonl")).unwrap();
            let then = SystemTime::now() - std::time::Duration::from_secs(age);
            file.set_modified(then).unwrap();
        }
        assert_eq!(Run::latest(&places).unwrap().name(&places), "b");
        assert_eq!(chosen_runs(&places, &["c".into()]).unwrap()[0], places.runs().join("c"));
        let error = chosen_runs(&places, &["d".into()]).unwrap_err().to_string();
        assert!(error.contains("d is no run"), "{error}");
    }

    #[test]
    fn the_benchmark_names_its_run_relative_to_the_root_or_not() {
        let root = tempfile::tempdir().unwrap();
        let places = Places { root: root.path().to_path_buf(), cache: root.path().join("cache") };
        let file = root.path().join("run-file");
        assert!(Run::named_in(&places, &file).is_none());
        fs::create_dir_all(places.runs().join("r1")).unwrap();
        fs::write(places.runs().join("r1/meta.json"), r#"{"names": ["sam-opt"], "peers": true, "x": 1}"#).unwrap();
        for text in ["target/bench/r1\n".to_owned(), places.runs().join("r1").display().to_string()] {
            fs::write(&file, text).unwrap();
            let run = Run::named_in(&places, &file).unwrap();
            assert_eq!(run.name(&places), "r1");
            let asked = run.asked();
            assert!(asked.peers && asked.names == ["sam-opt"]);
        }
    }
}
