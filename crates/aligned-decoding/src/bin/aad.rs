//! `aad`: decodes with a preference-trained model and its own reference, compares the rules, checks whether two models are a pair.
//!
//! Models are `.gguf` files, folders of Hugging Face's, or, with `--base`, folders of PEFT's adapters.

use aligned_decoding::bestofn::{DRAW, best_of, by_implicit_reward};
use aligned_decoding::config::{AadConfig, ReferenceMode, Rule, StopRule};
use aligned_decoding::doctor::{self, WeightDelta};
use aligned_decoding::guard::repetition;
use aligned_decoding::pair::shared_tokens;
use aligned_decoding::tensor::stats::{Bootstrap, bootstrap_interval};
use aligned_decoding::{Generation, ModelPair, Side, Stats, View, generate, trace};
use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, Parser, Subcommand};
use lm::lora::Adapter;
use lm::template::Message;
use lm::{Lm, LoadOptions, Weights};
use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};

#[derive(Debug, Parser)]
#[command(
    name = "aad",
    about = "Alignment-aware decoding for a preference-trained model and its own reference",
    version
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Continues a prompt.
    Generate(GenerateArguments),
    /// Decodes a file of prompts with all rules and prints rewards beside log-likelihoods.
    Compare(CompareArguments),
    /// Checks whether two models are a policy and its reference.
    Doctor(DoctorArguments),
}

#[derive(Debug, Args)]
struct Models {
    /// The model that adapters belong to, if policy or reference is a PEFT folder.
    #[arg(long)]
    base: Option<PathBuf>,
    /// Allows tables of embeddings, or lists of tokens, of which one is longer.
    #[arg(long)]
    allow_padded_vocab: bool,
    /// Keeps quantized weights of GGUF files quantized: less memory, a little less exact.
    #[arg(long)]
    packed: bool,
    /// Where tensors live: cpu, cuda:0, auto.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Threads; by default all cores.
    #[arg(long)]
    threads: Option<usize>,
}

#[derive(Debug, Args)]
struct Decoding {
    /// The model that was trained on preferences.
    #[arg(long)]
    policy: PathBuf,
    /// The model that it was trained from; without it the bare base.
    #[arg(long)]
    reference: Option<PathBuf>,
    #[command(flatten)]
    models: Models,
    /// A token is plausible if the policy finds it at least this many times as probable as its favourite.
    #[arg(long, default_value_t = 0.1)]
    alpha: f64,
    /// Most tokens.
    #[arg(long, short = 'n', default_value_t = 64)]
    max_new_tokens: usize,
    /// No n tokens in a row come twice.
    #[arg(long)]
    no_repeat_ngram: Option<usize>,
    /// Puts prompts into the checkpoint's chat template, as a user's message.
    #[arg(long)]
    chat: bool,
    /// Seed of rules that draw.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

#[derive(Debug, Args)]
struct GenerateArguments {
    #[command(flatten)]
    decoding: Decoding,
    /// The text to continue.
    #[arg(long)]
    prompt: String,
    /// The rule as JSON, for instance `"greedy_dpo"` or `{"eft": {"gamma": 2.0}}`; by default alignment-aware decoding.
    #[arg(long)]
    rule: Option<String>,
    /// Runs the reference at every step with all its logits.
    #[arg(long)]
    eager: bool,
    /// Shows where the text departs from what the policy alone would have said.
    #[arg(long)]
    trace: bool,
    /// Writes every step's candidates to this file as JSON.
    #[arg(long)]
    trace_json: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct CompareArguments {
    #[command(flatten)]
    decoding: Decoding,
    /// A file with a prompt a line.
    #[arg(long)]
    prompts: PathBuf,
    /// β of the implicit reward.
    #[arg(long, default_value_t = 0.1)]
    beta: f64,
    /// Prompts that are decoded together.
    #[arg(long, default_value_t = 16)]
    batch: usize,
}

#[derive(Debug, Args)]
struct DoctorArguments {
    /// The model that was trained on preferences.
    policy: PathBuf,
    /// The model that it was trained from; without it the bare base.
    reference: Option<PathBuf>,
    #[command(flatten)]
    models: Models,
    /// A file with a text a line to compare the models on; by default a few sentences.
    #[arg(long)]
    texts: Option<PathBuf>,
    /// α, for the share of steps with one candidate.
    #[arg(long, default_value_t = 0.1)]
    alpha: f64,
    /// Prints all numbers as JSON.
    #[arg(long)]
    json: bool,
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Generate(arguments) => run_generate(&arguments),
        Command::Compare(arguments) => run_compare(&arguments),
        Command::Doctor(arguments) => run_doctor(&arguments),
    }
}

/// What one side of a pair is.
enum Part {
    Checkpoint(Box<Lm>),
    Adapter(Adapter),
    Base,
}

impl Part {
    fn view(&self) -> Option<lm::lora::AdapterView<'_>> {
        match self {
            Self::Adapter(adapter) => Some(adapter.view()),
            _ => None,
        }
    }
}

