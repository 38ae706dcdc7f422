//! `cargo xtask lint`: formatting, clippy, rustdoc, cargo-deny, and the rules that only this workspace has.

mod layers;
mod unsafe_code;

use anyhow::{Result, bail};

use crate::cargo::Metadata;
use crate::places::Places;
use crate::process::{self, capture, run};
use crate::setup;
use crate::ui::note;

/// Runs every check and then reports all that failed.
pub(crate) fn lint(places: &Places, rules_only: bool) -> Result<()> {
    let metadata = Metadata::read(places)?;
    let mut failed = Vec::new();
    let mut check = |name: &str, outcome: Result<()>| -> Result<()> {
        if let Err(error) = outcome {
            if error.is::<process::Interrupted>() {
                return Err(error);
            }
            note(format!("{error:#}"));
            failed.push(name.to_owned());
        }
        Ok(())
    };
    check("who may use whom", layers::check(places, &metadata))?;
    check("unsafe", unsafe_code::check(places))?;
    if !rules_only {
        check("fmt", run(places.cargo().args(["fmt", "--all", "--check"])))?;
        // Clippy and rustdoc run torch-sys's build script, which wants libtorch.
        setup::ensure(places)?;
        let all: Vec<&String> = metadata.packages.iter().map(|package| &package.name).collect();
        let features: Vec<String> =
            metadata.optional_features(&all).into_iter().map(|feature| format!("--features={feature}")).collect();
        let mut clippy = places.cargo();
        clippy.args(["clippy", "--workspace", "--all-targets"]).args(&features).args(["--", "--deny=warnings"]);
        check("clippy", run(&mut clippy))?;
        for without in metadata.without_libtorch() {
            let name = format!("clippy of {} without libtorch", without.package);
            let mut clippy = places.cargo();
            clippy
                .args(["clippy", "--all-targets", "--package", &without.package])
                .args(&without.options)
                .args(["--", "--deny=warnings"]);
            check(&name, run(&mut clippy))?;
        }
        check(
            "rustdoc",
            run(places
                .cargo()
                .args(["doc", "--no-deps", "--workspace"])
                .args(&features)
                .env("RUSTDOCFLAGS", "--deny=warnings")),
        )?;
        if capture(places.cargo().args(["deny", "--version"])).is_some() {
            check("cargo-deny", run(places.cargo().args(["deny", "check", "bans", "licenses", "sources"])))?;
        } else {
            note(
                "cargo-deny is not installed: licences and sources of dependencies were not checked (`cargo install cargo-deny`)",
            );
        }
    }
    if !failed.is_empty() {
        bail!("lint found faults in: {}", failed.join(", "));
    }
    note("lint found nothing");
    Ok(())
}
