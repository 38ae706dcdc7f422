//! Who may use whom (docs/architecture.md): the arrows between the workspace's crates all point down.

use anyhow::{Result, bail};

use crate::cargo::{Dependency, Metadata, Package};
use crate::places::Places;

/// Tools that stand beside the library: nothing may depend on them.
const TOOLS: [&str; 2] = ["benches", "xtask"];
/// The shared crates, lowest first: each may use those before it.
const SHARED: [&str; 3] = ["datasets", "tensor", "lm"];
/// The one arrow between research crates.
const EXCEPTION: (&str, &str) = ("offline-rl", "sam-opt");

/// An error that lists every arrow that isn't allowed.
pub(crate) fn check(places: &Places, metadata: &Metadata) -> Result<()> {
    let faults = faults(places, metadata);
    if faults.is_empty() {
        return Ok(());
    }
    bail!("dependencies that the architecture forbids:\n  {}", faults.join("\n  "))
}

fn faults(places: &Places, metadata: &Metadata) -> Vec<String> {
    let mut faults = Vec::new();
    for package in &metadata.packages {
        for dependency in &package.dependencies {
            let inside = dependency.path.as_ref().is_some_and(|path| path.starts_with(&places.root));
            if inside && let Some(why) = fault(package, dependency) {
                faults.push(format!("{} -> {}: {why}", package.name, dependency.name));
            }
        }
    }
    faults
}

fn fault(package: &Package, dependency: &Dependency) -> Option<String> {
    let (from, to) = (package.name.as_str(), dependency.name.as_str());
    let layer = |name| SHARED.iter().position(|shared| *shared == name);
    if from == to {
        // A crate's own tests may ask for its other features.
        return None;
    }
    if from == "xtask" {
        return Some("xtask uses no crate of the workspace".to_owned());
    }
    if TOOLS.contains(&to) {
        return Some(format!("nothing depends on {to}"));
    }
    if from == "benches" {
        return None;
    }
    if to == "datasets" {
        let test_only = dependency.kind.as_deref() == Some("dev");
        return (!test_only).then(|| "outside benches, datasets is a dev-dependency".to_owned());
    }
    match (layer(from), layer(to)) {
        (None, Some(_)) => None,
        (Some(above), Some(below)) if below < above => None,
        (Some(_), _) => Some(format!("{from} is shared by all and must not know {to}")),
        (None, None) if (from, to) == EXCEPTION => None,
        (None, None) => Some("research crates do not depend on each other".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// Whether the arrow `from -> to` of that kind is allowed.
    fn allowed(from: &str, to: &str, kind: Option<&str>) -> bool {
        let text = serde_json::json!({"packages": [{
            "name": from, "manifest_path": "/w/x/Cargo.toml", "targets": [],
            "dependencies": [{"name": to, "kind": kind, "path": format!("/w/{to}"), "optional": false}],
        }]});
        let metadata: Metadata = serde_json::from_value(text).unwrap();
        let places = Places { root: PathBuf::from("/w"), cache: PathBuf::from("/c") };
        faults(&places, &metadata).is_empty()
    }

    #[test]
    fn arrows_point_down() {
        for (from, to, kind) in [
            ("sam-opt", "tensor", None),
            ("steering-ot", "lm", None),
            ("lm", "tensor", None),
            ("sam-opt", "datasets", Some("dev")),
            ("tensor", "datasets", Some("dev")),
            ("benches", "datasets", None),
            ("benches", "sam-opt", None),
            ("offline-rl", "sam-opt", None),
            ("sam-opt", "sam-opt", Some("dev")),
        ] {
            assert!(allowed(from, to, kind), "{from} -> {to}");
        }
    }

    #[test]
    fn every_other_arrow_is_a_fault() {
        for (from, to, kind) in [
            ("tensor", "lm", None),
            ("tensor", "sam-opt", Some("dev")),
            ("datasets", "tensor", None),
            ("sam-opt", "datasets", None),
            ("sam-opt", "offline-rl", None),
            ("qat", "sam-opt", None),
            ("lm", "qat", Some("dev")),
            ("sam-opt", "benches", Some("dev")),
            ("benches", "xtask", None),
            ("xtask", "datasets", None),
            ("qat", "sam-opt", Some("build")),
        ] {
            assert!(!allowed(from, to, kind), "{from} -> {to}");
        }
    }
}
