//! `cargo xtask env`: the exports that a user's own project needs, and nothing else on stdout.

use anyhow::{Result, bail};
use clap::ValueEnum;

use crate::libtorch::{self, Pins};
use crate::places::Places;

/// The shell that reads the exports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Dialect {
    /// bash, zsh, dash and their kin.
    Sh,
    /// fish.
    Fish,
}

/// Prints the exports.
pub(crate) fn run(places: &Places, dialect: Dialect) -> Result<()> {
    let pins = Pins::read(places)?;
    places.refuse_relative_libtorch()?;
    let home = places.user_libtorch().unwrap_or_else(|| places.link());
    match libtorch::inspect(&home, &pins.version) {
        Ok(found) => {
            print!("{}", exports(&found.home.to_string_lossy(), dialect));
            Ok(())
        }
        Err(flaw) => bail!("no PyTorch {} in {} ({flaw}). Run `cargo xtask setup` first", pins.version, home.display()),
    }
}

fn exports(home: &str, dialect: Dialect) -> String {
    match dialect {
        Dialect::Sh => {
            let home = quoted(home, "'\\''");
            format!(
                "export LIBTORCH={home}\n\
                 export LD_LIBRARY_PATH={home}/lib\"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}\"\n"
            )
        }
        Dialect::Fish => {
            let home = quoted(&home.replace('\\', "\\\\"), "\\'");
            format!(
                "set -gx LIBTORCH {home}\n\
                 set -gx --path LD_LIBRARY_PATH {home}/lib $LD_LIBRARY_PATH\n"
            )
        }
    }
}

fn quoted(text: &str, quote: &str) -> String {
    format!("'{}'", text.replace('\'', quote))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn in_shell(home: &str, before: Option<&str>) -> String {
        let script = format!("{}printf '%s|%s' \"$LIBTORCH\" \"$LD_LIBRARY_PATH\"", exports(home, Dialect::Sh));
        let mut shell = Command::new("sh");
        shell.args(["-c", &script]).env_remove("LD_LIBRARY_PATH");
        if let Some(before) = before {
            shell.env("LD_LIBRARY_PATH", before);
        }
        String::from_utf8(shell.output().unwrap().stdout).unwrap()
    }

    #[test]
    fn a_shell_that_reads_the_exports_has_both_variables() {
        assert_eq!(in_shell("/opt/lt", None), "/opt/lt|/opt/lt/lib");
        assert_eq!(in_shell("/opt/lt", Some("/a:/b")), "/opt/lt|/opt/lt/lib:/a:/b");
        assert_eq!(in_shell("/o p't/$x", None), "/o p't/$x|/o p't/$x/lib");
    }

    #[test]
    fn fish_gets_its_own_words() {
        let text = exports("/opt/it's", Dialect::Fish);
        assert!(text.starts_with("set -gx LIBTORCH '/opt/it\\'s'\n"), "{text}");
        assert!(text.contains("LD_LIBRARY_PATH '/opt/it\\'s'/lib $LD_LIBRARY_PATH"), "{text}");
    }
}
