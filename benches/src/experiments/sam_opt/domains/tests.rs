//! The protocols hold what they promise.

use super::describe::arms;
use super::training::row_order;
use super::*;
use crate::experiments::sam_opt::arms::SEARCHED;
use crate::experiments::sam_opt::search::Trial;
use std::collections::HashSet;
use std::sync::atomic::AtomicBool;
use tensor::Seed;
use tensor::tch::Device;

#[test]
fn batches_use_every_row_once_before_any_row_twice() {
    let order = row_order(10, 25, Seed::new(1));
    assert_eq!(order.len(), 25);
    for epoch in order[..20].chunks(10) {
        assert_eq!(epoch.iter().collect::<HashSet<_>>().len(), 10);
    }
    assert_eq!(order, row_order(10, 25, Seed::new(1)));
    assert_ne!(order, row_order(10, 25, Seed::new(2)));
    // A longer run starts with the same batches.
    assert_eq!(order[..], row_order(10, 50, Seed::new(1))[..25]);
}

#[test]
fn the_committed_searches_tried_the_whole_grid_for_every_arm_and_fold_and_chose_the_best() {
    for protocol in [&HANDWRITING3, &ROTATED_MNIST] {
        let tuned = Tuned::<Method>::parse(protocol.tuned).unwrap();
        assert_eq!(tuned.searches.len(), SEARCHED.len() * protocol.held_out.len());
        for arm in SEARCHED {
            for held_out in protocol.held_out {
                let search = tuned.searches.iter().find(|s| s.arm == arm && s.fold == *held_out).unwrap();
                let tried: Vec<Method> = search.trials.iter().map(|t| t.candidate.clone()).collect();
                assert_eq!(tried, Method::grid(arm).unwrap(), "{arm}, {held_out} held out");
                let best = &Trial::best(&search.trials).unwrap().candidate;
                assert_eq!(search.chosen, *best, "{arm}, {held_out} held out: the choice isn't the best trial");
            }
        }
        let evaluated = seeds(protocol);
        assert!(tuned.seeds.iter().all(|&s| s >= evaluated), "a search seed is evaluated too");
    }
}

#[test]
fn notes_list_the_choices_of_the_folds() {
    for (protocol, folds) in [(&HANDWRITING3, 3), (&ROTATED_MNIST, 2)] {
        for arm in arms(protocol).iter().filter(|arm| SEARCHED.contains(&arm.name.as_str())) {
            assert!(arm.note.ends_with("chosen for each fold on validation among 7"), "{}", arm.note);
            assert_eq!(arm.note.matches(" / ").count(), folds - 1, "{}", arm.note);
        }
    }
}

#[test]
fn a_fold_keeps_its_accuracy_and_shares_in_the_means() {
    let fold = |accuracy: f64, passes: f64| {
        let mut outcome = Outcome::default();
        outcome.set("accuracy", accuracy);
        outcome.set("passes", passes);
        outcome
    };
    let mean = mean_over_folds(&[("x", fold(40.0, 400.0)), ("y", fold(60.0, 800.0))]).metrics;
    let expected = [("accuracy", 50.0), ("accuracy x", 40.0), ("accuracy y", 60.0), ("passes", 600.0)];
    assert_eq!(mean, expected.map(|(name, value)| (name.to_owned(), value)).into());
}

/// Two domains of random points in four dimensions beside one that is held out.
fn toy(held_out: f32) -> Vec<Domain> {
    let domain = |name: &str, add: f32| {
        let mut x = vec![0.0f32; 160];
        Seed::new(0).child(name).fill_normal(&mut x, 0);
        let x = ndarray::Array2::from_shape_fn((40, 4), |(i, j)| x[4 * i + j] + add);
        Domain { name: name.into(), x, y: (0..40).map(|i| i % 10).collect() }
    };
    vec![domain("a", 0.0), domain("b", 0.0), domain("c", held_out)]
}

const TOY: Protocol = Protocol {
    name: "toy",
    data: &[],
    load: || {
        static DOMAINS: OnceLock<Vec<Domain>> = OnceLock::new();
        once(&DOMAINS, || Ok(toy(0.0)))
    },
    held_out: &["a", "c"],
    widths: &[4, 10],
    tuned: r#"{"seeds": [9], "searches": [
        {"arm": "sam", "fold": "a", "chosen": {"method": "erm", "weight_decay": 0.0}, "trials": []},
        {"arm": "sam", "fold": "c", "chosen": {"method": "sam", "rho": 0.5}, "trials": []}]}"#,
};

fn context() -> Context {
    static NEVER: AtomicBool = AtomicBool::new(false);
    Context { mode: Mode::Full, device: Device::Cpu, threads: 1, peer_python: None, interrupted: &NEVER }
}

#[test]
fn a_search_learns_nothing_from_the_held_out_domain() {
    let score = |protocol: &Protocol, held_out: &str| {
        let score = source_validation(protocol, &context(), &ORACLE, 20, held_out, 3).unwrap();
        (score.accuracy, score.loss)
    };
    let load: fn() -> Result<&'static [Domain]> = || {
        static DOMAINS: OnceLock<Vec<Domain>> = OnceLock::new();
        once(&DOMAINS, || Ok(toy(5.0)))
    };
    let moved = Protocol { load, ..TOY };
    assert_eq!(score(&TOY, "c"), score(&moved, "c"));
    // The same change in a source domain is seen.
    assert_ne!(score(&TOY, "a"), score(&moved, "a"));
}

#[test]
fn every_fold_trains_with_its_own_choice() {
    let outcome = run_arm(&TOY, &context(), "sam", 3).unwrap();
    // ERM's one pass a step where a is held out, SAM's two where c is.
    assert_eq!(outcome.metrics["passes"], 1.5 * STEPS as f64);
    let domains = toy(0.0);
    let alone = Trained::new(&TOY, &context(), &Plan::new(ORACLE, STEPS), &domains, "c", 3).unwrap().test().unwrap();
    assert_eq!(outcome.metrics["accuracy c"], alone.metrics["accuracy"]);
}

#[test]
fn seeds_of_the_search_are_not_evaluated() {
    let message = run_arm(&TOY, &context(), "sam", 9).unwrap_err().to_string();
    assert!(message.contains("Seed 9"), "{message}");
}

fn seeds(protocol: &Protocol) -> u64 {
    let spec = if protocol.name == "handwriting3" { handwriting3().spec } else { rotated_mnist().spec };
    spec.seeds.1
}
