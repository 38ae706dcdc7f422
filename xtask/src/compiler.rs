//! The C++ compiler, which torch-sys is built with.

use std::process::Command;

use anyhow::{Result, bail};

use crate::places::Places;
use crate::process::capture;

/// How it is got.
pub(crate) const REMEDY: &str = "apt-get install g++";

/// The words that start it, as the crate `cc` finds them: `$CXX`, which may bring options along, else `c++`.
fn words() -> Vec<String> {
    let named = std::env::var("CXX").unwrap_or_default();
    let words: Vec<String> = named.split_whitespace().map(str::to_owned).collect();
    if words.is_empty() { vec!["c++".to_owned()] } else { words }
}

/// The first line that it says of its version; `None` when it can't be started.
pub(crate) fn version(places: &Places) -> Option<String> {
    let words = words();
    let mut compiler: Command = places.command(&words[0]);
    let text = capture(compiler.args(&words[1..]).arg("--version"))?;
    text.lines().next().map(str::to_owned)
}

/// An error without one, for commands that are about to fetch hundreds of megabytes and then build with it.
pub(crate) fn require(places: &Places) -> Result<()> {
    if version(places).is_none() {
        bail!(
            "there is no C++ compiler: `{}` can't be started, and the bindings to libtorch are built with it. \
             Install one (on Debian and Ubuntu `{REMEDY}`), or set CXX to yours",
            words().join(" ")
        );
    }
    Ok(())
}
