//! A libtorch on the disk: is it whole, which version is it, does the loader find what it needs; and the pinned wheels
//! that one is made from.

use std::env::consts::{DLL_PREFIX, DLL_SUFFIX};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::bench::load_path;
use crate::fetch::{Archive, Source};
use crate::files;
use crate::places::Places;
use crate::process::{capture, on_path};
use crate::unpack::Take;

/// What is wrong with a folder that should hold libtorch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// There is nothing.
    Absent,
    /// A file that every libtorch has isn't there.
    Incomplete(PathBuf),
    /// A library whose size isn't the one that was written down when it was unpacked.
    Size(PathBuf, u64, u64),
    /// No file says which version it is.
    NoVersion,
    /// Another version.
    Version(String),
    /// The CUDA library was asked for.
    NoCuda,
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("there is nothing"),
            Self::Incomplete(file) => write!(f, "{} is missing", file.display()),
            Self::Size(file, found, expected) => {
                write!(f, "{} is damaged: {found} bytes instead of {expected}", file.display())
            }
            Self::NoVersion => {
                f.write_str("no file says its version (neither `build-version` nor, beside `lib`, `version.py`)")
            }
            Self::Version(found) => write!(f, "it is PyTorch {found}"),
            Self::NoCuda => f.write_str("it was built without CUDA"),
        }
    }
}

/// A libtorch that can be linked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Libtorch {
    /// The folder with `include` and `lib`, for LIBTORCH.
    pub home: PathBuf,
    /// Its version, without what follows a `+`.
    pub version: String,
    /// Whether it can use a GPU.
    pub cuda: bool,
}

impl Libtorch {
    /// The folder for the loader.
    pub(crate) fn lib(&self) -> PathBuf {
        self.home.join("lib")
    }
}

/// Looks at a folder by its files alone; nothing is run, so that a second set-up takes no time.
pub(crate) fn inspect(home: &Path, wanted: &str) -> Result<Libtorch, Flaw> {
    if !home.join("lib").exists() {
        return Err(Flaw::Absent);
    }
    let cpu = format!("{DLL_PREFIX}torch_cpu{DLL_SUFFIX}");
    let core = format!("{DLL_PREFIX}c10{DLL_SUFFIX}");
    let whole = format!("{DLL_PREFIX}torch{DLL_SUFFIX}");
    let needed = [
        Path::new("lib").join(cpu),
        Path::new("lib").join(core),
        Path::new("lib").join(whole),
        PathBuf::from("include/torch/csrc/api/include/torch/torch.h"),
    ];
    // The version comes first: an old libtorch with other files is an old one, not a broken one.
    let version = version(home).ok_or(Flaw::NoVersion)?;
    if version != wanted {
        return Err(Flaw::Version(version));
    }
    if let Some(missing) = needed.iter().find(|file| !home.join(file).exists()) {
        return Err(Flaw::Incomplete(home.join(missing)));
    }
    check_sizes(home)?;
    let cuda = home.join("lib").join(format!("{DLL_PREFIX}torch_cuda{DLL_SUFFIX}")).exists();
    Ok(Libtorch { home: home.to_path_buf(), version, cuda })
}

/// The file in a libtorch of ours that holds a line `SIZE  PATH` for each library, as it was unpacked.
const SIZES: &str = "library-sizes";

/// Writes the sizes down. NVIDIA's libraries lie beside a libtorch with CUDA, and are its own as well.
pub(crate) fn record_sizes(home: &Path) -> Result<()> {
    let mut lines = Vec::new();
    for below in ["lib", "../nvidia"] {
        list_libraries(home, Path::new(below), &mut lines)?;
    }
    lines.sort();
    files::write_whole(&home.join(SIZES), lines.concat().as_bytes())
}

fn list_libraries(home: &Path, below: &Path, lines: &mut Vec<String>) -> Result<()> {
    let Ok(entries) = fs::read_dir(home.join(below)) else {
        return Ok(());
    };
    for entry in entries {
        let entry = entry?;
        let path = below.join(entry.file_name());
        let found = entry.metadata()?;
        if found.is_dir() {
            list_libraries(home, &path, lines)?;
        } else {
            lines.push(format!("{}  {}\n", found.len(), path.display()));
        }
    }
    Ok(())
}