/// Everything that a pair borrows from.
struct Loaded {
    base: Option<Lm>,
    policy: Part,
    reference: Part,
}

impl Loaded {
    fn read(policy: &Path, reference: Option<&Path>, models: &Models) -> Result<Self> {
        lm::tensor::threads::set(models.threads.unwrap_or_else(lm::tensor::threads::available))?;
        let device = lm::tensor::device::parse(&models.device)?;
        let weights = if models.packed && !device.is_cuda() { Weights::Packed } else { Weights::Dense };
        let options = LoadOptions { weights, device, ..LoadOptions::default() };
        let load = |path: &Path| Lm::load(path, &options).with_context(|| format!("reading {}", path.display()));
        let base = models.base.as_deref().map(load).transpose()?;
        let part = |path: &Path| -> Result<Part> {
            if models.base.as_deref() == Some(path) {
                return Ok(Part::Base);
            }
            if !path.join("adapter_config.json").exists() {
                return Ok(Part::Checkpoint(Box::new(load(path)?)));
            }
            let Some(base) = &base else {
                bail!("{} is an adapter: say with --base which model it belongs to", path.display())
            };
            let adapter = Adapter::load(path, base.model.config(), base.model.kind(), device);
            Ok(Part::Adapter(adapter.with_context(|| format!("reading {}", path.display()))?))
        };
        let policy = part(policy)?;
        let reference = match reference {
            Some(path) => part(path)?,
            None if base.is_some() => Part::Base,
            None => bail!("give --reference, or --base for an adapter over its bare base"),
        };
        ensure!(
            !matches!((&policy, &reference), (Part::Base, Part::Base)),
            "policy and reference are both the base: there is nothing to decode by"
        );
        Ok(Self { base, policy, reference })
    }

    /// The checkpoint whose weights a side uses.
    fn lm<'a>(&'a self, part: &'a Part) -> Result<&'a Lm> {
        match part {
            Part::Checkpoint(lm) => Ok(lm),
            _ => self.base.as_ref().context("an adapter needs --base"),
        }
    }

    fn pair(&self, allow_padded_vocab: bool) -> Result<ModelPair<View<'_>, View<'_>>> {
        let (policy, reference) = (self.lm(&self.policy)?, self.lm(&self.reference)?);
        let view = Part::view;
        // A bare policy over an adapted reference has no shared trunk here; nobody trains that way round.
        if let (Some(adapter), true) = (view(&self.policy), std::ptr::eq(policy, reference)) {
            return Ok(ModelPair::lora(&policy.model, adapter, view(&self.reference))?);
        }
        let tokens = shared_tokens(&policy.tokenizer, &reference.tokenizer, allow_padded_vocab)?;
        if !allow_padded_vocab {
            ModelPair::models(&policy.model, &reference.model)?;
        }
        let sides = [(policy, &self.policy), (reference, &self.reference)];
        let [ours, theirs] = sides.map(|(lm, part)| View { model: &lm.model, adapter: view(part) });
        Ok(ModelPair::padded(ours, theirs, tokens)?.on(policy.model.device()))
    }

