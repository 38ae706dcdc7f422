//! Verdicts, and estimates of tiny records that were worked out by hand.

use super::*;
use crate::experiment::{Body, Outcome};
use crate::record::Cost;
use crate::spec::{Arm, Kind, Role};

fn estimate(low: f64, high: f64) -> Estimate {
    Estimate { value: f64::midpoint(low, high), interval: Some((low, high)), n: 10 }
}

#[test]
fn verdicts_follow_from_the_interval() {
    use Verdict::{Contradicted, Holds, NotShown};
    for (test, low, high, expected) in [
        (Test::Superior(0.0), 0.1, 1.0, Holds),
        (Test::Superior(0.0), -0.1, 1.0, NotShown),
        (Test::Superior(0.0), -1.0, -0.1, Contradicted),
        (Test::Superior(0.5), 0.1, 0.4, Contradicted),
        (Test::NonInferior(0.5), -0.4, 0.1, Holds),
        (Test::NonInferior(0.5), -0.6, 0.1, NotShown),
        (Test::NonInferior(0.5), -0.9, -0.6, Contradicted),
        (Test::Equivalent(0.5), -0.4, 0.4, Holds),
        (Test::Equivalent(0.5), -0.4, 0.6, NotShown),
        (Test::Equivalent(0.5), 0.6, 0.9, Contradicted),
        (Test::RatioAtMost(2.0), 1.8, 1.9, Holds),
        (Test::RatioAtMost(2.0), 1.9, 2.1, NotShown),
        (Test::RatioAtMost(2.0), 2.1, 2.2, Contradicted),
        (Test::SpeedupAtLeast(1.5), 1.6, 2.0, Holds),
        (Test::SpeedupAtLeast(1.5), 1.4, 2.0, NotShown),
        (Test::SpeedupAtLeast(1.5), 1.0, 1.4, Contradicted),
    ] {
        assert_eq!(verdict(test, &estimate(low, high), true), expected, "{test:?} [{low}, {high}]");
    }
}

#[test]
fn few_seeds_give_no_verdict_however_clear_the_interval() {
    assert_eq!(verdict(Test::Superior(0.0), &estimate(1.0, 2.0), false), Verdict::TooFewSeeds);
    let single = Estimate { value: 1.0, interval: None, n: 1 };
    assert_eq!(verdict(Test::Superior(0.0), &single, true), Verdict::TooFewSeeds);
    assert_eq!(verdict(Test::Descriptive, &single, false), Verdict::Descriptive);
}

/// An experiment with the arms "a" (the method) and "b", and one claim about "a".
fn experiment(direction: Direction, test: Test) -> Experiment {
    let claim = Claim {
        name: "claim".into(),
        statement: "a is better than b.".into(),
        source: "ours".into(),
        metric: "m".into(),
        arm: "a".into(),
        reference: "b".into(),
        test,
    };
    let spec = Spec {
        name: "e".into(),
        krate: "c".into(),
        title: "E".into(),
        protocol: String::new(),
        data: vec![],
        kind: Kind::Core,
        metrics: vec![Metric::new("m", "m", "", direction, 2)],
        arms: vec![Arm::new("b", "b", Role::Baseline, ""), Arm::new("a", "a", Role::Method, "")],
        claims: vec![claim],
        curves: vec![],
        seeds: (2, 2),
        seeds_for_verdict: 2,
        threads: 1,
        seconds_per_seed: (1.0, 1.0),
    };
    Experiment { spec, body: Body::PerArm(|_, _, _| Ok(Outcome::default())) }
}

