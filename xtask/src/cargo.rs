//! What cargo knows of the workspace, and a cargo build that says what it is busy with.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::places::Places;
use crate::process::{Stream, describe, watch};
use crate::ui::{Spinner, duration, note};

/// The parts of `cargo metadata` that are used here.
#[derive(Debug, Deserialize)]
pub(crate) struct Metadata {
    /// The workspace's packages.
    pub packages: Vec<Package>,
    #[serde(default)]
    metadata: Option<WorkspaceMetadata>,
}

/// One package.
#[derive(Debug, Deserialize)]
pub(crate) struct Package {
    /// Its name.
    pub name: String,
    /// Its direct dependencies.
    pub dependencies: Vec<Dependency>,
    targets: Vec<Target>,
    #[serde(default)]
    features: BTreeMap<String, Vec<String>>,
}

/// One dependency of a package.
#[derive(Debug, Deserialize)]
pub(crate) struct Dependency {
    /// The package that is depended on.
    pub name: String,
    /// `None`, `dev` or `build`.
    pub kind: Option<String>,
    /// Where it lies, for members of the workspace.
    pub path: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
struct Target {
    kind: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
struct WorkspaceMetadata {
    #[serde(default)]
    tessera: TesseraMetadata,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct TesseraMetadata {
    #[serde(default)]
    without_libtorch: Vec<String>,
}

/// A crate that must work without libtorch, with the options that make it so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WithoutLibtorch {
    /// The crate.
    pub package: String,
    /// For example `--no-default-features`.
    pub options: Vec<String>,
}

impl Metadata {
    /// Asks cargo.
    pub(crate) fn read(places: &Places) -> Result<Self> {
        let answer = asked(places.cargo().args(["metadata", "--no-deps", "--format-version=1"]))?;
        serde_json::from_slice(&answer).context("`cargo metadata` printed what can't be read")
    }

    /// `[workspace.metadata.tessera] without-libtorch = ["crate --options", …]`, for packages that exist.
    pub(crate) fn without_libtorch(&self) -> Vec<WithoutLibtorch> {
        let lines = self.metadata.iter().flat_map(|metadata| &metadata.tessera.without_libtorch);
        lines
            .filter_map(|line| {
                let mut words = line.split_whitespace().map(str::to_owned);
                let package = words.next()?;
                self.package(&package).map(|_| WithoutLibtorch { package, options: words.collect() })
            })
            .collect()
    }

    /// The package of that name.
    pub(crate) fn package(&self, name: &str) -> Option<&Package> {
        self.packages.iter().find(|package| package.name == name)
    }

    /// Whether a package depends on another member of the workspace, in its tests or through others of them.
    pub(crate) fn depends_on(&self, package: &str, wanted: &str) -> bool {
        let mut seen = BTreeSet::from([package]);
        let mut open = vec![package];
        while let Some(name) = open.pop() {
            let dependencies = self.package(name).into_iter().flat_map(|package| &package.dependencies);
            open.extend(dependencies.map(|one| one.name.as_str()).filter(|one| seen.insert(one)));
        }
        seen.contains(wanted)
    }

    /// The features, as `crate/feature`, under which all code of these packages is compiled: plugs for language models and
    /// commands are no defaults.
    pub(crate) fn optional_features(&self, names: &[&String]) -> Vec<String> {
        let chosen = self.packages.iter().filter(|package| names.contains(&&package.name));
        let optional = |feature: &&String| ["lm", "cli"].contains(&feature.as_str());
        chosen
            .flat_map(|package| package.features.keys().filter(optional).map(|f| format!("{}/{f}", package.name)))
            .collect()
    }

