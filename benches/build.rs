//! Records the commit that the benchmark is built from: a packed benchmark runs where there is no checkout.

use std::process::Command;

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn main() {
    // Anything that moves HEAD or the index; a change to our own sources builds anew by itself.
    if let Some(folder) = git(&["rev-parse", "--absolute-git-dir"]) {
        println!("cargo::rerun-if-changed={folder}/HEAD");
        println!("cargo::rerun-if-changed={folder}/logs/HEAD");
        println!("cargo::rerun-if-changed={folder}/index");
    }
    println!("cargo::rerun-if-changed=src");
    let commit = git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_default();
    let dirty = git(&["status", "--porcelain"]).is_some_and(|changes| !changes.is_empty());
    println!("cargo::rustc-env=TESSERA_COMMIT={commit}");
    println!("cargo::rustc-env=TESSERA_DIRTY={dirty}");
}
