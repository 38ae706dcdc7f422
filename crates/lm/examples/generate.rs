//! Continues a text, or answers a message, with any checkpoint that the crate reads; the text streams as it comes.
//!
//!     cargo xtask data fetch smollm2
//!     cargo run --release -p lm --example generate -- "Once upon a time"
//!     cargo run --release -p lm --example generate -- --chat "What is the capital of France?"
//!     cargo run --release -p lm --example generate -- --model PATH --temperature 0.8 --top-p 0.95 --seed 7 "The sea"

use anyhow::{Context as _, Result};
use clap::Parser;
use lm::generate::{GenerateConfig, Plugs, StopReason};
use lm::template::Message;
use lm::{Lm, LoadOptions, Weights};
use std::io::Write as _;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

#[derive(Debug, Parser)]
#[command(about = "Continues a text with a language model")]
struct Arguments {
    /// The text to continue, or the message to answer.
    prompt: String,
    /// A .gguf file, or a folder with config.json, tokenizer.json and safetensors; by default SmolLM2-135M-Instruct from the
    /// data cache.
    #[arg(long)]
    model: Option<PathBuf>,
    /// Takes the prompt as a user's message and puts it into the checkpoint's chat template.
    #[arg(long)]
    chat: bool,
    /// A system message, for --chat.
    #[arg(long, requires = "chat")]
    system: Option<String>,
    /// Most tokens.
    #[arg(long, short = 'n', default_value_t = 128)]
    max_new_tokens: usize,
    /// 0 takes the most probable token each time.
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Draws from the k most probable tokens.
    #[arg(long)]
    top_k: Option<usize>,
    /// Draws from the most probable tokens whose probabilities sum to p.
    #[arg(long)]
    top_p: Option<f64>,
    /// Draws from tokens at least p times as probable as the most probable one.
    #[arg(long)]
    min_p: Option<f64>,
    /// Above 1, tokens that were there before become less probable.
    #[arg(long, default_value_t = 1.0)]
    repetition_penalty: f64,
    /// No n tokens in a row come twice.
    #[arg(long)]
    no_repeat_ngram: Option<usize>,
    /// Seed of the draws.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Unpacks quantized weights to f32: more memory, faster prompts, slower tokens.
    #[arg(long)]
    dense: bool,
    /// Where tensors live: cpu, cuda:0, auto.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Threads; by default all cores.
    #[arg(long)]
    threads: Option<usize>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    lm::tensor::threads::set(arguments.threads.unwrap_or_else(lm::tensor::threads::available))?;
    let path = match arguments.model {
        Some(path) => path,
        None => datasets::smollm2::path().context("the default model isn't in the cache")?,
    };
    let device = lm::tensor::device::parse(&arguments.device)?;
    let weights = if arguments.dense || device.is_cuda() { Weights::Dense } else { Weights::Packed };
    let start = Instant::now();
    let lm = Lm::load(&path, &LoadOptions { weights, device, ..LoadOptions::default() })?;
    eprintln!(
        "{}: {} layers of width {}, weights {:.0} MB, loaded in {:.1} s",
        path.display(),
        lm.model.config().layers,
        lm.model.config().width,
        lm.model.bytes() as f64 / 1e6,
        start.elapsed().as_secs_f64()
    );

    let prompt = if arguments.chat {
        let system = arguments.system.map(|text| Message::new("system", &text));
        let messages: Vec<Message> = system.into_iter().chain([Message::new("user", &arguments.prompt)]).collect();
        lm.encode_chat(&messages)?
    } else {
        lm.encode(&arguments.prompt)?
    };
    let config = GenerateConfig {
        max_new_tokens: arguments.max_new_tokens,
        temperature: arguments.temperature,
        top_k: arguments.top_k,
        top_p: arguments.top_p,
        min_p: arguments.min_p,
        repetition_penalty: arguments.repetition_penalty,
        no_repeat_ngram: arguments.no_repeat_ngram,
        seed: arguments.seed,
        ..GenerateConfig::default()
    };

    let mut out = std::io::stdout();
    if !arguments.chat {
        write!(out, "{}", arguments.prompt)?;
        out.flush()?;
    }
    let (start, mut first) = (Instant::now(), None);
    let mut written = Ok(());
    let generation = lm.stream(&prompt, &config, Plugs::default(), |text| {
        first.get_or_insert_with(|| start.elapsed());
        written = write!(out, "{text}").and_then(|()| out.flush());
        // A closed pipe ends the text.
        if written.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    writeln!(out)?;
    let (seconds, tokens) = (start.elapsed().as_secs_f64(), generation.tokens.len());
    eprintln!(
        "{} prompt tokens, {tokens} new ones in {seconds:.1} s ({:.1} a second), first text after {:.2} s{}",
        prompt.len(),
        tokens as f64 / seconds,
        first.map_or(0.0, |d| d.as_secs_f64()),
        if generation.stop == StopReason::Length { "; cut at --max-new-tokens" } else { "" }
    );
    Ok(())
}