    fn weights(&self) -> Result<Vec<WeightDelta>> {
        Ok(match (&self.policy, &self.reference) {
            (Part::Adapter(adapter), Part::Base) => doctor::adapter_deltas(&self.lm(&self.policy)?.model, adapter)?,
            (Part::Checkpoint(policy), Part::Checkpoint(reference)) => {
                doctor::weight_deltas(&policy.model, &reference.model)?
            }
            (Part::Checkpoint(policy), Part::Base) => {
                doctor::weight_deltas(&policy.model, &self.lm(&self.reference)?.model)?
            }
            // The difference of two adapters isn't of low rank in either; their effect shows in the advantages.
            _ => Vec::new(),
        })
    }
}

impl Decoding {
    fn load(&self) -> Result<Loaded> {
        Loaded::read(&self.policy, self.reference.as_deref(), &self.models)
    }

    fn config(&self, lm: &Lm) -> AadConfig {
        AadConfig {
            alpha: self.alpha,
            max_new_tokens: self.max_new_tokens,
            stop: if lm.stop.is_empty() { Vec::new() } else { vec![StopRule::Tokens(lm.stop.clone())] },
            no_repeat_ngram: self.no_repeat_ngram,
            seed: self.seed,
            ..AadConfig::default()
        }
    }

    fn encode(&self, lm: &Lm, prompt: &str) -> Result<Vec<u32>> {
        Ok(if self.chat { lm.encode_chat(&[Message::new("user", prompt)])? } else { lm.encode(prompt)? })
    }
}

fn run_generate(arguments: &GenerateArguments) -> Result<()> {
    let loaded = arguments.decoding.load()?;
    let pair = loaded.pair(arguments.decoding.models.allow_padded_vocab)?;
    let lm = loaded.lm(&loaded.policy)?;
    let rule: Rule = match &arguments.rule {
        None => Rule::Aad,
        Some(json) => serde_json::from_str(json).with_context(|| format!("`{json}` isn't a rule"))?,
    };
    let traced = arguments.trace || arguments.trace_json.is_some();
    let mut config = AadConfig { rule, trace: traced, ..arguments.decoding.config(lm) };
    if arguments.eager {
        config.reference = ReferenceMode::Eager;
    }
    let prompt = arguments.decoding.encode(lm, &arguments.prompt)?;
    let generations = generate(&pair, &[prompt], &config)?;
    let generation = generations.first().context("no text came")?;
    if let Some(warning) = generation.warning {
        eprintln!("Warning: {warning}");
    }
    if let Some(path) = &arguments.trace_json {
        let file = std::fs::File::create(path).with_context(|| format!("writing {}", path.display()))?;
        serde_json::to_writer_pretty(file, &trace::named(generation, &lm.tokenizer)?)?;
    }
    if arguments.trace {
        let colour = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        print!("{}", trace::render(generation, &lm.tokenizer, colour)?);
    } else {
        println!("{}", lm.decode(&generation.tokens)?);
    }
    let number = |x: Option<f64>| x.map_or_else(|| "unknown".to_owned(), |x| format!("{x:.2}"));
    println!(
        "{} tokens, Σ A = {} nats; log-probability {} under the policy, {} under the reference",
        generation.tokens.len(),
        number(generation.sum_advantage),
        number(generation.logp_policy),
        number(generation.logp_ref)
    );
    let stats = generation.stats;
    println!(
        "{} of {} steps departed from the policy's own choice, {} had one candidate; {} passes of the reference",
        stats.departures, stats.steps, stats.single, stats.reference_passes
    );
    Ok(())
}

/// One line of the comparison.
struct Line {
    name: String,
    reward: Vec<f64>,
    nll: Vec<f64>,
    repetition: Vec<f64>,
    length: f64,
    stats: Stats,
}

