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
echo "$* LIBTORCH=${LIBTORCH:-unset} DATA=${TESSERA_REQUIRE_DATA:-none} CACHE=$TESSERA_CACHE" >> "$here/cargo-log"
artifact() {
    echo "{\"reason\":\"compiler-artifact\",\"package_id\":\"path+file:///w/benches#0.1.0\",\"target\":{\"name\":\"$1\",\"kind\":[\"bin\"]},\"executable\":\"$here/bin/$1\"}"
}
case "$1 $2" in
"metadata "*) /bin/cat "$here/metadata.json" ;;
"tree "*) [ ! -e "$here/tree-fails" ] || { echo "error: the lock file is broken" >&2; exit 101; }
    case "$*" in *--no-default-features* | *datasets*) echo "serde v1" ;; *) echo "torch-sys v0.24.0" ;; esac ;;
"build "*) echo "   Compiling torch-sys v0.24.0" >&2; artifact tessera-bench; artifact probe ;;
"nextest --version") [ -e "$here/nextest" ] && echo "cargo-nextest 0.9" ;;
"deny --version") exit 1 ;;
"clippy "*)
    /bin/touch "$here/clippy-runs"
    while [ -e "$here/clippy-hangs" ]; do /bin/sleep 0.05; done
    [ ! -e "$here/clippy-fails" ] ;;
esac
"#;

const BENCH: &str = r#"#!/bin/sh
here=@ROOT@
run=$here/root/target/bench/r1
echo "$* LD=$LD_LIBRARY_PATH" >> "$here/bench-log"
case "$1 $2" in
"list --json")
    /bin/touch "$here/listing"
    while [ -e "$here/list-hangs" ]; do /bin/sleep 0.05; done
    echo '[{"name": "rotated", "crate": "sam-opt", "data": ["letters"], "kind": "quality"},'
    echo '{"name": "plain", "crate": "qat", "data": []}, {"name": "peers", "crate": "qat", "kind": "peers"}]' ;;
"list "*) echo "rotated and plain" ;;
"run "*)
    case "$*" in *roated*) echo "no experiment roated; did you mean rotated?" >&2; exit 2 ;; esac
    /bin/mkdir -p "$run"
    echo '{"seed": 0}' > "$run/results.jsonl"
    case "$*" in *--peer-python*) echo '{"names": ["plain"], "peers": true}' > "$run/meta.json" ;; esac
    [ -z "$TESSERA_RUN_FILE" ] || echo target/bench/r1 > "$TESSERA_RUN_FILE"
    # Another run that is written meanwhile is not ours.
    if [ -e "$here/other" ]; then /bin/mkdir -p "$run-other"; echo '{}' > "$run-other/results.jsonl"; fi
    if [ -e "$here/some-fail" ]; then echo "1 run failed"; exit 1; fi
    if [ -e "$here/killed" ]; then kill -KILL $$; fi
    if [ -e "$here/slow" ]; then
        trap 'echo "{\"seed\": 1}" >> "$run/results.jsonl"; exit 130' INT
        /bin/touch "$here/started"
        left=400
        while [ -e "$here/slow" ] && [ $left -gt 0 ]; do /bin/sleep 0.05; left=$((left - 1)); done
    fi ;;
