//! `cargo xtask setup`: finds or makes libtorch, then OpenBLAS.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};

use crate::compiler;
use crate::fetch::{self, Fetcher};
use crate::files::{self, Lock, Temporary};
use crate::libtorch::{self, Flaw, Libtorch, Pins, PythonTorch};
use crate::places::Places;
use crate::process::{self, Ending, capture, on_path, watch_until};
use crate::ui::{Meter, Spinner, bytes, note};
use crate::unpack::unpack;

/// What set-up was asked for.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Options {
    /// A libtorch that can use a GPU.
    pub cuda: bool,
    /// Work with what is in the cache.
    pub offline: bool,
}

/// The whole set-up, with a line on each part.
pub(crate) fn run(places: &Places, options: Options) -> Result<()> {
    let found = libtorch(places, options, true)?;
    if !found.cuda && Path::new("/proc/driver/nvidia/version").exists() {
        note("an NVIDIA driver is here: `cargo xtask setup --cuda` makes the libtorch that uses it");
    }
    openblas(places, true)
}

/// Whether continuous integration says so of itself.
pub(crate) fn in_ci() -> bool {
    std::env::var_os("CI").is_some_and(|value| value == "true")
}

/// The set-up that other commands begin with: silent when everything is there, and nothing is installed on the system.
pub(crate) fn ensure(places: &Places) -> Result<Libtorch> {
    let found = libtorch(places, Options::default(), false)?;
    if in_ci() {
        openblas(places, false)?;
    }
    Ok(found)
}

/// A libtorch of the right version: the user's, the checkout's, a Python's, or one made from wheels.
fn libtorch(places: &Places, options: Options, speak: bool) -> Result<Libtorch> {
    let pins = Pins::read(places)?;
    places.refuse_relative_libtorch()?;
    if let Some(home) = places.user_libtorch() {
        if python_demanded() {
            bail!(
                "LIBTORCH ({}) and LIBTORCH_USE_PYTORCH are both set: the bindings would be built for the Python's \
                 PyTorch and loaded with the other. Unset one of them",
                home.display()
            );
        }
        let found = users_own(places, &home, &pins.version, options.cuda)?;
        if speak {
            there(&found, "LIBTORCH, which you set");
        }
        return Ok(found);
    }
    if let Some(found) = in_checkout(places, &pins, options) {
        if speak {
            there(&found, &target_of(places));
        }
        return Ok(found);
    }
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        bail!(
            "libtorch is set up by itself on Linux x86-64 only; this is {} {}. Install PyTorch {} and set LIBTORCH to its folder (the one with `include` and `lib`)",
            std::env::consts::OS,
            std::env::consts::ARCH,
            pins.version
        );
    }
    let _lock = Lock::on(&places.cache)?;
    // Another process may have made it while we waited.
    if let Some(found) = in_checkout(places, &pins, options) {
        there(&found, &target_of(places));
        return Ok(found);
    }
    if let Some(found) = from_python(places, &pins, options)? {
        return Ok(found);
    }
    from_wheels(places, &pins, options)
}

/// Whether the user wants the Python's torch and no other.
fn python_demanded() -> bool {
    std::env::var_os("LIBTORCH_USE_PYTORCH").is_some()
}

fn there(found: &Libtorch, whence: &str) {
    let kind = if found.cuda { " with CUDA" } else { "" };
    note(format!("libtorch {}{kind} is there ({whence})", found.version));
}

fn target_of(places: &Places) -> String {
    fs::read_link(places.link())
        .map_or_else(|_| ".libtorch".to_owned(), |target| format!(".libtorch -> {}", target.display()))
}

/// The user's own LIBTORCH is used or refused, never replaced.
fn users_own(places: &Places, home: &Path, wanted: &str, cuda: bool) -> Result<Libtorch> {
    let way_out = format!("Set LIBTORCH to a PyTorch {wanted}, or unset it: then `cargo xtask setup` makes one");
    let home_text = home.display();
    match libtorch::inspect(home, wanted) {
        Ok(found) if cuda && !found.cuda => bail!(
            "LIBTORCH is {home_text}, and {}. Set LIBTORCH to a PyTorch {wanted} with CUDA, or unset it and run `cargo xtask setup --cuda`",
            Flaw::NoCuda
        ),
        Ok(found) => match libtorch::unresolved(places, &found).first() {
            Some(first) => bail!("LIBTORCH is {home_text}, but it can't be loaded ({first}). {way_out}"),
            None => Ok(found),
        },
        Err(Flaw::Version(version)) => bail!(
            "LIBTORCH is {home_text}, which is PyTorch {version}, but this workspace needs PyTorch {wanted} (its bindings fit that version only). {way_out}"
        ),
        Err(flaw) => bail!("LIBTORCH is {home_text}, but {flaw}. {way_out}"),
    }
}

/// What `.libtorch` leads to, if it is what was asked for.
fn in_checkout(places: &Places, pins: &Pins, options: Options) -> Option<Libtorch> {
    if python_demanded() {
        let torch = libtorch::python_torch(places)?;
        if fs::read_link(places.link()).ok()? != python_home(places, &torch) {
            return None;
        }
    }
    let found = libtorch::inspect(&places.link(), &pins.version).ok()?;
    (found.cuda || !options.cuda).then_some(found)
}

