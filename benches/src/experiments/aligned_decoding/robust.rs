//! How AAD's gain depends on how the pair was trained: β, steps, data; and a round of synthetic preference data.

use super::super::sentiment::DATA;
use super::pair::{Recipe, prefer, trained};
use super::sentiment::{Judged, NLL, ORACLE, REPEATED, VADER, settings};
use crate::experiment::{Body, Context, Experiment, Outcomes};
use crate::spec::{Arm, Direction, Kind, Metric, Mode, Role, Spec};
use aligned_decoding::synth::{SynthConfig, build_pairs};
use aligned_decoding::{ModelPair, Rule, generate};
use anyhow::{Context as _, Result};
use lm::lora::Adapter;

/// Key, words and recipe of a pair, from that of the full experiment.
type Variant = (&'static str, &'static str, fn(&mut Recipe));

const VARIANTS: [Variant; 7] = [
    ("usual", "β = 0.1, 40 steps, all pairs", |_| ()),
    ("beta-0.05", "β = 0.05", |r| r.beta = 0.05),
    ("beta-0.5", "β = 0.5", |r| r.beta = 0.5),
    ("steps-20", "20 steps", |r| r.dpo_steps = 20),
    ("steps-60", "60 steps", |r| r.dpo_steps = 60),
    ("pairs-10", "a tenth of the pairs", |r| r.pairs = 4),
    ("unfitted", "one step of fine-tuning, 60 of DPO", |r| (r.sft_steps, r.dpo_steps) = (1, 60)),
];
const SYNTHETIC: &str = "pairs-10-again";

fn name(variant: &str, rule: &str) -> String {
    format!("{variant}-{rule}")
}

pub(super) fn experiment() -> Experiment {
    let mut arms = Vec::new();
    let synthetic = (SYNTHETIC, "a tenth of the pairs, then a round on AAD's own texts");
    for (key, words) in VARIANTS.iter().map(|v| (v.0, v.1)).chain([synthetic]) {
        arms.push(Arm::new(&name(key, "dpo"), &format!("Greedy DPO, {words}"), Role::Baseline, ""));
        arms.push(Arm::new(&name(key, "aad"), &format!("AAD, {words}"), Role::Method, "α = 0.1"));
    }
    Experiment {
        spec: Spec {
            name: "aad-robust".into(),
            krate: "aligned-decoding".into(),
            title: "Other trainings of the pair".into(),
            protocol: "As `aad-sentiment`, all 80 prompts of a training seed together, with one setting of the training changed. \"A round \
                       on AAD's own texts\": the pair of a tenth of the pairs makes preference data from the prompts of the SFT \
                       texts (chosen: AAD, rejected: a nucleus sample), and a second DPO starts from its policy, with the same \
                       reference. \"One step of fine-tuning\" is a known failure, kept: a reference that doesn't write such texts, \
                       and a policy trained too far."
                .into(),
            data: vec!["smollm2".into(), DATA.into()],
            kind: Kind::ByName,
            metrics: vec![
                Metric::new(ORACLE, "judge's rating", "", Direction::Higher, 3),
                Metric::new(VADER, "VADER", "", Direction::Higher, 3),
                Metric::new(NLL, "NLL under the reference", "nats/token", Direction::Lower, 2),
                Metric::new(REPEATED, "repeated 3-grams", "share", Direction::Lower, 3),
            ],
            arms,
            claims: vec![],
            curves: vec![],
            seeds: (1, 3),
            seeds_for_verdict: 3,
            threads: 0,
            seconds_per_seed: (120.0, 1200.0),
        },
        body: Body::Together(run),
    }
}

fn run(context: &Context, seed: u64) -> Result<Outcomes> {
    let (base, tokens) = match context.mode {
        Mode::Quick => (Recipe::quick(seed), 8),
        Mode::Full => (Recipe::full(seed), 20),
    };
    let mut outcomes = Outcomes::new();
    for (key, _, change) in VARIANTS {
        let mut recipe = base;
        change(&mut recipe);
        let trained = trained(context, recipe)?;
        let mut judge = |key: &str, policy: &Adapter| -> Result<()> {
            let pair = ModelPair::lora(&trained.lm.model, policy.view(), Some(trained.sft.view()))?;
            for (words, rule) in [("dpo", Rule::GreedyDpo), ("aad", Rule::Aad)] {
                context.check()?;
                let config = settings(&trained, rule, 0.1, tokens, seed);
                let mut outcome = Judged::new(&trained, &generate(&pair, &trained.prompts, &config)?)?.outcome();
                outcome.metrics.retain(|metric, _| [ORACLE, VADER, NLL, REPEATED].contains(&metric.as_str()));
                outcomes.push((name(key, words), outcome));
            }
            Ok(())
        };
        judge(key, &trained.dpo)?;
        if key == "pairs-10" {
            let pair = ModelPair::lora(&trained.lm.model, trained.dpo.view(), Some(trained.sft.view()))?;
            let aad = settings(&trained, Rule::Aad, 0.1, tokens, seed);
            let pairs = build_pairs(&pair, &trained.asked, &SynthConfig { aad, ..SynthConfig::default() })?;
            let model = &trained.lm.model;
            let (policy, _) = prefer(context, model, &trained.dpo, &trained.sft, &pairs, &trained.allowed, recipe)
                .context("a round on synthetic pairs")?;
            judge(SYNTHETIC, &policy)?;
        }
    }
    Ok(outcomes)
}