"report "*) echo "<html>" > "$2/report.html"; echo 'a report' > "$2/report.md" ;;
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
    for file in ["LICENSE-MIT", "LICENSE-APACHE", "crates/datasets/data/LICENSE-built-in.md"] {
        checkout.write(&format!("root/{file}"), "a licence");
    }
    let package = |name: &str, kind: &str| {
        let on = if name == "tensor" { r#"{"name": "datasets", "kind": "dev", "path": "/w"}"# } else { "" };
        format!(r#"{{"name": "{name}", "dependencies": [{on}], "targets": [{{"kind": ["{kind}"]}}]}}"#)
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
    says(&checkout.read("cargo-log"), &["build --color=never --release --package=benches --bins"]);
}

#[test]
fn an_unknown_experiment_fetches_nothing_and_passes_the_suggestion_on() {
    let checkout = checkout();
    let (code, text) = checkout.run(&["bench", "roated"]);
    assert_eq!(code, 2);
    says(&text, &["did you mean rotated?"]);
    assert!(!text.contains("letters"), "{text}");
}

/// Starts a command, waits until the file is there, and sends the signal so many times.
fn signalled(checkout: &Checkout, arguments: &[&str], file: &str, signal: Signal, times: u32) -> (i32, String) {
    let child = checkout.xtask(arguments).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    while !checkout.at(file).exists() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    for _ in 0..times {
        kill_process(Pid::from_child(&child), signal).unwrap();
        std::thread::sleep(Duration::from_millis(200));
    }
    ended(&child.wait_with_output().unwrap())
}

#[test]
fn ctrl_c_lets_the_benchmark_write_its_results_and_says_how_to_go_on() {
    let checkout = checkout();
    checkout.write("slow", "");
    let (code, text) = signalled(&checkout, &["bench", "plain"], "started", Signal::INT, 1);
    assert_eq!(code, 130, "{text}");
    says(&text, &["cargo xtask bench --resume r1"]);
    assert_eq!(checkout.read("root/target/bench/r1/results.jsonl").lines().count(), 2);
    fs::remove_file(checkout.at("slow")).unwrap();
    assert_eq!(checkout.run(&["bench", "--resume", "r1"]).0, 0);
    says(&checkout.read("bench-log"), &["run --resume /", "/root/target/bench/r1 LD="]);
}

#[test]
fn a_fourth_ctrl_c_ends_even_a_benchmark_that_ignores_the_others() {
    let checkout = checkout();
    let stubborn = BENCH.replace("@ROOT@", checkout.at("").to_string_lossy().trim_end_matches('/'));
    let stubborn = stubborn.replace("exit 130' INT", "' INT TERM").replace("left=400", "left=4000");
    checkout.program("tessera-bench", &stubborn);
    checkout.write("slow", "");
    let (code, text) = signalled(&checkout, &["bench", "plain"], "started", Signal::INT, 4);
    assert_eq!(code, 130, "{text}");
    says(&text, &["--resume r1"]);
}

#[test]
fn ctrl_c_is_heard_while_the_experiments_are_listed() {
    let checkout = checkout();
    checkout.write("list-hangs", "");
    let (code, text) = signalled(&checkout, &["bench", "plain"], "listing", Signal::INT, 1);
    assert_eq!(code, 130, "{text}");
    assert!(!checkout.read("bench-log").contains("run "), "{text}");
}

#[test]
fn lint_passes_a_termination_on_to_its_cargo_and_ends() {
    let checkout = checkout();
    checkout.write("clippy-hangs", "");
    let (code, text) = signalled(&checkout, &["lint"], "clippy-runs", Signal::TERM, 1);
    assert_eq!(code, 130, "{text}");
    assert!(!text.contains("cargo doc"), "{text}");
}

#[test]
fn where_some_runs_failed_the_report_is_made_and_the_status_says_so() {
    let checkout = checkout();
    checkout.write("some-fail", "");
    let output = checkout.xtask(&["bench", "plain"]).output().unwrap();
    assert_eq!(ended(&output).0, 1);
    says(&String::from_utf8(output.stdout).unwrap(), &["1 run failed", "report: ", "r1/report.html"]);
    assert!(checkout.at("root/target/bench/r1/report.html").exists());
}

#[test]
fn a_benchmark_that_was_killed_was_not_interrupted() {
    let checkout = checkout();
    checkout.write("killed", "");
    let (code, text) = checkout.run(&["bench", "plain"]);
    assert_eq!(code, 128 + 9, "{text}");
    says(&text, &["error: ", "SIGKILL", "memory", "--resume r1"]);
}

#[test]
fn the_report_is_of_the_run_that_the_benchmark_names() {
    let checkout = checkout();
    checkout.write("other", "");
    checkout.good(&["bench", "plain"]);
    let reported = |run: &str| checkout.at("root/target/bench").join(run).join("report.html").exists();
    assert!(reported("r1") && !reported("r1-other"));
    let left = fs::read_dir(checkout.at("root/target")).unwrap().flatten().map(|entry| entry.file_name());
    assert_eq!(left.collect::<Vec<_>>(), ["bench"]);
}

#[test]
fn the_experiments_are_listed_on_demand() {
    let checkout = checkout();
    let output = checkout.xtask(&["bench", "--list"]).output().unwrap();
    assert_eq!(ended(&output).0, 0);
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "rotated and plain\n");
}

/// A Python whose environments log what is installed; `None` on a disk with less than they ask for.
fn with_peers() -> Option<Checkout> {
    let checkout = checkout();
    let disk = rustix::fs::statvfs(checkout.at("").as_path()).unwrap();
    if disk.f_bavail * disk.f_frsize < 9_000_000_000 {
        println!("skipped: the environment asks for 9 GB, and this disk has less");
        return None;
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
    Some(checkout)
}

#[test]
fn the_peers_environment_is_made_once_for_a_list_and_a_half_made_one_is_made_again() {
    let Some(checkout) = with_peers() else { return };
    let installs = || checkout.read("installed").lines().count();
    checkout.good(&["bench", "plain", "--peers"]);
    checkout.good(&["bench", "plain", "--peers"]);
    assert_eq!(installs(), 1);
    says(&checkout.read("bench-log"), &["run plain --peer-python ", "/bin/python LD="]);
    // The peers in Rust are compiled in.
    says(&checkout.read("cargo-log"), &["--package=benches --bins --features=benches/candle"]);

    // Another list is another environment; one without its stamp was interrupted.
    checkout.write("root/benches/peers/requirements.txt", "torch==2.11.0\nnumpy\n");
    checkout.good(&["bench", "plain", "--peers"]);
    assert_eq!(installs(), 2);
    for environment in fs::read_dir(checkout.at("cache/peers")).unwrap().flatten() {
        fs::remove_file(environment.path().join("complete")).unwrap();
    }
    checkout.good(&["bench", "plain", "--peers"]);
    assert_eq!(installs(), 3);
}

#[test]
fn without_its_environment_the_benchmark_runs_without_peers_unless_they_were_named() {
    let Some(checkout) = with_peers() else { return };
    checkout.write("pip-fails", "");
    says(&checkout.good(&["bench", "plain", "--peers"]), &["the peers are left out", "could not be installed"]);
    assert_eq!(fs::read_dir(checkout.at("cache/peers")).unwrap().count(), 0);
    assert!(!checkout.read("bench-log").contains("--peer-python"));
    says(&checkout.bad(&["bench", "peers"]), &["error: the peers could not be installed"]);
}

#[test]
fn a_peers_experiment_by_name_and_a_resumed_run_with_peers_bring_the_environment() {
    let Some(checkout) = with_peers() else { return };
    checkout.write("slow", "");
    let (code, text) = signalled(&checkout, &["bench", "peers"], "started", Signal::INT, 1);
    assert_eq!(code, 130, "{text}");
    says(&text, &["cargo xtask bench --resume r1 --peers"]);
    fs::remove_file(checkout.at("slow")).unwrap();
    // The run itself knows that it had peers.
    checkout.good(&["bench", "--resume"]);
    let log = checkout.read("bench-log");
    let runs: Vec<&str> = log.lines().filter(|line| line.starts_with("run ")).collect();
    says(runs[0], &["run peers --peer-python /"]);
    says(runs[1], &["run --resume /", "target/bench/r1 --peer-python /"]);
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
    let licences =
        ["LICENSES/LICENSE-MIT", "LICENSES/LICENSE-APACHE", "LICENSES/LICENSE-built-in.md", "LICENSES/NOTICE"];
    let others = ["run", "bin/tessera-bench", "bin/probe", "lib/libopenblas.so.0", "data/letters/l"];
    for file in licences.iter().chain(&others) {
        assert!(checkout.at("root/dist").join(file).exists(), "{file}");
        says(&checkout.read("root/dist/MANIFEST"), &[&format!("  {file}\n")]);
    }
    says(&checkout.read("root/dist/run"), &["wanted=2.11.0"]);
    says(&checkout.read("root/dist/LICENSES/NOTICE"), &["Letters (letters)", "Licence: MIT", "npm letters 1.0.0"]);
    says(&checkout.bad(&["dist", "--only", "sam-op"]), &["named sam-op", "sam-opt, qat"]);
    // A second time it replaces its own folder.
    checkout.good(&["dist", "--only", "qat"]);
    assert!(!checkout.at("root/dist/data").exists());
    assert!(!checkout.read("root/dist/LICENSES/NOTICE").contains("Letters"));
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
fn tests_are_told_which_data_must_be_there_and_people_which_tests_were_skipped() {
    let checkout = checkout();
    let tests = || {
        let log = checkout.read("cargo-log");
        log.lines().filter(|line| line.starts_with("test ")).map(str::to_owned).collect::<Vec<_>>()
    };
    let text = checkout.good(&["test"]);
    says(&text, &["letters: skipped: npm is not here", "skipped: the tests that need letters"]);
    assert!(tests().iter().all(|line| line.contains("DATA=none")), "{:?}", tests());

    fs::remove_file(checkout.at("cargo-log")).unwrap();
    checkout.write("cache/data/letters/l", "x");
    let text = checkout.good(&["test"]);
    assert!(!text.contains("skipped"), "{text}");
    assert!(tests().len() >= 3 && tests().iter().all(|line| line.contains("DATA=letters")), "{:?}", tests());
}

#[test]
fn data_is_fetched_only_for_crates_that_depend_on_it() {
    let checkout = checkout();
    assert!(!checkout.good(&["test", "xtask"]).contains("letters"));
    says(&checkout.good(&["test", "tensor"]), &["letters: skipped"]);
}

#[test]
fn where_cargo_cannot_tell_its_own_words_are_shown() {
    let checkout = checkout();
    checkout.write("tree-fails", "");
    says(&checkout.bad(&["test", "datasets"]), &["`cargo tree ", "the lock file is broken"]);
}

#[test]
fn a_relative_cache_begins_at_the_root_for_us_and_our_children() {
    let checkout = checkout();
    fs::create_dir_all(checkout.at("root/crates/deep")).unwrap();
    let mut command = checkout.xtask(&["test", "datasets"]);
    command.env("TESSERA_CACHE", "my-cache").current_dir(checkout.at("root/crates/deep"));
    assert_eq!(ended(&command.output().unwrap()).0, 0);
    says(&checkout.read("cargo-log"), &["test --package datasets", "CACHE=/", "/root/my-cache\n"]);
    assert!(checkout.at("root/my-cache").exists() && !checkout.at("root/crates/deep/my-cache").exists());
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