/// The folder of the cache that stands for a Python's torch.
fn python_home(places: &Places, torch: &PythonTorch) -> PathBuf {
    let key = &files::sha256_of(torch.folder.as_os_str().as_encoded_bytes())[..12];
    places.cache.join("libtorch").join(format!("python-{key}"))
}

/// A Python's torch: `.libtorch` becomes a folder of the cache whose `lib` and `include` are links to the package's, so
/// that `$ORIGIN/../../nvidia/*/lib` in its libraries leads to the NVIDIA packages beside it.
fn from_python(places: &Places, pins: &Pins, options: Options) -> Result<Option<Libtorch>> {
    let demanded = python_demanded();
    let wanted = &pins.version;
    let Some(torch) = libtorch::python_torch(places) else {
        if demanded {
            bail!(
                "LIBTORCH_USE_PYTORCH is set, but this Python has no torch. Install it (`pip install torch=={wanted}`), or unset LIBTORCH_USE_PYTORCH"
            );
        }
        return Ok(None);
    };
    let folder = torch.folder.display();
    let refuse = |why: String| -> Result<Option<Libtorch>> {
        if demanded {
            bail!("LIBTORCH_USE_PYTORCH is set, but {why}. Install PyTorch {wanted} there, or unset it");
        }
        note(format!("{why}: it is left alone"));
        Ok(None)
    };
    if torch.version != *wanted {
        return refuse(format!(
            "your Python has PyTorch {} in {folder}, and this workspace needs {wanted}",
            torch.version
        ));
    }
    let found = match libtorch::inspect(&torch.folder, wanted) {
        Ok(found) => found,
        Err(flaw) => {
            return refuse(format!("your Python's PyTorch in {folder} can't be linked ({flaw})"));
        }
    };
    if options.cuda && !found.cuda {
        return refuse(format!("your Python's PyTorch in {folder} was built without CUDA"));
    }
    let missing = libtorch::unresolved(places, &found);
    if let Some(first) = missing.first() {
        return refuse(format!("your Python's PyTorch in {folder} can't be loaded ({first})"));
    }
    let home = python_home(places, &torch);
    let part = Temporary::inside(&places.cache.join("libtorch"))?;
    for name in ["lib", "include"] {
        symlink(torch.folder.join(name), part.path().join(name))
            .with_context(|| format!("{}/{name} can't be linked", part.path().display()))?;
    }
    libtorch::finish(part.path(), wanted, false)?;
    part.keep_as(&home)?;
    note(format!("libtorch {wanted} is your Python's ({folder})"));
    link(places, &home, pins).map(Some)
}

/// libtorch from the pinned wheels, made once in the cache.
fn from_wheels(places: &Places, pins: &Pins, options: Options) -> Result<Libtorch> {
    let name = if options.cuda { "cuda" } else { "cpu" };
    let (build, archives) = pins.build(name)?;
    let folder = places.cache.join("libtorch").join(format!("{}-{name}", pins.version));
    let home = crate::places::plain(&folder.join(&build.home));
    match libtorch::inspect(&home, &pins.version) {
        Ok(found) => {
            note(format!("libtorch {} is in the cache ({})", found.version, folder.display()));
            return link(places, &home, pins);
        }
        Err(Flaw::Absent) => {}
        Err(flaw) => note(format!("the libtorch in the cache can't be used: {flaw}. It is made again")),
    }
    let missing = fetch::still_to_fetch(places, &archives);
    if !missing.is_empty() && !options.offline {
        compiler::require(places)?;
    }
    let to_fetch: u64 = missing.iter().sum();
    let largest = missing.iter().max().copied().unwrap_or(0);
    files::need_space(
        &places.cache,
        (to_fetch + largest).max(to_fetch + build.unpacked),
        &format!("libtorch {}", pins.version),
    )?;
    note(format!(
        "making libtorch {} ({name}, {} unpacked) in {}; {} to fetch in {} files",
        pins.version,
        bytes(build.unpacked),
        folder.display(),
        bytes(to_fetch),
        missing.len()
    ));
    let fetcher = Fetcher::new(places, options.offline);
    let mut wheels = Vec::new();
    for archive in &archives {
        wheels.push(fetcher.get(archive).map_err(|error| way_out(places, pins, archive, error))?);
    }
    let part = Temporary::inside(&places.cache.join("libtorch"))?;
    {
        let mut meter = Meter::start(format!("unpacking libtorch {}", pins.version), build.unpacked);
        for wheel in &wheels {
            unpack(wheel, &build.take, part.path(), &mut |count| {
                meter.add(count);
            })?;
        }
    }
    let home_part = crate::places::plain(&part.path().join(&build.home));
    libtorch::finish(&home_part, &pins.version, build.linker_script)?;
    libtorch::record_sizes(&home_part)?;
    let made = libtorch::inspect(&home_part, &pins.version)
        .map_err(|flaw| anyhow!("libtorch was unpacked, but {flaw}: xtask/libtorch.toml doesn't fit its wheels"))?;
    let missing = libtorch::unresolved(places, &made);
    if !missing.is_empty() {
        bail!(
            "libtorch {} can't be loaded on this machine: {}. It needs glibc 2.28 and libstdc++ of GCC 8 or newer; \
             or set LIBTORCH to a PyTorch {} that fits this machine",
            pins.version,
            missing.join("; "),
            pins.version
        );
    }
    part.keep_as(&folder)?;
    // Only the large ones: small wheels save a fetch if the folder is ever made again.
    let mut removed = 0;
    for wheel in wheels {
        let size = fs::metadata(&wheel).map_or(0, |data| data.len());
        if size > 100_000_000 && fs::remove_file(&wheel).is_ok() {
            removed += size;
        }
    }
    if removed > 0 {
        note(format!(
            "removed the large wheels ({}) from {}: what is needed of them is unpacked",
            bytes(removed),
            places.downloads().display()
        ));
    }
    link(places, &home, pins)
}

