//! A checkout and a cache in a temporary folder, with fake clients as the only programs on PATH: the real command runs
//! its real code against them.

#![allow(dead_code)]

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use sha2::{Digest, Sha256};
use tempfile::TempDir;

/// The fake Python: `-m pip download` hands out files of `wheels/` in the way that the file `mode` says.
const PYTHON: &str = r#"#!/bin/sh
here=@ROOT@
case "$1 $2 $3" in
"-m pip --version") echo "pip 23.2.1 from /x/pip (python 3.11)"; exit 0 ;;
"-m pip download") ;;
"-c "*) exec /bin/cat "$here/python-torch" 2>/dev/null ;;
*) exit 1 ;;
esac
while [ $# -gt 0 ]; do
    [ "$1" = --dest ] && dest=$2
    spec=$1
    shift
done
echo "$spec" >> "$here/fetched"
package=${spec%%==*}
file=$(echo "$here/wheels/$package"-*)
name=${file##*/}
case $(/bin/cat "$here/mode") in
good) /bin/cp "$file" "$dest/" ;;
offline)
    echo "WARNING: Retrying after connection broken by 'NewConnectionError: Temporary failure in name resolution'" >&2
    echo "ERROR: No matching distribution found for $spec" >&2
    exit 1 ;;
truncated) /usr/bin/head -c 20 "$file" > "$dest/$name" ;;
flaky) echo good > "$here/mode"; echo "ERROR: the line broke" >&2; exit 1 ;;
second-breaks)
    case $package in torch) /bin/cp "$file" "$dest/" ;; *) echo "ERROR: Connection reset" >&2; exit 1 ;; esac ;;
slow) echo started > "$TMPDIR/half.whl"; /bin/touch "$here/started"; /bin/sleep 60 ;;
esac
"#;

/// A temporary checkout.
pub(crate) struct Checkout {
    folder: TempDir,
}

impl Checkout {
    /// One whose pins are two small wheels, and whose Python has no torch.
    pub(crate) fn new() -> Self {
        let checkout = Self { folder: tempfile::tempdir().unwrap() };
        for folder in ["root/xtask", "root/crates/datasets/data", "bin", "wheels", "home"] {
            fs::create_dir_all(checkout.at(folder)).unwrap();
        }
        checkout.mode("good");
        checkout.program("python3", &PYTHON.replace("@ROOT@", &checkout.at("").to_string_lossy()));
        checkout.program("c++", "#!/bin/sh\necho 'c++ 12'\n");
        checkout.program("pkg-config", "#!/bin/sh\necho 0.3.21\n");
        checkout.program("ldd", "#!/bin/sh\necho 'libc.so.6 => /lib/libc.so.6 (0x0)'\n");
        let torch = checkout.wheel(
            "torch-2.11.0-cp311-cp311-manylinux_2_28_x86_64.whl",
            &[
                ("torch/include/torch/csrc/api/include/torch/torch.h", "// header"),
                ("torch/lib/libtorch_cpu.so", "cpu"),
                ("torch/lib/libtorch_cuda.so", "cuda"),
                ("torch/lib/libc10.so", "core"),
                ("torch/lib/libtorch.so", "the whole"),
            ],
        );
        let cudart = checkout.wheel(
            "cudart-13.0-py3-none-manylinux1_x86_64.whl",
            &[("nvidia/cu13/lib/libcudart.so.13", "runtime"), ("nvidia/cu13/include/cuda.h", "// header")],
        );
        checkout.write(
            "root/xtask/libtorch.toml",
            &format!(
                r#"
version = "2.11.0"
[[build]]
name = "cpu"
home = "."
unpacked = 1000
wheels = ["torch", "cudart"]
linker_script = true
take = [
    {{ from = "torch/include/", to = "include/" }},
    {{ from = "torch/lib/libtorch_cpu.so", to = "lib/libtorch_cpu.so" }},
    {{ from = "torch/lib/libc10.so", to = "lib/libc10.so" }},
    {{ from = "nvidia/cu13/lib/libcudart.so.13", to = "lib/libcudart.so.13" }},
]
[[build]]
name = "cuda"
home = "torch"
unpacked = 1000
wheels = ["torch", "cudart"]
linker_script = false
take = [
    {{ from = "torch/include/", to = "torch/include/" }},
    {{ from = "torch/lib/", to = "torch/lib/", only = ".so" }},
    {{ from = "nvidia/", to = "nvidia/", only = ".so" }},
]
[[wheel]]
package = "torch"
version = "2.11.0"
{torch}
[[wheel]]
package = "cudart"
version = "13.0"
{cudart}
"#
            ),
        );
        checkout
    }