/// Compares sizes where they were written down; a libtorch from elsewhere has no such file.
fn check_sizes(home: &Path) -> Result<(), Flaw> {
    let text = fs::read_to_string(home.join(SIZES)).unwrap_or_default();
    for (size, path) in text.lines().filter_map(|line| line.split_once("  ")) {
        let path = home.join(path);
        let expected: u64 = size.parse().unwrap_or(0);
        match fs::metadata(&path) {
            Err(_) => return Err(Flaw::Incomplete(path)),
            Ok(found) if found.len() != expected => return Err(Flaw::Size(path, found.len(), expected)),
            Ok(_) => {}
        }
    }
    Ok(())
}

/// The version of a libtorch folder. A Python package's own `version.py` beside `lib` counts before `build-version`,
/// because the package behind a link may have been changed since.
fn version(home: &Path) -> Option<String> {
    let python = fs::read_to_string(home.join("lib/../version.py")).ok();
    let python = python.as_deref().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("__version__"))?;
        line.split(['\'', '"']).nth(1).map(str::to_owned)
    });
    let version = python.or_else(|| fs::read_to_string(home.join("build-version")).ok())?;
    let version = version.trim().split('+').next().unwrap_or_default();
    (!version.is_empty()).then(|| version.to_owned())
}

/// What the loader finds wrong with libtorch_cpu: libraries that aren't found, or a file that it can't read at all;
/// empty also where there is no `ldd` to ask.
pub(crate) fn unresolved(places: &Places, libtorch: &Libtorch) -> Vec<String> {
    let library = libtorch.lib().join("libtorch_cpu.so");
    if !on_path("ldd") || !library.exists() {
        return Vec::new();
    }
    let mut ldd = places.command("ldd");
    load_path(&mut ldd, places, libtorch);
    ldd.env("LC_ALL", "C").arg(&library);
    let Ok(output) = ldd.output() else {
        return Vec::new();
    };
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    let missing: Vec<String> =
        text.lines().filter(|line| line.contains("not found")).map(|line| line.trim().to_owned()).collect();
    if missing.is_empty() && !output.status.success() {
        let said = text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("nothing");
        return vec![format!("`ldd` can't read {}: it says {said}", library.display())];
    }
    missing
}

/// A PyTorch in the user's Python.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PythonTorch {
    /// Its package folder.
    pub folder: PathBuf,
    /// Its version.
    pub version: String,
}

/// Asks the same Python that torch-sys asks, without importing torch (which takes seconds).
pub(crate) fn python_torch(places: &Places) -> Option<PythonTorch> {
    const ASK: &str = "import importlib.util as u, importlib.metadata as m, os; s = u.find_spec('torch'); \
                       print(os.path.dirname(s.origin)); print(m.version('torch'))";
    let python = if std::env::var_os("VIRTUAL_ENV").is_some() { "python" } else { "python3" };
    let answer = capture(places.command(python).args(["-c", ASK]))?;
    let (folder, version) = answer.split_once('\n')?;
    Some(PythonTorch { folder: PathBuf::from(folder.trim()), version: version.trim().split('+').next()?.to_owned() })
}

/// `xtask/libtorch.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Pins {
    /// The version that tch binds.
    pub version: String,
    build: Vec<Build>,
    wheel: Vec<Wheel>,
}

/// One way to make a libtorch from wheels.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Build {
    /// `cpu` or `cuda`.
    pub name: String,
    /// Where in the unpacked folder `include` and `lib` lie.
    pub home: String,
    /// About how many bytes it has unpacked.
    pub unpacked: u64,
    /// The packages that it is made from.
    pub wheels: Vec<String>,
    /// Whether `libtorch.so` is to be written, because the wheel's own names libraries that weren't taken.
    pub linker_script: bool,
    /// What to take out of them.
    pub take: Vec<Take>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wheel {
    package: String,
    version: String,
    archive: String,
    bytes: u64,
    sha256: String,
}

impl Pins {
    /// Reads the file of the checkout.
    pub(crate) fn read(places: &Places) -> Result<Self> {
        let path = places.root.join("xtask/libtorch.toml");
        let text = fs::read_to_string(&path).with_context(|| format!("{} can't be read", path.display()))?;
        toml::from_str(&text).with_context(|| format!("{} is not right", path.display()))
    }

    /// The build of that name with its archives.
    pub(crate) fn build(&self, name: &str) -> Result<(&Build, Vec<Archive>)> {
        let Some(build) = self.build.iter().find(|build| build.name == name) else {
            bail!("xtask/libtorch.toml has no build named {name}");
        };
        let archives = build.wheels.iter().map(|package| {
            let Some(wheel) = self.wheel.iter().find(|wheel| wheel.package == *package) else {
                bail!("xtask/libtorch.toml pins no wheel of {package}, which its build {name} needs");
            };
            Ok(Archive {
                source: Source::Pip,
                package: wheel.package.clone(),
                version: wheel.version.clone(),
                file: wheel.archive.clone(),
                bytes: wheel.bytes,
                sha256: wheel.sha256.clone(),
            })
        });
        Ok((build, archives.collect::<Result<_>>()?))
    }
}