impl Line {
    fn new(name: &str, generations: &[Generation], beta: f64) -> Self {
        let repetition = generations.iter().map(|g| repetition(&g.tokens, 3)).collect();
        Self {
            name: name.to_owned(),
            reward: generations.iter().filter_map(|g| g.sum_advantage).map(|a| beta * a).collect(),
            nll: generations.iter().filter_map(Generation::ref_nll).collect(),
            repetition,
            length: generations.iter().map(|g| g.tokens.len() as f64).sum::<f64>() / generations.len() as f64,
            stats: Stats::sum(generations.iter().map(|g| &g.stats)),
        }
    }
}

/// Mean with its 95 % bootstrap interval.
fn mean(values: &[f64]) -> String {
    let average = values.iter().sum::<f64>() / values.len().max(1) as f64;
    let interval = bootstrap_interval(values, |v| v.iter().sum::<f64>() / v.len() as f64, &Bootstrap::default());
    match interval {
        Ok(i) => format!("{:.3} [{:.3}, {:.3}]", i.estimate, i.low, i.high),
        // Too few values, or all the same.
        Err(_) => format!("{average:.3}"),
    }
}

fn run_compare(arguments: &CompareArguments) -> Result<()> {
    let loaded = arguments.decoding.load()?;
    let pair = loaded.pair(arguments.decoding.models.allow_padded_vocab)?;
    let lm = loaded.lm(&loaded.policy)?;
    ensure!(arguments.batch > 0, "--batch must be at least 1");
    ensure!(arguments.beta.is_finite() && arguments.beta > 0.0, "--beta must be above 0");
    let prompts = lines(&arguments.prompts)?;
    let prompts = prompts.iter().map(|p| arguments.decoding.encode(lm, p)).collect::<Result<Vec<_>>>()?;
    let config = arguments.decoding.config(lm);
    let alpha = arguments.decoding.alpha;
    let eft = |gamma| Rule::Eft { gamma, temperature: 0.0 };
    let mut rules = vec![
        ("greedy, reference".to_owned(), Rule::GreedyRef, alpha),
        ("greedy, policy".to_owned(), Rule::GreedyDpo, alpha),
    ];
    let mut alphas = vec![0.01, 0.1, 0.3, alpha];
    alphas.sort_by(f64::total_cmp);
    alphas.dedup();
    rules.extend(alphas.into_iter().map(|a| (format!("AAD α={a}"), Rule::Aad, a)));
    rules.extend([1.5, 2.0, 4.0].map(|gamma| (format!("EFT γ={gamma}"), eft(gamma), alpha)));
    rules.push(("filter only, uniform".to_owned(), Rule::FilterOnly { greedy: false }, alpha));
    let sample = Rule::Sample { from: Side::Policy, temperature: 1.0, top_p: None, min_p: None };
    rules.push(("sample, policy".to_owned(), sample, alpha));
    let mut table = Vec::new();
    for (name, rule, alpha) in &rules {
        let config = config.with_rule(*rule).with_alpha(*alpha);
        let mut generations = Vec::new();
        for part in prompts.chunks(arguments.batch) {
            generations.extend(generate(&pair, part, &config)?);
        }
        if let Some(warning) = generations.first().and_then(|g| g.warning).filter(|_| table.is_empty()) {
            eprintln!("Warning: {warning}");
        }
        table.push(Line::new(name, &generations, arguments.beta));
    }
    let mut best = Vec::new();
    for part in prompts.chunks(arguments.batch) {
        best.extend(best_of(&pair, part, 2, &config.with_rule(DRAW), by_implicit_reward)?);
    }
    let best: Vec<Generation> = best.into_iter().map(|b| b.generation).collect();
    table.push(Line::new("best of 2, implicit reward", &best, arguments.beta));
    print_table(&table, prompts.len(), arguments.beta);
    Ok(())
}

