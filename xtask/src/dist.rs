//! `cargo xtask dist`: a folder with the benchmark that runs on a host which has only PyTorch.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::bench::{Benchmark, Experiment, data_needed, load_path};
use crate::data;
use crate::files::{self, Temporary};
use crate::libtorch::{Libtorch, Pins};
use crate::places::Places;
use crate::process::{capture, on_path};
use crate::setup;
use crate::ui::{bytes, note};

/// The most that `--only` may weigh.
const SMALL: u64 = 60_000_000;
const MANIFEST: &str = "MANIFEST";
const RUN: &str = include_str!("dist/run.sh");

/// Makes the folder.
pub(crate) fn run(places: &Places, only: Option<&str>, out: Option<&Path>) -> Result<()> {
    let out = match out {
        Some(out) => std::path::absolute(out)?,
        None => places.root.join("dist"),
    };
    may_replace(&out)?;
    let benchmark = Benchmark::build(places, false)?;
    let experiments = benchmark.experiments()?;
    let sets = sets_for(&experiments, only)?;
    data::fetch_if_possible(places, Some(&sets))?;

    let part = Temporary::beside(&out)?;
    let libtorch = setup::ensure(places)?;
    for program in [&benchmark.program, &benchmark.probe] {
        put_program(places, program, part.path())?;
    }
    for library in libraries(places, &benchmark.program, &libtorch)? {
        put_library(&library, part.path())?;
    }
    let known = data::sets(places)?;
    for set in &sets {
        // What is compiled in travels with the program.
        if known.iter().any(|s| s.name == *set && !s.is_packaged()) {
            continue;
        }
        let from = places.data(set);
        if from.exists() {
            copy_folder(&from, &part.path().join("data").join(set))?;
        } else {
            note(format!("{set} is not in the cache: its experiments will be skipped on the host"));
        }
    }
    write_licences(places, &sets, &part.path().join("LICENSES"))?;
    let version = Pins::read(places)?.version;
    let script = part.path().join("run");
    files::write_whole(&script, RUN.replace("@VERSION@", &version).as_bytes())?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    let size = write_manifest(part.path())?;
    check_size(size, only)?;
    part.keep_as(&out)?;
    println!("{} ({})", out.display(), bytes(size));
    note(format!(
        "copy it to a host with PyTorch {version} and start {}/run",
        out.file_name().unwrap_or_default().to_string_lossy()
    ));
    Ok(())
}

/// Only a folder that `dist` made, or none, is replaced.
fn may_replace(out: &Path) -> Result<()> {
    let empty = fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_none());
    if out.exists() && !empty && !out.join(MANIFEST).exists() {
        bail!(
            "{} is there and was not made by `cargo xtask dist`: it is left alone. Name another folder with --out",
            out.display()
        );
    }
    Ok(())
}

fn sets_for(experiments: &[Experiment], only: Option<&str>) -> Result<Vec<String>> {
    let Some(package) = only else {
        return Ok(data_needed(experiments, &[]));
    };
    if !experiments.iter().any(|one| one.package == package) {
        let mut packages: Vec<&str> = experiments.iter().map(|one| one.package.as_str()).collect();
        packages.dedup();
        bail!("no experiment belongs to a crate named {package}; those with experiments are {}", packages.join(", "));
    }
    Ok(data_needed(experiments, &[package.to_owned()]))
}

fn check_size(size: u64, only: Option<&str>) -> Result<()> {
    match only {
        Some(package) if size > SMALL => bail!(
            "the folder for {package} weighs {}, more than the {} that `--only` promises. Without --only there is no limit",
            bytes(size),
            bytes(SMALL)
        ),
        _ => Ok(()),
    }
}

fn put_program(places: &Places, program: &Path, folder: &Path) -> Result<()> {
    let target = folder.join("bin").join(program.file_name().unwrap_or_default());
    copy(program, &target)?;
    if on_path("strip") {
        let stripped = capture(places.command("strip").arg(&target));
        stripped.with_context(|| format!("`strip {}` failed", target.display()))?;
    } else {
        note("`strip` is not here (package binutils): the programs keep their debug information");
    }
    Ok(())
}

/// The shared libraries of a program that a host with PyTorch may lack.
fn libraries(places: &Places, program: &Path, libtorch: &Libtorch) -> Result<Vec<PathBuf>> {
    let mut ldd = places.command("ldd");
    load_path(&mut ldd, places, libtorch);
    let listing =
        capture(ldd.env("LC_ALL", "C").arg(program)).with_context(|| format!("`ldd {}` failed", program.display()))?;
    chosen_libraries(&listing, &libtorch.lib())
}

