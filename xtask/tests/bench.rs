//! `bench`, `report`, `dist`, `test` and `lint` with a fake cargo and a fake benchmark.

#![cfg(target_os = "linux")]

mod support;

use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use support::{Checkout, ended, says};

const CARGO: &str = r#"#!/bin/sh
here=@ROOT@
echo "$* LIBTORCH=${LIBTORCH:-unset}" >> "$here/cargo-log"
artifact() {
    echo "{\"reason\":\"compiler-artifact\",\"package_id\":\"path+file:///w/benches#0.1.0\",\"target\":{\"name\":\"$1\",\"kind\":[\"bin\"]},\"executable\":\"$here/bin/$1\"}"
}
case "$1 $2" in
"metadata "*) /bin/cat "$here/metadata.json" ;;
"tree "*) case "$*" in *--no-default-features* | *datasets*) echo "serde v1" ;; *) echo "torch-sys v0.24.0" ;; esac ;;
"build "*) echo "   Compiling torch-sys v0.24.0" >&2; artifact tessera-bench; artifact probe ;;
"nextest --version") [ -e "$here/nextest" ] && echo "cargo-nextest 0.9" ;;
"deny --version") exit 1 ;;
"clippy "*) [ ! -e "$here/clippy-fails" ] ;;
esac
"#;

const BENCH: &str = r#"#!/bin/sh
here=@ROOT@
run=$here/root/target/bench/r1
echo "$* LD=$LD_LIBRARY_PATH" >> "$here/bench-log"
case "$1" in
list) echo '[{"name": "rotated", "crate": "sam-opt", "data": ["letters"]}, {"name": "plain", "crate": "qat", "data": []}]' ;;
run)
    case "$*" in *roated*) echo "no experiment roated; did you mean rotated?" >&2; exit 2 ;; esac
    /bin/mkdir -p "$run"
    echo '{"seed": 0}' > "$run/results.jsonl"
    if [ -e "$here/slow" ]; then
        trap 'echo "{\"seed\": 1}" >> "$run/results.jsonl"; exit 130' INT
        /bin/touch "$here/started"
        left=400
        while [ -e "$here/slow" ] && [ $left -gt 0 ]; do /bin/sleep 0.05; left=$((left - 1)); done
    fi ;;
report) echo "<html>" > "$2/report.html"; echo 'a report' > "$2/report.md" ;;
esac
"#;