fn print_table(table: &[Line], prompts: usize, beta: f64) {
    println!("{prompts} prompts; means with 95 % bootstrap intervals; β = {beta}\n");
    println!(
        "| {:<26} | {:<24} | {:<24} | {:<24} | {:<6} | {:<7} | {:<9} |",
        "rule", "implicit reward", "NLL/token, reference", "repeated 3-grams", "tokens", "|V|=1", "mean |V|"
    );
    println!(
        "|{}|",
        ["-".repeat(28), "-".repeat(26), "-".repeat(26), "-".repeat(26), "-".repeat(8), "-".repeat(9), "-".repeat(11)]
            .join("|")
    );
    for line in table {
        println!(
            "| {:<26} | {:<24} | {:<24} | {:<24} | {:<6.1} | {:<7.2} | {:<9.1} |",
            line.name,
            mean(&line.reward),
            mean(&line.nll),
            mean(&line.repetition),
            line.length,
            line.stats.single_share().unwrap_or(0.0),
            line.stats.mean_candidates().unwrap_or(0.0)
        );
    }
    println!(
        "\nThe implicit reward is what alignment-aware decoding climbs, so it is no judge of it: read it beside the negative \
         log-likelihood, and use a reward of your own before you believe a ranking."
    );
}

fn run_doctor(arguments: &DoctorArguments) -> Result<()> {
    let loaded = Loaded::read(&arguments.policy, arguments.reference.as_deref(), &arguments.models)?;
    let pair = loaded.pair(arguments.models.allow_padded_vocab)?;
    let lm = loaded.lm(&loaded.policy)?;
    let texts = match &arguments.texts {
        Some(path) => lines(path)?,
        None => SENTENCES.map(str::to_owned).to_vec(),
    };
    let texts = texts.iter().map(|text| lm.encode(text)).collect::<lm::Result<Vec<_>>>()?;
    let texts: Vec<Vec<u32>> = texts.into_iter().filter(|t| t.len() > 1).collect();
    let e = doctor::examine(&pair, &texts, arguments.alpha)?;
    let mut weights = loaded.weights()?;
    weights.sort_by(|a, b| b.relative.total_cmp(&a.relative));
    let findings = doctor::findings(&e, &weights);
    if arguments.json {
        let all = serde_json::json!({ "texts": e, "weights": weights, "findings": findings });
        println!("{}", serde_json::to_string_pretty(&all)?);
        return Ok(());
    }
    println!("{} tokens shared, {} layers run once for both models", pair.tokens(), pair.shared_layers());
    println!(
        "On {} tokens: A has mean {:+.3} and mean size {:.3} nats (5 %, 50 %, 95 %: {:+.2}, {:+.2}, {:+.2})",
        e.tokens, e.mean_advantage, e.mean_abs_advantage, e.quantiles[0], e.quantiles[1], e.quantiles[2]
    );
    println!("NLL a token: policy {:.3}, reference {:.3}; KL {:.3} nats", e.policy_nll, e.reference_nll, e.divergence);
    println!(
        "Same favourite at {:.0} % of places; one candidate at {:.0} %, {:.1} candidates on average (α = {})",
        100.0 * e.agreement,
        100.0 * e.single_share,
        e.mean_candidates,
        arguments.alpha
    );
    for weight in weights.iter().take(5) {
        println!("{}: moved by {:.4}, {:.2} % of its norm", weight.name, weight.norm, 100.0 * weight.relative);
    }
    if findings.is_empty() {
        println!("These look like a policy and its reference.");
    }
    for finding in findings {
        println!("Finding: {finding}");
    }
    Ok(())
}

/// Ordinary text, for a first look at a pair.
const SENTENCES: [&str; 6] = [
    "The train to the coast leaves at nine and arrives shortly before noon.",
    "Water boils at a lower temperature on a high mountain, because the air is thinner there.",
    "She asked whether the library was open on Sundays, and the man at the desk shook his head.",
    "To make bread you need flour, water, salt and some patience.",
    "I liked the beginning of the film, but the second half was far too long.",
    "A function that calls itself must have a case in which it doesn't.",
];

fn lines(path: &Path) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let lines: Vec<String> = text.lines().filter(|l| !l.trim().is_empty()).map(str::to_owned).collect();
    ensure!(!lines.is_empty(), "{} has no lines", path.display());
    Ok(lines)
}
