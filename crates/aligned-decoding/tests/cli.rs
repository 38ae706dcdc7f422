//! The command on tiny models that are written here.

mod common;

use common::{adapter, model, tiny};
use lm::config::ModelConfig;
use lm::lora::Layers;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A folder with two models of 24 words, an adapter of the first, and a tokenizer.
struct Fixture {
    folder: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = ModelConfig { eos: vec![0], ..tiny() };
        let vocab: serde_json::Map<String, serde_json::Value> =
            (0..24).map(|id| (format!("w{id}"), id.into())).collect();
        let tokenizer = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": { "type": "Whitespace" }, "post_processor": null, "decoder": null,
            "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "w0" }
        });
        for (name, seed) in [("policy", 1), ("reference", 2)] {
            let at = folder.path().join(name);
            model(&config, seed).save_hugging_face(&at).unwrap();
            std::fs::write(at.join("tokenizer.json"), tokenizer.to_string()).unwrap();
        }
        adapter(&config, Layers::Top(1), 3).save(&folder.path().join("adapter")).unwrap();
        std::fs::write(folder.path().join("prompts.txt"), "w1 w2\n\nw3 w4 w5\nw6\n").unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_aad"));
        command.current_dir(self.folder.path()).args(arguments).env("NO_COLOR", "1");
        command.output().unwrap()
    }
}

fn text(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn json(path: &Path) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn the_command_generates_compares_and_examines() {
    let fixture = Fixture::new();
    let pair = ["--policy", "policy", "--reference", "reference", "--threads", "1"];
    let generated = fixture.run(
        &[&["generate"], &pair[..], &["--prompt", "w1 w2", "-n", "6", "--trace", "--trace-json", "trace.json"]]
            .concat(),
    );
    let out = text(&generated);
    assert!(out.contains("Σ A = ") && out.contains("passes of the reference"), "{out}");
    let trace = json(&fixture.path("trace.json"));
    let steps = trace.as_array().unwrap();
    assert!(!steps.is_empty() && steps[0]["candidates"][0]["advantage"].is_number(), "{trace}");
    let rule = r#"{"eft": {"gamma": 2.0}}"#;
    text(&fixture.run(&[&["generate"], &pair[..], &["--prompt", "w1", "-n", "3", "--rule", rule, "--eager"]].concat()));

    let compared = fixture.run(&[&["compare"], &pair[..], &["--prompts", "prompts.txt", "-n", "4"]].concat());
    let out = text(&compared);
    for rule in ["greedy, policy", "AAD α=0.1", "EFT γ=2", "best of 2"] {
        assert!(out.contains(rule), "{out}");
    }
    assert!(out.contains("3 prompts"), "{out}");

    let with_base = ["--policy", "adapter", "--base", "reference", "--threads", "1"];
    text(&fixture.run(&[&["generate"], &with_base[..], &["--prompt", "w1 w2", "-n", "4"]].concat()));
    let texts = ["--texts", "prompts.txt", "--json", "--threads", "1"];
    let examined = fixture.run(&[&["doctor", "adapter", "--base", "reference"], &texts[..]].concat());
    let report: serde_json::Value = serde_json::from_str(&text(&examined)).unwrap();
    assert_eq!(report["weights"].as_array().unwrap().len(), 7);
    assert_eq!(report["texts"]["tokens"], 3);
    let examined = fixture.run(&["doctor", "policy", "reference", "--texts", "prompts.txt", "--threads", "1"]);
    assert!(text(&examined).contains("24 tokens shared"));
}

#[test]
fn mistakes_are_answered_in_a_sentence() {
    let fixture = Fixture::new();
    let cases = [
        (vec!["generate", "--policy", "policy", "--prompt", "w1"], "--reference"),
        (vec!["generate", "--policy", "adapter", "--reference", "reference", "--prompt", "w1"], "--base"),
        (
            vec!["generate", "--policy", "policy", "--reference", "reference", "--prompt", "w1", "--alpha", "7"],
            "alpha must be from 0 to 1",
        ),
        (
            vec!["generate", "--policy", "policy", "--reference", "reference", "--prompt", "w1", "--rule", "\"best\""],
            "isn't a rule",
        ),
        (vec!["generate", "--policy", "none", "--reference", "reference", "--prompt", "w1"], "none"),
    ];
    for (arguments, expected) in cases {
        let output = fixture.run(&arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains(expected), "{arguments:?}: {error}");
        assert!(!error.contains("panicked"), "{error}");
    }
}
