//! A run that was killed and resumed gives the same results as one that wasn't.

use benches::analysis::{Analysis, analyse};
use benches::experiment::all;
use benches::record::{Record, parse};
use benches::run::read_meta;
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const EXPERIMENT: &str = "handwriting3";

fn bench(options: &[&str], root: &Path) -> Child {
    Command::new(env!("CARGO_BIN_EXE_tessera-bench"))
        .args(["run", "--root"])
        .arg(root)
        .args(options)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("tessera-bench was built for this test")
}

/// The only run below `root`, once it has its folder.
fn run_below(root: &Path) -> Option<PathBuf> {
    std::fs::read_dir(root).ok()?.flatten().map(|entry| entry.path()).next()
}

fn lines(run: &Path) -> usize {
    std::fs::read(run.join("results.jsonl")).map_or(0, |bytes| bytes.split(|&byte| byte == b'\n').count() - 1)
}

fn records(run: &Path) -> Vec<Record> {
    parse(&std::fs::read(run.join("results.jsonl")).unwrap()).unwrap().0
}

/// Every metric by experiment, arm, seed and name, as its bits.
fn bits(records: &[Record]) -> BTreeMap<(String, String, u64, String), u64> {
    let of = |r: &Record| {
        let (experiment, arm, seed) = r.key();
        let metrics = r.metrics.clone();
        metrics.into_iter().map(move |(name, value)| ((experiment.clone(), arm.clone(), seed, name), value.to_bits()))
    };
    records.iter().flat_map(of).collect()
}

/// What the report says, without what depends on the time of day and the load of the machine.
fn report(run: &Path) -> Analysis {
    let mut analysis = analyse(&all(), &[read_meta(run).unwrap()], &records(run));
    analysis.finished = 0;
    for arm in analysis.experiments.iter_mut().flat_map(|e| &mut e.arms) {
        (arm.wall_s, arm.cpu_s, arm.peak_mib) = (0.0, 0.0, 0.0);
    }
    analysis
}

#[test]
fn a_run_that_was_killed_and_resumed_reports_what_an_uninterrupted_one_does() {
    let sets = ["mnist-10k", "optdigits", "mfeat"];
    if let Some(missing) = sets.iter().find(|set| !datasets::cache::is_present(set).unwrap()) {
        // `cargo xtask test` names the sets that it has fetched.
        let required = std::env::var("TESSERA_REQUIRE_DATA").unwrap_or_default();
        assert!(!required.split(',').any(|set| set == *missing), "{missing} is required, but it isn't in the cache");
        println!(
            "Skipped: the data set {missing} isn't in the cache; fetch it with `cargo xtask data fetch {missing}`."
        );
        return;
    }
    let (whole, killed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let asked = [EXPERIMENT, "--seeds", "1", "--threads", "1"];
    let mut uninterrupted = bench(&asked, whole.path());
    let mut victim = bench(&asked, killed.path());
    let patience = Instant::now();
    while run_below(killed.path()).is_none_or(|run| lines(&run) < 2) {
        assert!(patience.elapsed() < Duration::from_mins(5), "two runs didn't end in five minutes");
        assert!(victim.try_wait().unwrap().is_none(), "the run ended before it could be killed");
        std::thread::sleep(Duration::from_millis(20));
    }
    victim.kill().unwrap();
    victim.wait().unwrap();
    let run = run_below(killed.path()).unwrap();
    let arms = all().into_iter().find(|e| e.spec.name == EXPERIMENT).unwrap().spec.arms.len();
    let done = lines(&run);
    assert!((2..arms).contains(&done), "{done} of {arms} arms were done");
    // As if it had been killed while it wrote, inside the two bytes of a "°".
    let mut file = OpenOptions::new().append(true).open(run.join("results.jsonl")).unwrap();
    file.write_all(b"{\"experiment\":\"handwriting3\",\"arm\":\"0\xc2").unwrap();
    assert!(bench(&["--resume"], killed.path()).wait().unwrap().success());
    assert!(uninterrupted.wait().unwrap().success());

    let whole = run_below(whole.path()).unwrap();
    let (one, other) = (records(&whole), records(&run));
    assert_eq!((one.len(), other.len()), (arms, arms));
    assert_eq!(bits(&one), bits(&other));
    assert_eq!(report(&whole), report(&run));
}