/// `ldd` names the libraries of libraries, too; those in libtorch's folder and those that come with PyTorch, CUDA or
/// glibc are the host's.
fn chosen_libraries(listing: &str, lib: &Path) -> Result<Vec<PathBuf>> {
    const HOSTS: [&str; 30] = [
        "libtorch",
        "libc10",
        "libgomp",
        // CUDA. By name: libcurl and many others begin with the same letters.
        "libcuda.so",
        "libcudart",
        "libcudnn",
        "libcublas",
        "libcufft",
        "libcufile",
        "libcupti",
        "libcurand",
        "libcusolver",
        "libcusparse",
        "libnccl",
        "libnvidia-",
        "libnvrtc",
        "libnvJitLink",
        "libnvToolsExt",
        "libnvshmem",
        "libc.so",
        "libm.so",
        "libdl.so",
        "libpthread.so",
        "librt.so",
        "libresolv.so",
        "libutil.so",
        "libanl.so",
        "ld-linux",
        "linux-vdso",
        "libmvec.so",
    ];
    let mut chosen = Vec::new();
    for line in listing.lines() {
        let line = line.trim();
        if line.ends_with("not found") {
            bail!("the benchmark doesn't load here: {line}");
        }
        let Some((name, place)) = line.split_once(" => ") else {
            continue;
        };
        let place = Path::new(place.split(" (").next().unwrap_or_default());
        let hosts = HOSTS.iter().any(|start| name.starts_with(start)) || place.starts_with(lib);
        if !hosts {
            chosen.push(place.to_path_buf());
        }
    }
    Ok(chosen)
}

