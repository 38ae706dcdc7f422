//! `cargo xtask test`: first the crates that must work without libtorch, then everything, then the documentation's examples.

use std::time::Instant;

use anyhow::{Result, bail};

use crate::cargo::{Metadata, links_libtorch};
use crate::data;
use crate::places::Places;
use crate::process::{self, Interrupted, capture};
use crate::setup;
use crate::ui::{duration, note, table};

/// Runs the tests of the crates, or of all.
pub(crate) fn run(places: &Places, crates: &[String], documentation: bool) -> Result<()> {
    let metadata = Metadata::read(places)?;
    metadata.check_names(crates)?;
    let chosen = |name: &String| crates.is_empty() || crates.contains(name);
    let mut done = Summary::default();

    fetch_data(places)?;
    for without in metadata.without_libtorch() {
        if !chosen(&without.package) {
            continue;
        }
        if links_libtorch(places, &without.package, &without.options) {
            bail!(
                "{} {} must work without libtorch, but it depends on torch-sys",
                without.package,
                without.options.join(" ")
            );
        }
        let mut cargo = places.cargo();
        cargo.args(["test", "--package", &without.package]).args(&without.options);
        hide_libtorch(&mut cargo, places);
        done.add(format!("{} without libtorch", without.package), &mut cargo)?;
    }

    // What ran above with its default features is not run again.
    let again = |name: &String| {
        metadata.without_libtorch().iter().all(|without| without.package != *name || !without.options.is_empty())
    };
    let rest: Vec<&String> =
        metadata.packages.iter().map(|package| &package.name).filter(|name| chosen(name) && again(name)).collect();
    if rest.iter().any(|name| links_libtorch(places, name, &[])) {
        setup::ensure(places)?;
    }
    let packages = |names: &[&String]| -> Vec<String> {
        if crates.is_empty() {
            return vec!["--workspace".to_owned()];
        }
        names.iter().map(|name| format!("--package={name}")).collect()
    };
    if !rest.is_empty() {
        let mut cargo = places.cargo();
        if capture(places.cargo().args(["nextest", "--version"])).is_some() {
            cargo.args(["nextest", "run", "--no-tests=pass"]);
            cargo.args(packages(&rest));
            if crates.is_empty() {
                excluding(&mut cargo, &metadata, &rest);
            }
            done.add("tests (nextest)".to_owned(), &mut cargo)?;
        } else {
            cargo.args(["test", "--tests", "--examples"]).args(packages(&rest));
            if crates.is_empty() {
                excluding(&mut cargo, &metadata, &rest);
            }
            done.add("tests (cargo test)".to_owned(), &mut cargo)?;
        }
    }
    let with_library: Vec<&String> = rest
        .iter()
        .copied()
        .filter(|name| metadata.package(name).is_some_and(crate::cargo::Package::has_library))
        .collect();
    if documentation && !with_library.is_empty() {
        let mut cargo = places.cargo();
        cargo.args(["test", "--doc"]);
        cargo.args(with_library.iter().map(|name| format!("--package={name}")));
        done.add("documentation's examples".to_owned(), &mut cargo)?;
    }
    done.report()
}

/// `--exclude` for the packages that have run already.
fn excluding(cargo: &mut std::process::Command, metadata: &Metadata, rest: &[&String]) {
    for package in &metadata.packages {
        if !rest.contains(&&package.name) {
            cargo.arg(format!("--exclude={}", package.name));
        }
    }
}

/// Takes libtorch away from a cargo: LIBTORCH leads nowhere, and the runner passes no loader path on.
///
/// The packages that are tested so have no torch-sys among their dependencies, so nothing is built again for it.
fn hide_libtorch(cargo: &mut std::process::Command, places: &Places) {
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    cargo.env("LIBTORCH", places.target().join("no-libtorch-here"));
    cargo.env_remove("LD_LIBRARY_PATH");
    cargo.args([
        "--config",
        &format!("target.{target}.runner = ['env', '--unset=LD_LIBRARY_PATH', '--unset=LIBTORCH']"),
    ]);
}

/// Tests that lack their data skip with a line, so a set that can't be fetched is no failure.
fn fetch_data(places: &Places) -> Result<()> {
    match data::fetch_if_possible(places, None) {
        Ok(outcome) => {
            let absent = [outcome.skipped, outcome.failed].concat();
            if !absent.is_empty() {
                note(format!("tests that need {} skip themselves", absent.join(", ")));
            }
            Ok(())
        }
        Err(error) if error.is::<Interrupted>() => Err(error),
        Err(error) => {
            note(format!("{error:#}"));
            Ok(())
        }
    }
}

/// What ran, for how long, and how it ended. Everything runs before a failure is reported.
#[derive(Default)]
struct Summary {
    rows: Vec<(String, String, bool)>,
}

impl Summary {
    fn add(&mut self, name: String, command: &mut std::process::Command) -> Result<()> {
        let started = Instant::now();
        let outcome = process::run(command);
        if let Err(error) = &outcome {
            if error.is::<Interrupted>() {
                return outcome;
            }
            note(format!("{error:#}"));
        }
        self.rows.push((name, duration(started.elapsed()), outcome.is_ok()));
        Ok(())
    }

    fn report(self) -> Result<()> {
        let mut rows = table(["what ran", "time", "result"]);
        let mut failed = Vec::new();
        for (name, time, passed) in self.rows {
            let result = if passed { "passed" } else { "FAILED" };
            rows.add_row([name.as_str(), &time, result]);
            if !passed {
                failed.push(name);
            }
        }
        note(rows.to_string());
        if !failed.is_empty() {
            bail!("failed: {}", failed.join(", "));
        }
        Ok(())
    }
}
