//! The virtual environment of the Python peers: made once for each content of `benches/peers/requirements.txt` and of
//! `requirements-alone.txt` beside it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::files::{self, Lock};
use crate::places::Places;
use crate::process::{self, on_path, run_forwarding, watch};
use crate::ui::{Spinner, bytes, note};

/// Space that PyTorch with its NVIDIA packages takes while it is installed.
const NEEDED: u64 = 9_000_000_000;

/// What pip installs.
const LIST: &str = "benches/peers/requirements.txt";
/// What pip then installs without looking at its dependencies: packages that ask for older versions than they need.
const ALONE: &str = "benches/peers/requirements-alone.txt";

/// Where the environment lies, and whether it is finished.
pub(crate) fn find(places: &Places) -> Result<(PathBuf, bool)> {
    let read = |list: &str| {
        let path = places.root.join(list);
        fs::read(&path).with_context(|| format!("{} can't be read", path.display()))
    };
    // The second list is there only while a package needs it.
    let text = [read(LIST)?, read(ALONE).unwrap_or_default()].concat();
    let folder = places.cache.join("peers").join(&files::sha256_of(&text)[..16]);
    let finished = folder.join("complete").exists() && folder.join("bin/python").exists();
    Ok((folder, finished))
}

/// The Python of the peers, with everything installed.
pub(crate) fn python(places: &Places) -> Result<PathBuf> {
    let (folder, finished) = find(places)?;
    let python = folder.join("bin/python");
    if finished {
        return Ok(python);
    }
    let _lock = Lock::on(&places.cache)?;
    // An environment can't be moved, so a half-made one is known by its missing stamp.
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("{} can't be removed", folder.display()))?;
    }
    files::need_space(&places.cache, NEEDED, "the peers' virtual environment")?;
    note(format!(
        "making the peers' virtual environment in {} (about {} while it is made)",
        folder.display(),
        bytes(NEEDED)
    ));
    let made = make(places, &folder);
    if made.is_err() {
        let _ = fs::remove_dir_all(&folder);
    }
    made?;
    files::write_whole(&folder.join("complete"), b"")?;
    Ok(python)
}

fn make(places: &Places, folder: &Path) -> Result<()> {
    if !on_path("python3") {
        bail!("the peers need Python 3, and `python3` is not here");
    }
    {
        let _spinner = Spinner::start("python3 -m venv");
        let mut venv = places.command("python3");
        venv.args(["-m", "venv"]).arg(folder);
        let finished = watch(&mut venv, |_| {})?;
        if !finished.status.success() {
            bail!(
                "`python3 -m venv` failed: {}. On Debian and Ubuntu: `apt-get install python3-venv`",
                finished.lines.join(" ")
            );
        }
    }
    let temporary = folder.join("tmp");
    fs::create_dir_all(&temporary)?;
    let lists = [(LIST, &[][..]), (ALONE, &["--no-deps"])];
    for (list, options) in lists.into_iter().filter(|(list, _)| *list == LIST || places.root.join(list).exists()) {
        let mut pip: Command = places.command(folder.join("bin/python"));
        pip.args(["-m", "pip", "install", "--no-cache-dir", "--disable-pip-version-check", "--no-input"])
            .args(options)
            .arg("--requirement")
            .arg(places.root.join(list))
            .env("TMPDIR", &temporary);
        let status = run_forwarding(&mut pip)?;
        process::check()?;
        if !status.success() {
            bail!(
                "the peers could not be installed; pip's messages are above. `cargo xtask bench --peers` tries again"
            );
        }
    }
    fs::remove_dir_all(&temporary)?;
    Ok(())
}