/// The C++ runtime lies apart: the run script uses it only where the host's is too old.
fn put_library(library: &Path, folder: &Path) -> Result<()> {
    let name = library.file_name().unwrap_or_default();
    let text = name.to_string_lossy();
    let runtime = text.starts_with("libstdc++") || text.starts_with("libgcc_s");
    let room = if runtime { "lib/cxx" } else { "lib" };
    copy(library, &folder.join(room).join(name))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    let mut source = fs::File::open(from).with_context(|| format!("{} can't be read", from.display()))?;
    files::write_from(&mut source, to, |_| {})?;
    fs::set_permissions(to, source.metadata()?.permissions())
        .with_context(|| format!("{} can't be made executable", to.display()))
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            copy(&entry.path(), &to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

/// The licences of the programs, of the data that is compiled into them, and a notice of the data beside them.
fn write_licences(places: &Places, shipped: &[String], folder: &Path) -> Result<()> {
    for name in ["LICENSE-MIT", "LICENSE-APACHE"] {
        copy(&places.root.join(name), &folder.join(name))?;
    }
    let data = places.root.join("crates/datasets/data");
    for entry in fs::read_dir(&data).with_context(|| format!("{} can't be read", data.display()))? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with("LICENSE-") {
            copy(&entry.path(), &folder.join(entry.file_name()))?;
        }
    }
    let mut notice = String::from("This folder contains Tessera (MIT OR Apache-2.0) and these data sets.\n");
    for set in data::sets(places)? {
        if set.is_packaged() && !(shipped.contains(&set.name) && places.data(&set.name).exists()) {
            continue;
        }
        writeln!(notice, "\n{} ({})\n  Licence: {}\n  Source: {}", set.title, set.name, set.licence, set.origin())?;
        if let Some(note) = &set.note {
            writeln!(notice, "  {note}")?;
        }
    }
    files::write_whole(&folder.join("NOTICE"), notice.as_bytes())
}

/// Writes hash, size and path of every file, and returns the sum of the sizes.
fn write_manifest(folder: &Path) -> Result<u64> {
    let mut paths = Vec::new();
    collect(folder, &mut paths)?;
    paths.sort();
    let mut text = String::new();
    let mut total = 0;
    for path in paths {
        let size = fs::metadata(&path)?.len();
        let name = path.strip_prefix(folder)?;
        writeln!(text, "{}  {size}  {}", files::sha256(&path, |_| {})?, name.display())?;
        total += size;
    }
    files::write_whole(&folder.join(MANIFEST), text.as_bytes())?;
    Ok(total + text.len() as u64)
}

fn collect(folder: &Path, into: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            collect(&entry.path(), into)?;
        } else {
            into.push(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Output};

    use super::*;

    #[test]
    fn the_hosts_own_libraries_stay_out() {
        let listing = "
            linux-vdso.so.1 (0x00007)
            libopenblas.so.0 => /lib/x86_64-linux-gnu/libopenblas.so.0 (0x0)
            libgfortran.so.5 => /lib/x86_64-linux-gnu/libgfortran.so.5 (0x0)
            libtorch_cpu.so => /w/.libtorch/lib/libtorch_cpu.so (0x0)
            libmkl_core.so.2 => /w/.libtorch/lib/libmkl_core.so.2 (0x0)
            libcudart.so.13 => /w/.libtorch/lib/../../nvidia/cu13/lib/libcudart.so.13 (0x0)
            libcuda.so.1 => /lib/libcuda.so.1 (0x0)
            libcublasLt.so.13 => /lib/libcublasLt.so.13 (0x0)
            libcurl.so.4 => /lib/libcurl.so.4 (0x0)
            libgomp.so.1 => /lib/libgomp.so.1 (0x0)
            libstdc++.so.6 => /lib/libstdc++.so.6 (0x0)
            libc.so.6 => /lib/libc.so.6 (0x0)
            /lib64/ld-linux-x86-64.so.2 (0x0)";
        let chosen = chosen_libraries(listing, Path::new("/w/.libtorch/lib")).unwrap();
        let names: Vec<_> = chosen.iter().map(|path| path.file_name().unwrap()).collect();
        assert_eq!(names, ["libopenblas.so.0", "libgfortran.so.5", "libcurl.so.4", "libstdc++.so.6"]);
        assert!(chosen_libraries("libx.so => not found", Path::new("/")).is_err());
    }

    #[test]
    fn a_folder_of_somebody_else_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        may_replace(folder.path()).unwrap();
        may_replace(&folder.path().join("new")).unwrap();
        fs::write(folder.path().join("thesis.tex"), "").unwrap();
        assert!(may_replace(folder.path()).unwrap_err().to_string().contains("left alone"));
        fs::write(folder.path().join(MANIFEST), "").unwrap();
        may_replace(folder.path()).unwrap();
    }

    #[test]
    fn the_manifest_has_a_line_for_every_file_and_the_limit_holds_for_only() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("bin")).unwrap();
        fs::write(folder.path().join("bin/x"), "hello").unwrap();
        let size = write_manifest(folder.path()).unwrap();
        let text = fs::read_to_string(folder.path().join(MANIFEST)).unwrap();
        assert!(text.starts_with("2cf24dba") && text.ends_with("  5  bin/x\n"), "{text}");
        assert_eq!(size, 5 + text.len() as u64);
        check_size(SMALL + 1, None).unwrap();
        let error = check_size(SMALL + 1, Some("sam-opt")).unwrap_err().to_string();
        assert!(error.contains("60 MB") && error.contains("sam-opt"), "{error}");
    }

    /// A packed folder whose programs print what they were given, run with a libtorch of that version.
    fn start(version: &str, arguments: &[&str]) -> Output {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for room in ["bin", "torch/lib", "nvidia/cu13/lib"] {
            fs::create_dir_all(at(room)).unwrap();
        }
        let executable = |name: &str, text: &str| {
            fs::write(at(name), text).unwrap();
            fs::set_permissions(at(name), fs::Permissions::from_mode(0o755)).unwrap();
        };
        let show = "#!/bin/sh\necho \"$0 $* LD=$LD_LIBRARY_PATH cache=$TESSERA_CACHE\"\n";
        executable("bin/tessera-bench", show);
        executable("bin/probe", show);
        executable("run", &RUN.replace("@VERSION@", "2.11.0"));
        fs::write(at("torch/lib/libtorch_cpu.so"), "").unwrap();
        fs::write(at("torch/version.py"), format!("__version__ = '{version}'\n")).unwrap();
        let mut run = Command::new("sh");
        // Relative to where it is typed, which is not the folder of the script.
        run.arg("../run").args(arguments).current_dir(at("torch")).env("LIBTORCH", ".").env("TESSERA_CACHE", "cache");
        run.output().unwrap()
    }

    #[test]
    fn the_run_script_finds_pytorch_and_passes_everything_on() {
        let output = start("2.11.0+cu130", &["run", "--full"]);
        let text = String::from_utf8(output.stdout).unwrap();
        for part in
            ["bin/tessera-bench run --full", "LD=/", "torch/./lib:", "nvidia/cu13/lib:", "cache=/", "torch/cache"]
        {
            assert!(text.contains(part), "{text}");
        }
        let probe = start("2.11.0", &["probe"]);
        assert!(String::from_utf8(probe.stdout).unwrap().contains("bin/probe"));
    }

    #[test]
    fn the_run_script_names_both_versions_when_they_differ() {
        let output = start("2.4.0+cpu", &["list"]);
        assert_eq!(output.status.code(), Some(1));
        let text = String::from_utf8(output.stderr).unwrap();
        for part in ["2.4.0+cpu", "2.11.0", "LIBTORCH"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