    /// A path below the temporary folder.
    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a file.
    pub(crate) fn write(&self, name: &str, text: &str) {
        fs::create_dir_all(self.at(name).parent().unwrap()).unwrap();
        fs::write(self.at(name), text).unwrap();
    }

    /// Reads a file.
    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.at(name)).unwrap_or_default()
    }

    /// Puts a program on PATH.
    pub(crate) fn program(&self, name: &str, text: &str) {
        let path = self.at("bin").join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// How the fake pip behaves from now on.
    pub(crate) fn mode(&self, mode: &str) {
        self.write("mode", mode);
    }

    /// What the fake pip was asked for.
    pub(crate) fn fetched(&self) -> Vec<String> {
        self.read("fetched").lines().map(str::to_owned).collect()
    }

    /// Makes a wheel, and returns its lines for a file of pins.
    pub(crate) fn wheel(&self, name: &str, files: &[(&str, &str)]) -> String {
        let path = self.at("wheels").join(name);
        let mut zip = zip::ZipWriter::new(fs::File::create(&path).unwrap());
        for (file, text) in files {
            zip.start_file(*file, zip::write::SimpleFileOptions::default()).unwrap();
            zip.write_all(text.as_bytes()).unwrap();
        }
        zip.finish().unwrap();
        pins(name, &fs::read(path).unwrap())
    }

    /// The command with only the fake programs on PATH and nothing of our own environment.
    pub(crate) fn xtask(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        command
            .args(arguments)
            .env_clear()
            .env("PATH", self.at("bin"))
            .env("HOME", self.at("home"))
            .env("TESSERA_CACHE", self.at("cache"))
            .env("TESSERA_RETRY_WAIT", "0")
            .env("CARGO_MANIFEST_DIR", self.at("root/xtask"))
            // What cargo's own [env] sets.
            .env("LIBTORCH", self.at("root/.libtorch"))
            .current_dir(self.at("root"));
        command
    }

    /// Runs it and returns status and stderr.
    pub(crate) fn run(&self, arguments: &[&str]) -> (i32, String) {
        ended(&self.xtask(arguments).output().unwrap())
    }

    /// Runs it, which must succeed, and returns stderr.
    pub(crate) fn good(&self, arguments: &[&str]) -> String {
        let (code, text) = self.run(arguments);
        assert_eq!(code, 0, "{text}");
        text
    }

    /// Runs it, which must fail, and returns stderr.
    pub(crate) fn bad(&self, arguments: &[&str]) -> String {
        let (code, text) = self.run(arguments);
        assert_eq!(code, 1, "{text}");
        text
    }

    /// No folder or file that was being made is left.
    pub(crate) fn nothing_half_made(&self) {
        for place in ["cache", "cache/downloads", "cache/libtorch", "cache/data", "root"] {
            let Ok(entries) = fs::read_dir(self.at(place)) else {
                continue;
            };
            for entry in entries.flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                assert!(!name.contains("part-"), "{place}/{name} is left");
            }
        }
    }
}

/// `archive`, `bytes` and `sha256` for a file of pins.
pub(crate) fn pins(archive: &str, content: &[u8]) -> String {
    format!("archive = \"{archive}\"\nbytes = {}\nsha256 = \"{}\"\n", content.len(), sha256(content))
}

/// SHA-256 in hexadecimal.
pub(crate) fn sha256(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().concat()
}

/// Status and stderr of a command that ended.
pub(crate) fn ended(output: &Output) -> (i32, String) {
    (output.status.code().unwrap_or(-1), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Every part is in the text.
#[track_caller]
pub(crate) fn says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
}

/// Whether the path exists, links counted.
pub(crate) fn there(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}
