//! A real pair: SmolLM2 trained towards positive texts by DPO on human ratings, decoded by every rule.

use super::super::sentiment::{DATA, vader};
use super::pair::{Recipe, Trained, trained};
use crate::experiment::{Body, Context, Experiment, Outcome, Outcomes};
use crate::spec::{Arm, Claim, Direction, Kind, Metric, Mode, Role, Spec, Test};
use aligned_decoding::{AadConfig, Generation, ModelPair, Rule, Side, Stats, generate};
use anyhow::{Context as _, Result, ensure};
use lm::train::repetition;

pub(super) const ORACLE: &str = "oracle";
pub(super) const VADER: &str = "vader";
pub(super) const NLL: &str = "nll";
pub(super) const REPEATED: &str = "repeated";
const SINGLE: &str = "single";
const CANDIDATES: &str = "candidates";
const ADVANTAGE: &str = "advantage";
/// Blocks of prompts that a training seed is used for.
const BLOCKS: u64 = 4;
const DPO: &str = "dpo";
const AAD: &str = "aad";

/// The arms with the rule that each is.
fn arms() -> Vec<(Arm, Rule, f64)> {
    let arm = |name: &str, label: &str, role, note: &str, rule, alpha| (Arm::new(name, label, role, note), rule, alpha);
    vec![
        arm(DPO, "Greedy DPO", Role::Baseline, "", Rule::GreedyDpo, 0.1),
        arm("sft", "Greedy SFT", Role::Baseline, "the reference", Rule::GreedyRef, 0.1),
        arm(AAD, "AAD, α = 0.1", Role::Method, "the paper's α", Rule::Aad, 0.1),
        arm("aad-0.3", "AAD, α = 0.3", Role::Method, "", Rule::Aad, 0.3),
        arm("eft", "EFT, γ = 2", Role::Baseline, "arg-max", Rule::Eft { gamma: 2.0, temperature: 0.0 }, 0.1),
        arm("sample", "Sampled DPO", Role::Baseline, "temperature 1", SAMPLE, 0.1),
        arm(
            "best",
            "Best of 2",
            Role::Baseline,
            "of two samples, picked by the judge itself: an advantage",
            SAMPLE,
            0.1,
        ),
    ]
}

const SAMPLE: Rule = Rule::Sample { from: Side::Policy, temperature: 1.0, top_p: None, min_p: None };

pub(super) fn experiment() -> Experiment {
    let better = |name: &str, statement: &str, metric: &str, arms: (&str, &str)| {
        Claim::new(name, statement, "paper", metric, arms, Test::Superior(0.0))
    };
    Experiment {
        spec: Spec {
            name: "aad-sentiment".into(),
            krate: "aligned-decoding".into(),
            title: "Positive text from a real pair".into(),
            protocol: "SmolLM2-135M with LoRA of rank 16 on its top 4 layers: 80 steps of supervised fine-tuning on short texts of four \
                       domains, then 40 steps of DPO (β = 0.1) from there on up to 40 pairs a domain, chosen where people rated at \
                       least 1.5, rejected where at most −1.2, paired by length. The reference is the fine-tuned adapter. Prompts are \
                       the first 4 tokens of 20 other texts a domain; 20 new tokens among the corpus's 8,000 most frequent ones; no \
                       3-gram comes twice. The judge is ridge regression of human ratings on TF-IDF of texts that nothing else has \
                       seen; VADER is a second one. Three training seeds, each with four blocks of 20 prompts, which count as seeds of \
                       the table (quick: one block of 8 prompts, 6 and 8 steps, 8 tokens)."
                .into(),
            data: vec!["smollm2".into(), DATA.into()],
            kind: Kind::Core,
            metrics: vec![
                Metric::new(ORACLE, "judge's rating", "", Direction::Higher, 3),
                Metric::new(VADER, "VADER", "", Direction::Higher, 3),
                Metric::new(NLL, "NLL under the reference", "nats/token", Direction::Lower, 2),
                Metric::new(REPEATED, "repeated 3-grams", "share", Direction::Lower, 3),
                Metric::new(SINGLE, "steps with one candidate", "share", Direction::Neither, 3),
                Metric::new(CANDIDATES, "candidates", "", Direction::Neither, 1),
                Metric::new(ADVANTAGE, "Σ A", "nats", Direction::Neither, 2),
            ],
            arms: arms().into_iter().map(|(arm, ..)| arm).collect(),
            claims: vec![
                better("aad-dpo", "AAD's texts are rated higher than greedy DPO's.", ORACLE, (AAD, DPO)),
                better("aad-dpo-vader", "AAD's texts are rated higher than greedy DPO's by VADER.", VADER, (AAD, DPO)),
                better("dpo-sft", "Greedy DPO's texts are rated higher than greedy SFT's.", ORACLE, (DPO, "sft")),
                better("aad-eft", "AAD's texts are rated higher than those of EFT with γ = 2.", ORACLE, (AAD, "eft")),
                better("aad-best", "AAD's texts are rated higher than the best of two samples.", ORACLE, (AAD, "best")),
                Claim::new(
                    "aad-eft-nll",
                    "AAD's texts are as likely under the reference as those of EFT with γ = 2 (within 0.2 nats a token).",
                    "ours",
                    NLL,
                    (AAD, "eft"),
                    Test::NonInferior(0.2),
                ),
            ],
            curves: vec![],
            seeds: (1, 3 * BLOCKS),
            seeds_for_verdict: 5,
            threads: 0,
            seconds_per_seed: (25.0, 60.0),
        },
        body: Body::Together(run),
    }
}