/// What a run of an arm gave.
#[derive(Clone, Copy)]
enum Gave {
    Number(f64),
    Samples(&'static [f64]),
    Failure,
}
use Gave::{Failure, Number, Samples};

fn record((arm, seed, gave): (&str, u64, Gave)) -> Record {
    let mut outcome = Outcome::default();
    match gave {
        Number(value) => outcome.set("m", value),
        Samples(values) => {
            outcome.set("m", values[values.len() / 2]);
            outcome.samples.insert("m".into(), values.to_vec());
        }
        Failure => {}
    }
    let outcome = if matches!(gave, Failure) { Err(anyhow::anyhow!("it broke")) } else { Ok(outcome) };
    Record::new(("e", arm, seed), Mode::Full, outcome, Cost::default(), &Provenance::default())
}

fn meta(shard: Option<(u64, u64)>) -> Meta {
    Meta {
        mode: Mode::Full,
        names: vec![],
        seeds: None,
        peers: false,
        device: "cpu".into(),
        shard,
        threads: 1,
        started: 0,
        skipped: vec![],
    }
}

fn analysed(direction: Direction, test: Test, runs: &[(&str, u64, Gave)]) -> ExperimentResult {
    let records: Vec<Record> = runs.iter().copied().map(record).collect();
    analyse(&[experiment(direction, test)], &[meta(None)], &records).experiments.remove(0)
}

/// Student's t at 95 % for one and for two degrees of freedom.
const T1: f64 = 12.706204736;
const T2: f64 = 4.302652730;

#[test]
fn estimates_of_tiny_records_are_those_worked_out_by_hand() {
    use Direction::{Higher, Lower};
    let superior = Test::Superior(0.0);
    // Differences a − b on the seeds 0, 1, 2: 1, 2, 3, with mean 2, standard deviation 1, standard error 1/√3.
    let both: &[(&str, u64, Gave)] = &[
        ("a", 0, Number(11.0)),
        ("b", 0, Number(10.0)),
        ("a", 1, Number(22.0)),
        ("b", 1, Number(20.0)),
        ("a", 2, Number(3.0)),
        ("b", 2, Number(0.0)),
    ];
    let half = T2 / 3f64.sqrt();
    // Ratios of medians 3/2, with equal samples an interval of no width.
    let timings: &[(&str, u64, Gave)] = &[("a", 0, Samples(&[3.0; 5])), ("b", 0, Samples(&[2.0; 5]))];
    for (what, direction, test, runs, value, (low, high), n) in [
        ("higher is better", Higher, superior, both, 2.0, (2.0 - half, 2.0 + half), 3),
        ("lower is better: turned", Lower, superior, both, -2.0, (-2.0 - half, -2.0 + half), 3),
        (
            // Seed 2 lacks b, seed 3 lacks a, b failed on seed 4: differences 1 and 2 remain, standard error 1/2.
            "only seeds where both sides ran",
            Higher,
            superior,
            &[
                ("b", 1, Number(20.0)),
                ("a", 4, Number(99.0)),
                ("a", 2, Number(99.0)),
                ("b", 4, Failure),
                ("a", 1, Number(22.0)),
                ("b", 0, Number(10.0)),
                ("a", 0, Number(11.0)),
                ("b", 3, Number(-99.0)),
            ],
            1.5,
            (1.5 - T1 / 2.0, 1.5 + T1 / 2.0),
            2,
        ),
        (
            "the last record of a key counts",
            Higher,
            superior,
            &[
                ("a", 0, Number(77.0)),
                ("b", 0, Number(10.0)),
                ("a", 1, Failure),
                ("b", 1, Number(20.0)),
                ("a", 1, Number(22.0)),
                ("a", 0, Number(11.0)),
            ],
            1.5,
            (1.5 - T1 / 2.0, 1.5 + T1 / 2.0),
            2,
        ),
        ("a cost is arm over reference", Lower, Test::RatioAtMost(2.0), timings, 1.5, (1.5, 1.5), 5),
        (
            "a speed-up is reference over arm",
            Lower,
            Test::SpeedupAtLeast(1.0),
            timings,
            2.0 / 3.0,
            (2.0 / 3.0, 2.0 / 3.0),
            5,
        ),
    ] {
        let found = analysed(direction, test, runs).claims[0].estimate.unwrap();
        let ends = found.interval.unwrap();
        for (is, should) in [(found.value, value), (ends.0, low), (ends.1, high)] {
            // T1 and T2 have ten digits.
            assert!((is - should).abs() < 1e-8, "{what}: {found:?}, but {value} [{low}, {high}] is right");
        }
        assert_eq!(found.n, n, "{what}");
    }
}

#[test]
fn merged_shards_count_as_one_run() {
    let whole: Vec<Record> =
        [0, 1, 2, 3].iter().flat_map(|&s| [("a", s, Number(s as f64)), ("b", s, Number(0.0))]).map(record).collect();
    let shard = |i: u64| whole.iter().filter(move |r| r.seed % 2 == i - 1).cloned();
    let experiments = [experiment(Direction::Higher, Test::Superior(0.0))];
    let merged: Vec<Record> = shard(2).chain(shard(1)).collect();
    let one = analyse(&experiments, &[meta(None)], &whole);
    let two = analyse(&experiments, &[meta(Some((2, 2))), meta(Some((1, 2)))], &merged);
    assert_eq!(one.experiments, two.experiments);
    let estimate = one.experiments[0].claims[0].estimate.unwrap();
    // Differences 0, 1, 2, 3.
    assert_eq!((estimate.value, estimate.n, one.experiments[0].seeds), (1.5, 4, 4));
}

#[test]
fn an_arm_that_failed_where_the_other_ran_leaves_nothing_shown() {
    let with = |offset: f64, gave: [Gave; 2]| {
        let mut runs: Vec<(&str, u64, Gave)> =
            (0..5).flat_map(|s| [("a", s, Number(offset + 0.1 * s as f64)), ("b", s, Number(0.0))]).collect();
        runs.extend([("a", 5, gave[0]), ("b", 5, gave[1])]);
        let claim = analysed(Direction::Higher, Test::Superior(0.0), &runs).claims.remove(0);
        (claim.verdict, claim.failed, claim.words())
    };
    let number = Number(0.0);
    assert_eq!(with(9.0, [Number(9.0), number]), (Verdict::Holds, 0, "holds".into()));
    assert_eq!(with(-9.0, [Number(-9.0), number]), (Verdict::Contradicted, 0, "contradicted".into()));
    for offset in [9.0, -9.0] {
        for gave in [[Failure, number], [number, Failure]] {
            assert_eq!(with(offset, gave), (Verdict::NotShown, 1, "not shown (1 run failed)".into()));
        }
    }
    // Both failed: the seed is missing, but on neither side alone.
    assert_eq!(with(9.0, [Failure, Failure]), (Verdict::Holds, 2, "holds (2 runs failed)".into()));
    let all_failed = [("a", 0, Failure), ("b", 0, number)];
    let claim = analysed(Direction::Higher, Test::Superior(0.0), &all_failed).claims.remove(0);
    assert_eq!((claim.verdict, claim.failed), (Verdict::NoData, 1));
}

#[test]
fn timings_have_no_differences_to_the_first_arm() {
    let difference = |gave: [Gave; 2]| {
        let runs = [("a", 0, gave[0]), ("b", 0, gave[1])];
        let result = analysed(Direction::Lower, Test::Superior(0.0), &runs);
        result.arms.iter().find(|arm| arm.name == "a").unwrap().differences.get("m").map(|d| d.value)
    };
    assert_eq!(difference([Number(3.0), Number(1.0)]), Some(2.0));
    assert_eq!(difference([Samples(&[3.0, 3.0, 3.0]), Samples(&[1.0, 1.0, 1.0])]), None);
}