/// A checkout with the programs, and a libtorch that is there.
fn checkout() -> Checkout {
    let checkout = Checkout::new();
    checkout.good(&["setup"]);
    let root = checkout.at("");
    let root = root.to_string_lossy();
    let root = root.trim_end_matches('/');
    checkout.program("cargo", &CARGO.replace("@ROOT@", root));
    checkout.program("tessera-bench", &BENCH.replace("@ROOT@", root));
    checkout.program("probe", "#!/bin/sh\necho '{}'\n");
    let package = |name: &str, kind: &str| {
        format!(r#"{{"name": "{name}", "dependencies": [], "targets": [{{"kind": ["{kind}"]}}]}}"#)
    };
    let packages = [package("tensor", "lib"), package("datasets", "lib"), package("xtask", "bin")];
    checkout.write(
        "metadata.json",
        &format!(
            r#"{{"packages": [{}], "metadata": {{"tessera": {{"without-libtorch": ["tensor --no-default-features", "datasets"]}}}}}}"#,
            packages.join(", ")
        ),
    );
    checkout.write(
        "root/crates/datasets/data.toml",
        "[[set]]\nname = \"letters\"\ntitle = \"Letters\"\nsource = \"npm\"\nlicence = \"MIT\"\npackage = \"letters\"\nversion = \"1.0.0\"\narchive = \"letters-1.0.0.tgz\"\nbytes = 1\nsha256 = \"0\"\n[[set.file]]\nfrom = \"package/l\"\nto = \"l\"\nbytes = 1\nsha256 = \"0\"\n",
    );
    checkout
}

#[test]
fn a_benchmark_goes_on_without_a_set_that_cannot_be_fetched_and_ends_with_its_report() {
    let checkout = checkout();
    let output = checkout.xtask(&["bench", "sam-opt", "--seeds", "2"]).output().unwrap();
    let (code, text) = ended(&output);
    assert_eq!(code, 0, "{text}");
    says(&text, &["letters: skipped: npm is not here"]);
    let shown = String::from_utf8(output.stdout).unwrap();
    says(&shown, &["report: ", "target/bench/r1/report.html"]);
    let log = checkout.read("bench-log");
    says(&log, &["run sam-opt --seeds 2 LD=", "/root/.libtorch/lib", "report "]);
    says(&checkout.read("cargo-log"), &["build --release --package=benches --bins"]);
}

#[test]
fn an_unknown_experiment_fetches_nothing_and_passes_the_suggestion_on() {
    let checkout = checkout();
    let (code, text) = checkout.run(&["bench", "roated"]);
    assert_eq!(code, 2);
    says(&text, &["did you mean rotated?"]);
    assert!(!text.contains("letters"), "{text}");
}

#[test]
fn ctrl_c_lets_the_benchmark_write_its_results_and_says_how_to_go_on() {
    let checkout = checkout();
    checkout.write("slow", "");
    let child = checkout.xtask(&["bench", "plain"]).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    while !checkout.at("started").exists() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let (code, text) = ended(&child.wait_with_output().unwrap());
    assert_eq!(code, 130, "{text}");
    says(&text, &["cargo xtask bench --resume r1"]);
    assert_eq!(checkout.read("root/target/bench/r1/results.jsonl").lines().count(), 2);
    fs::remove_file(checkout.at("slow")).unwrap();
    assert_eq!(checkout.run(&["bench", "--resume", "r1"]).0, 0);
    says(&checkout.read("bench-log"), &["run --resume /", "/root/target/bench/r1 LD="]);
}

#[test]
fn the_peers_environment_is_made_once_for_a_list_and_a_half_made_one_is_made_again() {
    let checkout = checkout();
    let disk = rustix::fs::statvfs(checkout.at("").as_path()).unwrap();
    if disk.f_bavail * disk.f_frsize < 9_000_000_000 {
        println!("skipped: the environment asks for 9 GB, and this disk has less");
        return;
    }
    checkout.write("root/benches/peers/requirements.txt", "torch==2.11.0\n");
    let root = checkout.at("");
    let root = root.to_string_lossy();
    let python = r#"#!/bin/sh
[ "$2" = venv ] || exit 1
/bin/mkdir -p "$3/bin"
printf '#!/bin/sh\necho "$*" >> @ROOT@installed\n[ ! -e @ROOT@pip-fails ]\n' > "$3/bin/python"
/bin/chmod +x "$3/bin/python"
"#;
    checkout.program("python3", &python.replace("@ROOT@", &root));
    let installs = || checkout.read("installed").lines().count();

    checkout.write("pip-fails", "");
    says(&checkout.bad(&["bench", "plain", "--peers"]), &["peers could not be installed"]);
    assert_eq!(fs::read_dir(checkout.at("cache/peers")).unwrap().count(), 0);

    fs::remove_file(checkout.at("pip-fails")).unwrap();
    checkout.good(&["bench", "plain", "--peers"]);
    checkout.good(&["bench", "plain", "--peers"]);
    assert_eq!(installs(), 2);
    says(&checkout.read("bench-log"), &["run plain --peer-python ", "/bin/python LD="]);

    // Another list is another environment; one without its stamp was interrupted.
    checkout.write("root/benches/peers/requirements.txt", "torch==2.11.0\nnumpy\n");
    checkout.good(&["bench", "plain", "--peers"]);
    assert_eq!(installs(), 3);
    for environment in fs::read_dir(checkout.at("cache/peers")).unwrap().flatten() {
        fs::remove_file(environment.path().join("complete")).unwrap();
    }
    checkout.good(&["bench", "plain", "--peers"]);
    assert_eq!(installs(), 4);
}

#[test]
fn a_snapshot_is_asked_of_the_benchmark_with_the_runs() {
    let checkout = checkout();
    says(&checkout.bad(&["report"]), &["there is no run", "cargo xtask bench"]);
    checkout.good(&["bench", "plain"]);
    checkout.good(&["report", "--snapshot"]);
    let log = checkout.read("bench-log");
    let asked: Vec<&str> = log.lines().filter(|line| line.starts_with("report ")).collect();
    assert!(!asked[0].contains("--snapshot") && asked[1].contains("--snapshot"), "{log}");
}

#[test]
fn dist_makes_a_folder_with_programs_data_script_and_manifest() {
    let checkout = checkout();
    let library = checkout.at("libopenblas.so.0");
    fs::write(&library, "blas").unwrap();
    checkout.program("ldd", &format!("#!/bin/sh\necho 'libopenblas.so.0 => {} (0x0)'\n", library.display()));
    checkout.write("cache/data/letters/l", "x");
    let output = checkout.xtask(&["dist", "--only", "sam-opt"]).output().unwrap();
    assert_eq!(ended(&output).0, 0, "{}", ended(&output).1);
    for file in ["run", "bin/tessera-bench", "bin/probe", "lib/libopenblas.so.0", "data/letters/l"] {
        assert!(checkout.at("root/dist").join(file).exists(), "{file}");
        says(&checkout.read("root/dist/MANIFEST"), &[&format!("  {file}\n")]);
    }
    says(&checkout.read("root/dist/run"), &["wanted=2.11.0"]);
    says(&checkout.bad(&["dist", "--only", "sam-op"]), &["named sam-op", "sam-opt, qat"]);
    // A second time it replaces its own folder.
    checkout.good(&["dist", "--only", "qat"]);
    assert!(!checkout.at("root/dist/data").exists());
    checkout.nothing_half_made();
}

#[test]
fn tests_hide_libtorch_from_the_crates_that_must_work_without_it() {
    let checkout = checkout();
    checkout.write("nextest", "");
    let text = checkout.good(&["test"]);
    says(&text, &["tensor without libtorch", "datasets without libtorch", "tests (nextest)", "passed"]);
    let log = checkout.read("cargo-log");
    let line = |start: &str| log.lines().find(|line| line.starts_with(start)).unwrap_or_default().to_owned();
    for hidden in [line("test --package tensor --no-default-features"), line("test --package datasets")] {
        says(&hidden, &["runner = ['env', '--unset=LD_LIBRARY_PATH'", "no-libtorch-here"]);
    }
    // Elsewhere cargo sees what a plain cargo sees, so nothing is built twice. `datasets` has run already.
    says(&line("nextest run"), &["--workspace", "--exclude=datasets", "LIBTORCH=unset"]);
    says(&line("test --doc"), &["--package=tensor LIBTORCH=unset"]);
}

#[test]
fn a_crate_without_libtorch_is_tested_without_set_up() {
    let checkout = checkout();
    fs::remove_file(checkout.at("root/.libtorch")).unwrap();
    checkout.mode("offline");
    fs::remove_dir_all(checkout.at("cache/libtorch")).unwrap();
    checkout.good(&["test", "datasets"]);
    says(&checkout.bad(&["test", "data"]), &["no crate named data", "datasets"]);
}

#[test]
fn lint_runs_everything_before_it_reports_what_failed() {
    let checkout = checkout();
    checkout.good(&["lint"]);
    checkout.write("clippy-fails", "");
    let text = checkout.bad(&["lint"]);
    says(&text, &["$ cargo doc", "cargo-deny is not installed", "lint found faults in: clippy"]);
    says(&text, &["clippy of tensor without libtorch"]);
}