/// What makes an unpacked folder a libtorch for torch-sys: its version file and, for the parts without CUDA, a
/// `libtorch.so` that names the one library there is.
pub(crate) fn finish(home: &Path, version: &str, linker_script: bool) -> Result<()> {
    if linker_script {
        files::write_whole(&home.join("lib/libtorch.so"), b"INPUT(libtorch_cpu.so)\n")?;
    }
    files::write_whole(&home.join("build-version"), format!("{version}\n").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }

    fn whole(home: &Path) {
        for file in ["lib/libtorch_cpu.so", "lib/libc10.so", "include/torch/csrc/api/include/torch/torch.h"] {
            touch(&home.join(file));
        }
        finish(home, "2.11.0", true).unwrap();
    }

    #[test]
    fn a_finished_folder_is_a_libtorch_with_a_linker_script() {
        let folder = tempfile::tempdir().unwrap();
        whole(folder.path());
        let found = inspect(folder.path(), "2.11.0").unwrap();
        assert_eq!((found.version.as_str(), found.cuda), ("2.11.0", false));
        assert_eq!(fs::read_to_string(folder.path().join("lib/libtorch.so")).unwrap(), "INPUT(libtorch_cpu.so)\n");
        touch(&folder.path().join("lib/libtorch_cuda.so"));
        assert!(inspect(folder.path(), "2.11.0").unwrap().cuda);
    }

    #[test]
    fn each_flaw_has_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path();
        assert_eq!(inspect(home, "2.11.0"), Err(Flaw::Absent));
        touch(&home.join("lib/libtorch_cpu.so"));
        assert_eq!(inspect(home, "2.11.0"), Err(Flaw::NoVersion));
        fs::write(home.join("build-version"), "2.11.0+cu130\n").unwrap();
        assert_eq!(inspect(home, "2.11.0"), Err(Flaw::Incomplete(home.join("lib/libc10.so"))));
        fs::write(home.join("build-version"), "2.4.0\n").unwrap();
        assert_eq!(inspect(home, "2.11.0"), Err(Flaw::Version("2.4.0".into())));
    }

    #[test]
    fn a_library_that_lost_bytes_after_it_was_unpacked_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().join("torch");
        whole(&home);
        fs::write(home.join("lib/libtorch_cpu.so"), "0123456789").unwrap();
        let runtime = folder.path().join("nvidia/cu13/lib/libcudart.so.13");
        touch(&runtime);
        record_sizes(&home).unwrap();
        inspect(&home, "2.11.0").unwrap();
        fs::write(home.join("lib/libtorch_cpu.so"), "012").unwrap();
        assert_eq!(inspect(&home, "2.11.0"), Err(Flaw::Size(home.join("lib/libtorch_cpu.so"), 3, 10)));
        fs::write(home.join("lib/libtorch_cpu.so"), "0123456789").unwrap();
        fs::remove_file(runtime).unwrap();
        assert!(matches!(inspect(&home, "2.11.0"), Err(Flaw::Incomplete(_))));
    }

    #[test]
    fn a_python_package_that_was_changed_behind_the_link_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let package = folder.path().join("site-packages/torch");
        whole(&package);
        fs::remove_file(package.join("build-version")).unwrap();
        fs::write(package.join("version.py"), "__version__ = '2.12.0+cu130'\n").unwrap();
        let link = folder.path().join("link");
        fs::create_dir(&link).unwrap();
        fs::write(link.join("build-version"), "2.11.0\n").unwrap();
        std::os::unix::fs::symlink(package.join("lib"), link.join("lib")).unwrap();
        assert_eq!(inspect(&link, "2.11.0"), Err(Flaw::Version("2.12.0".into())));
    }

    #[test]
    fn the_pins_of_the_checkout_cover_both_builds() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let places = Places { root: root.to_path_buf(), cache: PathBuf::from("/nowhere") };
        let pins = Pins::read(&places).unwrap();
        assert_eq!(pins.version, "2.11.0");
        for (name, wheels) in [("cpu", 3), ("cuda", 16)] {
            let (_, archives) = pins.build(name).unwrap();
            assert_eq!(archives.len(), wheels, "{name}");
            assert!(archives.iter().all(|wheel| wheel.sha256.len() == 64));
        }
        assert!(pins.build("rocm").unwrap_err().to_string().contains("rocm"));
    }
}