    /// An error that lists the packages, unless all names are among them.
    pub(crate) fn check_names(&self, names: &[String]) -> Result<()> {
        match names.iter().find(|name| self.package(name).is_none()) {
            None => Ok(()),
            Some(unknown) => {
                let all: Vec<&str> = self.packages.iter().map(|p| p.name.as_str()).collect();
                bail!("there is no crate named {unknown} here; the crates are {}", all.join(", "))
            }
        }
    }
}

impl Package {
    /// Whether it has a library, and so documentation tests.
    pub(crate) fn has_library(&self) -> bool {
        self.targets.iter().any(|target| target.kind.iter().any(|kind| kind == "lib" || kind == "rlib"))
    }
}

/// What a short cargo prints; its own words when it fails.
fn asked(cargo: &mut Command) -> Result<Vec<u8>> {
    let output = cargo.output().context("cargo can't be started")?;
    if !output.status.success() {
        bail!("`{}` failed: {}", describe(cargo), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(output.stdout)
}

/// Whether a package, with its default features and its tests, links libtorch.
pub(crate) fn links_libtorch(places: &Places, package: &str, options: &[String]) -> Result<bool> {
    let mut cargo = places.cargo();
    cargo
        .args(["tree", "--prefix=none", "--format={p}", "--edges=normal,build,dev"])
        .args(["--package", package])
        .args(options);
    let tree = asked(&mut cargo)?;
    Ok(String::from_utf8_lossy(&tree).lines().any(|line| line.starts_with("torch-sys ")))
}

#[derive(Deserialize)]
struct Message {
    reason: String,
    package_id: Option<String>,
    target: Option<MessageTarget>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct MessageTarget {
    name: String,
    kind: Vec<String>,
}

/// Builds with a line that names what has been under way longest, and returns the programs by name.
pub(crate) fn build(places: &Places, what: &str, options: &[&str]) -> Result<BTreeMap<String, PathBuf>> {
    let mut cargo = places.cargo();
    // Colours would stand between the words of the lines that are read here.
    cargo.args(["build", "--color=never"]).args(options).arg("--message-format=json-render-diagnostics");
    let mut spinner = Spinner::start(format!("building {what}"));
    let mut busy: BTreeMap<String, Instant> = BTreeMap::new();
    let mut done: BTreeSet<String> = BTreeSet::new();
    let mut programs = BTreeMap::new();
    let finished = watch(&mut cargo, |lines| {
        for (stream, line) in lines {
            match stream {
                Stream::Err => match compiling(line) {
                    Some(package) if done.contains(&package) => {}
                    Some(package) => {
                        busy.insert(package, Instant::now());
                    }
                    None if line.trim_start().starts_with("Finished") => {}
                    None => spinner.line(line),
                },
                Stream::Out => {
                    let Ok(message) = serde_json::from_str::<Message>(line) else {
                        continue;
                    };
                    if let Some(package) = compiled(&message) {
                        busy.remove(&package);
                        done.insert(package);
                    }
                    if let (Some(target), Some(path)) = (message.target, message.executable) {
                        programs.insert(target.name, path);
                    }
                }
            }
        }
        spinner.say(format!("building {what}: {}", progress(&busy, done.len())));
    })?;
    let took = spinner.elapsed();
    drop(spinner);
    if !finished.status.success() {
        bail!("{what} could not be built; cargo's messages are above");
    }
    if took.as_secs() > 0 {
        note(format!("built {what} in {}", duration(took)));
    }
    Ok(programs)
}

/// `   Compiling torch-sys v0.24.0`: the package's name.
fn compiling(line: &str) -> Option<String> {
    let mut words = line.split_whitespace();
    (words.next()? == "Compiling").then_some(())?;
    words.next().map(str::to_owned)
}

/// The package whose library or program is done, for a message of cargo that says so.
fn compiled(message: &Message) -> Option<String> {
    if message.reason != "compiler-artifact" {
        return None;
    }
    let target = message.target.as_ref()?;
    if target.kind.iter().any(|kind| kind == "custom-build") {
        return None;
    }
    package_name(message.package_id.as_deref()?)
}

/// The name in `registry+…#torch-sys@0.24.0` or `path+file:///…/crates/tensor#0.1.0`.
fn package_name(id: &str) -> Option<String> {
    let (place, end) = id.split_once('#')?;
    Some(match end.split_once('@') {
        Some((name, _)) => name.to_owned(),
        None => place.rsplit('/').next()?.to_owned(),
    })
}

/// Programs are linked after the last library was compiled, and cargo says nothing of it.
fn progress(busy: &BTreeMap<String, Instant>, done: usize) -> String {
    if busy.is_empty() {
        return format!("{done} crates done; now linking");
    }
    let mut longest: Vec<(&String, &Instant)> = busy.iter().collect();
    longest.sort_by_key(|(_, since)| **since);
    let names: Vec<&str> = longest
        .iter()
        .take(3)
        .map(|(name, _)| match name.as_str() {
            "torch-sys" => "torch-sys (one large C++ file, the longest part)",
            name => name,
        })
        .collect();
    format!("{done} crates done; now {}", names.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_named_from_cargos_lines_and_ids() {
        assert_eq!(compiling("   Compiling torch-sys v0.24.0"), Some("torch-sys".into()));
        assert_eq!(compiling("warning: unused"), None);
        assert_eq!(package_name("registry+https://x/index#torch-sys@0.24.0"), Some("torch-sys".into()));
        assert_eq!(package_name("path+file:///w/crates/tensor#0.1.0"), Some("tensor".into()));
    }

    #[test]
    fn when_nothing_is_compiled_it_is_linking() {
        let mut busy = BTreeMap::new();
        assert_eq!(progress(&busy, 7), "7 crates done; now linking");
        busy.insert("clap".to_owned(), Instant::now());
        assert_eq!(progress(&busy, 7), "7 crates done; now clap");
    }

    #[test]
    fn dependencies_are_followed_through_the_workspace_and_round_in_circles() {
        let package = |name: &str, on: &str, kind: &str| {
            format!(
                r#"{{"name": "{name}", "targets": [], "dependencies": [{{"name": "{on}", "kind": {kind}, "path": "/w"}}]}}"#
            )
        };
        let packages = [package("a", "b", "null"), package("b", "a", r#""dev""#), package("c", "datasets", r#""dev""#)];
        let with = |packages: &[String]| -> Metadata {
            serde_json::from_str(&format!(r#"{{"packages": [{}]}}"#, packages.join(","))).unwrap()
        };
        let metadata = with(&packages);
        assert!(metadata.depends_on("datasets", "datasets") && metadata.depends_on("c", "datasets"));
        assert!(!metadata.depends_on("a", "datasets"));
        let metadata = with(&[package("a", "c", "null"), packages[2].clone()]);
        assert!(metadata.depends_on("a", "datasets"));
    }

    #[test]
    fn plugs_and_commands_are_compiled_where_their_crates_are_chosen() {
        let package = |name: &str, features: &str| {
            format!(r#"{{"name": "{name}", "dependencies": [], "targets": [], "features": {{{features}}}}}"#)
        };
        let packages = [package("a", r#""default": [], "lm": [], "cli": ["lm"]"#), package("b", r#""torch": []"#)];
        let metadata: Metadata = serde_json::from_str(&format!(r#"{{"packages": [{}]}}"#, packages.join(","))).unwrap();
        let (a, b) = ("a".to_owned(), "b".to_owned());
        assert_eq!(metadata.optional_features(&[&a, &b]), ["a/cli", "a/lm"]);
        assert!(metadata.optional_features(&[&b]).is_empty());
    }

    #[test]
    fn crates_without_libtorch_come_with_their_options() {
        let text = r#"{"packages": [{"name": "tensor", "manifest_path": "/t", "dependencies": [], "targets": []}],
            "metadata": {"tessera": {"without-libtorch": ["tensor --no-default-features", "notyet"]}, "other": 1}}"#;
        let metadata: Metadata = serde_json::from_str(text).unwrap();
        assert_eq!(
            metadata.without_libtorch(),
            [WithoutLibtorch { package: "tensor".into(), options: vec!["--no-default-features".into()] }]
        );
        let error = metadata.check_names(&["bandit".into()]).unwrap_err().to_string();
        assert!(error.contains("bandit") && error.contains("tensor"), "{error}");
    }
}