/// The message when a wheel can't be had: that set-up goes on where it stopped, and what else there is.
fn way_out(places: &Places, pins: &Pins, archive: &fetch::Archive, error: anyhow::Error) -> anyhow::Error {
    if error.is::<process::Interrupted>() {
        return error;
    }
    anyhow!(
        "{error:#}\n\
         Files that were fetched are kept: the next `cargo xtask setup` goes on from there. Instead you can\n  \
         - set LIBTORCH to a PyTorch {version} that you have (the folder with `include` and `lib`),\n  \
         - activate a Python that has torch {version},\n  \
         - copy {} into {}.",
        archive.file,
        places.downloads().display(),
        version = pins.version,
    )
}

/// Points `.libtorch` at a folder of the cache, in one step.
fn link(places: &Places, home: &Path, pins: &Pins) -> Result<Libtorch> {
    let link = places.link();
    if link.is_dir() && !link.is_symlink() {
        bail!(
            "{} is a folder that set-up did not make, and no PyTorch {} lies in it. Move it away and run `cargo xtask setup` again",
            link.display(),
            pins.version
        );
    }
    let had_cuda = link.join("lib/libtorch_cuda.so").exists();
    let new = places.root.join(format!(".libtorch.part-{}", std::process::id()));
    let _ = fs::remove_file(&new);
    symlink(home, &new).with_context(|| format!("{} can't be made", new.display()))?;
    fs::rename(&new, &link).with_context(|| format!("{} can't be replaced", link.display()))?;
    let found =
        libtorch::inspect(&link, &pins.version).map_err(|flaw| anyhow!("{} was linked, but {flaw}", link.display()))?;
    if had_cuda && !found.cuda {
        // torch-sys wrote down `-ltorch_cuda` when it was built.
        note("the libtorch before had CUDA: torch-sys is built again next time");
        for profile in ["dev", "release"] {
            let _ = capture(places.cargo().args(["clean", "--package", "torch-sys", "--profile", profile]));
        }
    }
    there(&found, &target_of(places));
    Ok(found)
}

/// OpenBLAS with its headers and pkg-config: installed where that needs no question, else said how.
fn openblas(places: &Places, speak: bool) -> Result<()> {
    const PACKAGES: [&str; 2] = ["libopenblas-dev", "pkg-config"];
    if let Some(version) = openblas_version(places) {
        if speak {
            note(format!("OpenBLAS {version} is there"));
        }
        return Ok(());
    }
    let by_hand = "apt-get install libopenblas-dev pkg-config";
    if !on_path("apt-get") {
        if speak {
            note(
                "OpenBLAS or pkg-config is missing: install the development packages of both with your system's package manager. Nothing needs them yet",
            );
        }
        return Ok(());
    }
    if !rustix::process::geteuid().is_root() {
        if speak {
            note(format!("OpenBLAS or pkg-config is missing: `sudo {by_hand}`. Nothing needs them yet"));
        }
        return Ok(());
    }
    let mut spinner = Spinner::start(format!("installing OpenBLAS: {by_hand}"));
    let mut install = || -> Result<process::Finished> {
        let mut command = places.command("apt-get");
        command
            .env("DEBIAN_FRONTEND", "noninteractive")
            .args(["install", "--yes", "--no-install-recommends"])
            .args(PACKAGES);
        watch_until(Ending::Gentle, &mut command, |_| {
            spinner.say(format!("installing OpenBLAS: {by_hand}"));
        })
    };
    let mut finished = install()?;
    if !finished.status.success() {
        watch_until(Ending::Gentle, places.command("apt-get").arg("update"), |_| {})?;
        finished = install()?;
    }
    drop(spinner);
    if finished.status.success() {
        note("OpenBLAS is installed");
    } else {
        let last = finished.lines.last().map_or("", String::as_str);
        note(format!("OpenBLAS could not be installed ({last}). Try `{by_hand}`. Nothing needs it yet"));
    }
    Ok(())
}

/// OpenBLAS's version by pkg-config.
pub(crate) fn openblas_version(places: &Places) -> Option<String> {
    capture(places.command("pkg-config").args(["--modversion", "openblas"]))
}