/// The settings of every rule.
pub(super) fn settings(trained: &Trained, rule: Rule, alpha: f64, tokens: usize, seed: u64) -> AadConfig {
    AadConfig {
        alpha,
        rule,
        max_new_tokens: tokens,
        no_repeat_ngram: Some(3),
        allowed: Some(trained.allowed.clone()),
        check_pair: false,
        seed,
        ..AadConfig::default()
    }
}

/// What the judges say of texts, by text.
pub(super) struct Judged {
    pub(super) oracle: Vec<f64>,
    pub(super) vader: Vec<f64>,
    pub(super) nll: Vec<f64>,
    pub(super) repeated: Vec<f64>,
    pub(super) advantage: Vec<f64>,
    pub(super) stats: Stats,
}

impl Judged {
    pub(super) fn new(trained: &Trained, texts: &[Generation]) -> Result<Self> {
        let mut judged = Self {
            oracle: Vec::new(),
            vader: Vec::new(),
            nll: Vec::new(),
            repeated: Vec::new(),
            advantage: Vec::new(),
            stats: Stats::sum(texts.iter().map(|text| &text.stats)),
        };
        for text in texts {
            let words = trained.lm.decode(&text.tokens)?;
            judged.oracle.push(trained.oracle.score(&words));
            judged.vader.push(vader(&words));
            judged.nll.push(text.ref_nll().context("a text has its likelihood")?);
            judged.repeated.push(repetition(&text.tokens, 3));
            judged.advantage.push(text.sum_advantage.context("a text has its advantage")?);
        }
        Ok(judged)
    }

    pub(super) fn outcome(&self) -> Outcome {
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
        let mut outcome = Outcome::default();
        let all = [
            (ORACLE, &self.oracle),
            (VADER, &self.vader),
            (NLL, &self.nll),
            (REPEATED, &self.repeated),
            (ADVANTAGE, &self.advantage),
        ];
        for (metric, values) in all {
            outcome.set(metric, mean(values));
        }
        outcome.set(SINGLE, self.stats.single_share().unwrap_or(f64::NAN));
        outcome.set(CANDIDATES, self.stats.mean_candidates().unwrap_or(f64::NAN));
        outcome
    }
}

fn run(context: &Context, seed: u64) -> Result<Outcomes> {
    let (recipe, tokens) = match context.mode {
        Mode::Quick => (Recipe::quick(seed), 8),
        Mode::Full => (Recipe::full(seed / BLOCKS), 20),
    };
    let trained = trained(context, recipe)?;
    let (first, last) = trained.losses;
    ensure!(last < first, "DPO's loss went from {first} to {last}: nothing was learned");
    let prompts: Vec<Vec<u32>> = match context.mode {
        Mode::Quick => trained.prompts.clone(),
        // Every fourth prompt, so that each block has all domains.
        Mode::Full => trained.prompts.iter().skip((seed % BLOCKS) as usize).step_by(BLOCKS as usize).cloned().collect(),
    };
    let pair = ModelPair::lora(&trained.lm.model, trained.dpo.view(), Some(trained.sft.view()))?;
    let decode = |rule, alpha, draw| -> Result<Judged> {
        context.check()?;
        let config = settings(&trained, rule, alpha, tokens, 2 * seed + draw);
        Judged::new(&trained, &generate(&pair, &prompts, &config)?)
    };
    let mut outcomes = Outcomes::new();
    let mut sample = None;
    for (arm, rule, alpha) in arms() {
        let judged = match arm.name.as_str() {
            "best" => {
                let first: Judged = sample.take().context("samples come before the best of them")?;
                best(first, &decode(rule, alpha, 1)?)
            }
            _ => decode(rule, alpha, 0)?,
        };
        outcomes.push((arm.name.clone(), judged.outcome()));
        if arm.name == "sample" {
            sample = Some(judged);
        }
    }
    Ok(outcomes)
}

/// Of two texts the one that the judge rates higher.
fn best(mut first: Judged, second: &Judged) -> Judged {
    for i in 0..first.oracle.len() {
        if second.oracle[i] > first.oracle[i] {
            first.oracle[i] = second.oracle[i];
            first.vader[i] = second.vader[i];
            first.nll[i] = second.nll[i];
            first.repeated[i] = second.repeated[i];
            first.advantage[i] = second.advantage[i];
        }
    }
    first.stats = Stats::sum([&first.stats, &second.stats]);
    first
}
