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

    let data = fetch_data(
        places,
        metadata.packages.iter().any(|package| chosen(&package.name) && metadata.depends_on(&package.name, "datasets")),
    )?;
    for without in metadata.without_libtorch() {
        if !chosen(&without.package) {
            continue;
        }
        if links_libtorch(places, &without.package, &without.options)? {
            bail!(
                "{} {} must work without libtorch, but it depends on torch-sys",
                without.package,
                without.options.join(" ")
            );
        }
        let mut cargo = places.cargo();
        cargo.args(["test", "--package", &without.package]).args(&without.options);
        hide_libtorch(&mut cargo, places);
        data.demand(&mut cargo);
        done.add(format!("{} without libtorch", without.package), &mut cargo)?;
    }

    // What ran above with its default features is not run again.
    let again = |name: &String| {
        metadata.without_libtorch().iter().all(|without| without.package != *name || !without.options.is_empty())
    };
    let rest: Vec<&String> =
        metadata.packages.iter().map(|package| &package.name).filter(|name| chosen(name) && again(name)).collect();
    for name in &rest {
        if links_libtorch(places, name, &[])? {
            setup::ensure(places)?;
            break;
        }
    }
    let packages = |names: &[&String]| -> Vec<String> {
        if crates.is_empty() {
            return vec!["--workspace".to_owned()];
        }
        names.iter().map(|name| format!("--package={name}")).collect()
    };
    let features = |names: &[&String]| -> Vec<String> {
        metadata.optional_features(names).into_iter().map(|feature| format!("--features={feature}")).collect()
    };
    if !rest.is_empty() {
        let mut cargo = places.cargo();
        data.demand(&mut cargo);
        if capture(places.cargo().args(["nextest", "--version"])).is_some() {
            cargo.args(["nextest", "run", "--no-fail-fast", "--no-tests=pass"]);
            cargo.args(packages(&rest)).args(features(&rest));
            if crates.is_empty() {
                excluding(&mut cargo, &metadata, &rest);
            }
            done.add("tests (nextest)".to_owned(), &mut cargo)?;
        } else {
            cargo.args(["test", "--tests", "--examples"]).args(packages(&rest)).args(features(&rest));
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
        data.demand(&mut cargo);
        cargo.args(["test", "--doc"]);
        cargo.args(with_library.iter().map(|name| format!("--package={name}")));
        cargo.args(features(&with_library));
        done.add("documentation's examples".to_owned(), &mut cargo)?;
    }
    done.report(&data)
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

/// What the tests find in the cache.
#[derive(Default)]
struct TestData {
    /// Sets that are there: their tests must not skip themselves.
    there: Vec<String>,
    /// Sets that aren't: their tests skip themselves.
    absent: Vec<String>,
}

impl TestData {
    /// Makes the tests of the sets that are there fail, not skip, when they don't find their data.
    fn demand(&self, cargo: &mut std::process::Command) {
        // A user who demands sets knows better.
        if !self.there.is_empty() && std::env::var_os(REQUIRED).is_none() {
            cargo.env(REQUIRED, self.there.join(","));
        }
    }
}

/// The variable with the names of the sets whose tests must find them.
const REQUIRED: &str = "TESSERA_REQUIRE_DATA";

/// Fetches the data sets when the chosen crates want any. One that can't be fetched is no failure.
fn fetch_data(places: &Places, wanted: bool) -> Result<TestData> {
    if !wanted {
        return Ok(TestData::default());
    }
    match data::fetch_if_possible(places, None) {
        Err(error) if error.is::<Interrupted>() => return Err(error),
        Err(error) => note(format!("{error:#}")),
        Ok(_) => {}
    }
    // A file that can't be read has been complained of already.
    let sets = data::sets(places).unwrap_or_default();
    let (there, absent): (Vec<_>, Vec<_>) =
        sets.into_iter().filter(data::Set::is_packaged).partition(|set| set.is_cached(places));
    let names = |sets: Vec<data::Set>| sets.into_iter().map(|set| set.name).collect();
    Ok(TestData { there: names(there), absent: names(absent) })
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

    fn report(self, data: &TestData) -> Result<()> {
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
        if !data.absent.is_empty() {
            note(format!(
                "skipped: the tests that need {}, which could not be fetched (see above)",
                data.absent.join(", ")
            ));
        }
        if !failed.is_empty() {
            bail!("failed: {}", failed.join(", "));
        }
        Ok(())
    }
}
