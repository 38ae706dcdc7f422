//! The committed results: `docs/results/` and the table of methods in the README.
//!
//! A snapshot takes over the experiments of the given full runs and keeps all others as they were, so that one
//! crate's results can be renewed without running everything.

use crate::analysis::{Analysis, ExperimentResult, analyse};
use crate::experiment::all;
use crate::record::{Meta, Record};
use crate::report;
use crate::run::{META, RESULTS};
use crate::spec::Mode;
use anyhow::{Context as _, Result, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const BEGIN: &str = "<!-- results:begin -->\n";
const END: &str = "<!-- results:end -->";

/// A row of the README's table: a method and the comparison that speaks for (or against) it.
struct Row {
    method: &'static str,
    krate: &'static str,
    purpose: &'static str,
    page: &'static str,
    /// Experiment and claim whose estimate is shown.
    evidence: (&'static str, &'static str),
    provenance: &'static str,
}

/// The methods that exist.
const ROWS: [Row; 9] = [
    Row {
        method: "DA-SAM",
        krate: "sam-opt",
        purpose: "several source domains, use on one that was never seen",
        page: "da-sam.md",
        evidence: ("handwriting3", "da-sam-beats-sam"),
        provenance: "ICML 2026; formulas reconstructed from the abstract",
    },
    Row {
        method: "IAM",
        krate: "sam-opt",
        purpose: "few labels, many unlabeled inputs; flatness without labels",
        page: "iam.md",
        evidence: ("few-labels-mnist", "iam-d-beats-sam"),
        provenance: "ICML 2026",
    },
    Row {
        method: "S-Adam",
        krate: "sam-opt",
        purpose: "non-smooth or noisy training (read its page first)",
        page: "s-adam.md",
        evidence: ("noisy-batches", "noisy-batches-best-rates"),
        provenance: "ICML 2026, official code",
    },
    Row {
        method: "CHaRS",
        krate: "steering-ot",
        purpose: "steer a language model's text by moving activations, cluster by cluster",
        page: "chars.md",
        evidence: ("steer-transport", "ours-within"),
        provenance: "ICML 2026, official code; the default setting is ours",
    },
    Row {
        method: "AAD",
        krate: "aligned-decoding",
        purpose: "get more out of a model trained on preferences, by decoding against its reference",
        page: "aad.md",
        evidence: ("aad-sentiment", "aad-dpo"),
        provenance: "ICML 2026; the cheap exact form is derived here",
    },
    Row {
        method: "SAM",
        krate: "sam-opt",
        purpose: "flat minima; data that shift between training and use",
        page: "sam.md",
        evidence: ("handwriting3", "sam-beats-erm"),
        provenance: "prior work",
    },
    Row {
        method: "ASAM",
        krate: "sam-opt",
        purpose: "SAM with a radius relative to each weight",
        page: "sam.md",
        evidence: ("handwriting3", "asam-no-worse"),
        provenance: "prior work",
    },
    Row {
        method: "GSAM",
        krate: "sam-opt",
        purpose: "SAM that also narrows the gap to the perturbed loss",
        page: "sam.md",
        evidence: ("handwriting3", "gsam-no-worse"),
        provenance: "prior work",
    },
    Row {
        method: "SAGM",
        krate: "sam-opt",
        purpose: "SAM that matches both gradients",
        page: "sam.md",
        evidence: ("handwriting3", "sagm-no-worse"),
        provenance: "prior work",
    },
];

/// Writes the snapshot below `folder` and the table in `readme`.
///
/// # Errors
/// For quick runs, files that can't be written, a README without the two markers.
pub fn write(
    folder: &Path,
    readme: &Path,
    metas: &[Meta],
    records: &[Record],
    old: (Option<Meta>, Vec<Record>),
) -> Result<()> {
    if let Some(meta) = metas.iter().find(|m| m.mode != Mode::Full) {
        bail!("A snapshot is made of full runs, but one of these is a {} run: use --full.", meta.mode.name());
    }
    for experiment in analyse(&all(), metas, records).experiments {
        if experiment.skipped.is_none() && (experiment.seeds as u64) < experiment.spec.default_seeds(Mode::Full) {
            bail!(
                "{} has {} of its {} seeds: finish the run with --resume, or run it without --seeds.",
                experiment.spec.name,
                experiment.seeds,
                experiment.spec.default_seeds(Mode::Full)
            );
        }
    }
    let renewed: BTreeSet<&str> = records.iter().map(|r| r.experiment.as_str()).collect();
    let (old_meta, old_records) = old;
    let mut merged: Vec<Record> =
        old_records.into_iter().filter(|r| !renewed.contains(r.experiment.as_str())).collect();
    // Failures are results too: without them a claim could hold on the seeds that happened to run.
    merged.extend(latest(records).cloned());
    merged.sort_by_key(Record::key);
    let mut meta = metas.first().context("a snapshot needs a run")?.clone();
    // It is a merge of runs: what a single one was asked for doesn't describe it.
    meta.names = Vec::new();
    meta.seeds = None;
    meta.shard = None;
    let before = old_meta.into_iter().flat_map(|m| m.skipped).filter(|s| !renewed.contains(s.experiment.as_str()));
    // What is kept from before isn't missing.
    let kept: BTreeSet<&str> = merged.iter().map(|r| r.experiment.as_str()).collect();
    let skipped = metas.iter().flat_map(|m| m.skipped.clone()).chain(before);
    meta.skipped = skipped.filter(|s| !kept.contains(s.experiment.as_str())).collect();
    meta.skipped.dedup();

    std::fs::create_dir_all(folder).with_context(|| format!("{} can't be made", folder.display()))?;
    let analysis = analyse(&all(), std::slice::from_ref(&meta), &merged);
    let mut lines = String::new();
    for record in &merged {
        lines.push_str(&serde_json::to_string(record)?);
        lines.push('\n');
    }
    let table = table(&analysis);
    let text = std::fs::read_to_string(readme).with_context(|| format!("{} can't be read", readme.display()))?;
    let text = replace_between(&text, &table)
        .with_context(|| format!("{} lacks the markers {BEGIN}and {END}", readme.display()))?;
    for (path, text) in [
        (folder.join(RESULTS), lines),
        (folder.join(META), serde_json::to_string_pretty(&meta)? + "\n"),
        (folder.join("README.md"), report::markdown(&analysis)),
        (readme.to_owned(), text),
    ] {
        std::fs::write(&path, text).with_context(|| format!("{} can't be written", path.display()))?;
    }
    Ok(())
}

/// The last record of every key, which is the one that counts.
fn latest(records: &[Record]) -> impl Iterator<Item = &Record> {
    records.iter().map(|record| (record.key(), record)).collect::<BTreeMap<_, _>>().into_values()
}

/// The README's rows.
fn table(analysis: &Analysis) -> String {
    let line = |row: &Row| {
        let (experiment, claim) = row.evidence;
        let found = analysis.experiments.iter().find(|e| e.spec.name == experiment);
        let effect = found.and_then(|e| effect(e, claim)).unwrap_or_else(|| "not run".to_owned());
        let Row { method, krate, purpose, page, provenance, .. } = row;
        format!("| [{method}](docs/methods/{page}) | `{krate}` | {purpose} | {effect} | {provenance} |\n")
    };
    ROWS.iter().map(line).collect::<Vec<_>>().concat()
}

/// A claim's estimate in words.
fn effect(experiment: &ExperimentResult, claim: &str) -> Option<String> {
    let result = experiment.claims.iter().find(|c| c.claim.name == claim)?;
    let estimate = result.estimate?;
    let (low, high) = estimate.interval?;
    let statement = result.claim.statement.trim_end_matches('.');
    let title = experiment.spec.title.split(',').next().unwrap_or(&experiment.spec.title);
    Some(format!("{title}: \"{statement}\": {:+.2} points [{low:.2}, {high:.2}], {}", estimate.value, result.words()))
}

fn replace_between(text: &str, rows: &str) -> Option<String> {
    let start = text.find(BEGIN)? + BEGIN.len();
    let end = start + text[start..].find(END)?;
    Some(format!("{}{rows}{}", &text[..start], &text[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::Outcome;
    use crate::record::{Cost, Provenance};

    fn meta(mode: Mode) -> Meta {
        Meta {
            mode,
            names: vec![],
            seeds: None,
            peers: false,
            device: "cpu".into(),
            shard: None,
            threads: 1,
            started: 0,
            skipped: vec![],
        }
    }

    fn record(experiment: &str, arm: &str, seed: u64, accuracy: f64) -> Record {
        let mut outcome = Outcome::default();
        outcome.set("accuracy", accuracy);
        Record::new((experiment, arm, seed), Mode::Full, Ok(outcome), Cost::default(), &Provenance::default())
    }

    #[test]
    fn a_snapshot_renews_its_experiments_keeps_the_others_and_fills_the_readme() {
        let folder = tempfile::tempdir().unwrap();
        let readme = folder.path().join("README.md");
        std::fs::write(&readme, format!("before\n{BEGIN}old row\n{END}\nafter\n")).unwrap();
        let old = vec![record("rotated-mnist", "sam", 0, 1.0), record("handwriting3", "sam", 0, 2.0)];
        let new: Vec<Record> = (0..10)
            .flat_map(|s| {
                let noise = s as f64 / 50.0;
                [record("handwriting3", "sam", s, 52.0 + noise), record("handwriting3", "erm", s, 50.0)]
            })
            .collect();
        let out = folder.path().join("results");
        write(&out, &readme, &[meta(Mode::Full)], &new, (None, old)).unwrap();
        let text = std::fs::read_to_string(&readme).unwrap();
        assert!(text.starts_with("before\n") && text.ends_with("after\n") && !text.contains("old row"));
        assert!(text.contains("wasn't trained on\": +2.09 points [2.05, 2.13], holds"), "{text}");
        let (kept, _) = crate::record::parse(&std::fs::read(out.join(RESULTS)).unwrap()).unwrap();
        assert_eq!(kept.len(), 21);
        assert_eq!(kept.iter().filter(|r| r.experiment == "rotated-mnist").count(), 1);
        let partial = write(&out, &readme, &[meta(Mode::Full)], &new[..4], (None, vec![]));
        assert!(partial.unwrap_err().to_string().contains("2 of its 10 seeds"));
        assert!(write(&out, &readme, &[meta(Mode::Quick)], &new, (None, vec![])).is_err());
    }

    #[test]
    fn a_snapshot_keeps_failures_but_not_those_that_were_repaired() {
        let folder = tempfile::tempdir().unwrap();
        let readme = folder.path().join("README.md");
        std::fs::write(&readme, format!("{BEGIN}{END}\n")).unwrap();
        let failed = |seed| Record { error: Some("it broke".into()), ..record("handwriting3", "sam", seed, 0.0) };
        let mut new: Vec<Record> = (0..10)
            .flat_map(|s| {
                let sam = record("handwriting3", "sam", s, 52.0 + s as f64 / 100.0);
                [sam, record("handwriting3", "erm", s, 50.0)]
            })
            .collect();
        new.retain(|r| r.key() != failed(5).key());
        // Seed 4 failed first and ran when the run was resumed; seed 5 failed for good.
        new.insert(0, failed(4));
        new.push(failed(5));
        let out = folder.path().join("results");
        write(&out, &readme, &[meta(Mode::Full)], &new, (None, vec![])).unwrap();
        let (kept, _) = crate::record::parse(&std::fs::read(out.join(RESULTS)).unwrap()).unwrap();
        let failures: Vec<u64> = kept.iter().filter(|r| r.error.is_some()).map(|r| r.seed).collect();
        assert_eq!((failures, kept.len()), (vec![5], 20));
        let text = std::fs::read_to_string(&readme).unwrap();
        assert!(text.contains("not shown (1 run failed)"), "{text}");
    }
}
