//! Generation on tiny random models.

mod common;
#[path = "common/gguf.rs"]
mod gguf;

use common::{ids, model, tiny};
use lm::Error;
use lm::generate::{
    Decoding, GenerateConfig, LogitsProcessor, Plugs, StepInfo, StopReason, generate, generate_with, left_pad,
};
use lm::hooks::{Hooks, Site, TokenInfo};
use lm::lora::{Adapter, LoraConfig};
use lm::model::Pass;
use lm::tensor::tch::{Kind, Tensor, no_grad_guard};
use std::ops::ControlFlow;

fn greedy(n: usize) -> GenerateConfig {
    GenerateConfig { max_new_tokens: n, ..GenerateConfig::default() }
}

#[test]
fn greedy_decoding_is_the_argmax_of_full_passes() {
    let model = model(&tiny());
    let mut text = vec![3, 4];
    let generated = &generate(&model, &[text.clone()], &greedy(10)).unwrap()[0];
    for &id in &generated.tokens {
        let logits = model.logits(&ids(&text), &mut Pass::default()).unwrap();
        let best = logits.get(0).get(-1).argmax(0, false).int64_value(&[]);
        assert_eq!(i64::from(id), best);
        text.push(id);
    }
    assert_eq!(generated.stop, StopReason::Length);
}

#[test]
fn a_batch_generates_what_its_rows_do_alone_also_when_rows_end_early() {
    let model = model(&tiny());
    let prompts = [vec![3, 4, 5], vec![6], vec![7, 8]];
    // A token that the second row meets ends it there.
    let stop = generate(&model, &prompts[1..2], &greedy(8)).unwrap()[0].tokens[2];
    for temperature in [0.0, 1.0] {
        let config = GenerateConfig { stop: vec![stop], temperature, seed: 5, ..greedy(8) };
        let together = generate(&model, &prompts, &config).unwrap();
        if temperature == 0.0 {
            assert_eq!(together[1].stop, StopReason::StopToken);
            assert_eq!(together[1].tokens.last(), Some(&stop));
            for (row, prompt) in prompts.iter().enumerate() {
                assert_eq!(
                    generate(&model, std::slice::from_ref(prompt), &config).unwrap()[0].tokens,
                    together[row].tokens
                );
            }
        }
        // The same call gives the same texts.
        assert_eq!(generate(&model, &prompts, &config).unwrap(), together);
    }
}

#[test]
fn seeds_decide_samples_and_filters_leave_one_token_at_the_limit() {
    let model = model(&tiny());
    let sample = |config: GenerateConfig| generate(&model, &[vec![3]], &config).unwrap()[0].tokens.clone();
    let hot = |seed| GenerateConfig { temperature: 2.0, seed, ..greedy(12) };
    assert_eq!(sample(hot(1)), sample(hot(1)));
    assert_ne!(sample(hot(1)), sample(hot(2)));
    let best = sample(greedy(12));
    assert_eq!(sample(GenerateConfig { top_k: Some(1), ..hot(1) }), best);
    assert_eq!(sample(GenerateConfig { top_p: Some(1e-9), ..hot(1) }), best);
    assert_eq!(sample(GenerateConfig { min_p: Some(1.0), ..hot(1) }), best);
    assert_eq!(sample(GenerateConfig { temperature: 1e-9, ..hot(1) }), best);
}

#[test]
fn no_ngram_comes_twice_where_that_is_asked() {
    let model = model(&tiny());
    let config = GenerateConfig { no_repeat_ngram: Some(2), ..greedy(40) };
    let text = &generate(&model, &[vec![3]], &config).unwrap()[0].tokens;
    let mut pairs: Vec<_> =
        std::iter::once(3).chain(text.iter().copied()).collect::<Vec<u32>>().windows(2).map(<[u32]>::to_vec).collect();
    let all = pairs.len();
    pairs.sort();
    pairs.dedup();
    assert_eq!(pairs.len(), all);
}

#[test]
fn a_text_ends_where_the_context_does() {
    let model = model(&tiny());
    let prompt: Vec<u32> = (0..60).map(|i| i % 40).collect();
    let text = &generate(&model, &[prompt], &greedy(100)).unwrap()[0];
    // The last token needs no position of its own.
    assert_eq!((text.tokens.len(), text.stop), (5, StopReason::Context));
    let full = vec![1; 64];
    assert_eq!(generate(&model, &[full], &greedy(9)).unwrap()[0].tokens.len(), 1);
    assert!(matches!(generate(&model, &[vec![1; 65]], &greedy(1)), Err(Error::ContextOverflow { len: 65, max: 64 })));
}

#[test]
fn the_caller_sees_each_token_and_may_end_a_row() {
    let model = model(&tiny());
    let mut seen = Vec::new();
    let texts = generate_with(&model, &[vec![3], vec![4]], &greedy(6), Plugs::default(), |token| {
        seen.push(token);
        if token.row == 0 && seen.iter().filter(|t| t.row == 0).count() == 2 {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    })
    .unwrap();
    assert_eq!((texts[0].tokens.len(), texts[0].stop), (2, StopReason::Caller));
    assert_eq!((texts[1].tokens.len(), texts[1].stop), (6, StopReason::Length));
    for (row, text) in texts.iter().enumerate() {
        let of_row: Vec<u32> = seen.iter().filter(|t| t.row == row).map(|t| t.id).collect();
        assert_eq!(of_row, text.tokens);
    }
}

#[test]
fn input_and_settings_that_cant_be_give_the_named_error() {
    let model = model(&tiny());
    let run = |prompts: &[Vec<u32>], config: GenerateConfig| generate(&model, prompts, &config).unwrap_err();
    assert!(matches!(run(&[], greedy(1)), Error::EmptyPrompt { row: 0 }));
    assert!(matches!(run(&[vec![1], vec![]], greedy(1)), Error::EmptyPrompt { row: 1 }));
    assert!(matches!(run(&[vec![1], vec![40]], greedy(1)), Error::TokenOutOfRange { id: 40, row: 1, vocab: 40 }));
    for (name, config) in [
        ("temperature", GenerateConfig { temperature: -1.0, ..greedy(1) }),
        ("temperature", GenerateConfig { temperature: f64::NAN, ..greedy(1) }),
        ("top_k", GenerateConfig { top_k: Some(0), ..greedy(1) }),
        ("top_p", GenerateConfig { top_p: Some(0.0), ..greedy(1) }),
        ("min_p", GenerateConfig { min_p: Some(1.5), ..greedy(1) }),
        ("repetition_penalty", GenerateConfig { repetition_penalty: 0.0, ..greedy(1) }),
        ("repetition_penalty", GenerateConfig { repetition_penalty: 9e-4, ..greedy(1) }),
        ("repetition_penalty", GenerateConfig { repetition_penalty: 1e300, ..greedy(1) }),
        ("no_repeat_ngram", GenerateConfig { no_repeat_ngram: Some(0), ..greedy(1) }),
    ] {
        assert!(run(&[vec![1]], config).to_string().starts_with(name));
    }
    assert!(generate(&model, &[vec![1]], &greedy(0)).unwrap()[0].tokens.is_empty());
}

#[test]
fn settings_go_through_json_and_unknown_ones_are_refused() {
    let config = GenerateConfig { temperature: 0.7, top_k: Some(5), stop: vec![2], ..GenerateConfig::default() };
    let json = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<GenerateConfig>(&json).unwrap(), config);
    assert!(serde_json::from_str::<GenerateConfig>(r#"{"top_q": 1}"#).is_err());
}

/// Makes logits what no model should.
#[derive(Debug)]
struct Breaks(f32);

impl LogitsProcessor for Breaks {
    fn process(&mut self, logits: &mut [f32], info: &StepInfo<'_>) -> lm::Result<()> {
        if info.step == 2 {
            logits.fill(self.0);
        }
        Ok(())
    }
}

#[test]
fn logits_from_which_nothing_can_be_drawn_name_step_and_row() {
    let model = model(&tiny());
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut breaks = Breaks(value);
        let plugs = Plugs { processors: vec![&mut breaks], ..Plugs::default() };
        let error = generate_with(&model, &[vec![3]], &greedy(5), plugs, |_| ControlFlow::Continue(())).unwrap_err();
        assert!(matches!(error, Error::NonFiniteLogits { step: 2, row: 0, .. }), "{error}");
    }
}

#[test]
fn a_generation_can_be_driven_by_hand() {
    let model = model(&tiny());
    let config = greedy(3);
    let mut decoding = Decoding::new(&model, &[vec![3, 4]], &config, Plugs::default()).unwrap();
    let mut tokens = Vec::new();
    while let Some(step) = decoding.step().unwrap() {
        tokens.push(step[0].id);
    }
    // The last token isn't read.
    assert_eq!(decoding.cache().len(), 4);
    assert_eq!(decoding.finish()[0].tokens, tokens);
}

#[test]
fn prompts_are_padded_on_the_left() {
    let (batch, real) = left_pad(&[vec![3, 4, 5], vec![6]], lm::tensor::tch::Device::Cpu).unwrap();
    assert_eq!(batch, Tensor::from_slice(&[3i64, 4, 5, 0, 0, 6]).view([2, 3]));
    assert_eq!(real.unwrap(), Tensor::from_slice(&[true, true, true, false, false, true]).view([2, 3]));
    assert!(left_pad(&[vec![1], vec![2]], lm::tensor::tch::Device::Cpu).unwrap().1.is_none());
}

/// Ends row 0 after its first token.
fn ends_first(token: lm::generate::Token) -> ControlFlow<()> {
    if token.row == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}

#[test]
fn an_adapters_mask_goes_with_its_rows_when_others_end() {
    let model = model(&tiny());
    let config = LoraConfig { rank: 2, ..LoraConfig::default() };
    let adapter = Adapter::new(model.config(), &config, Kind::Double, model.device()).unwrap();
    for (_, mut tensor) in adapter.parameters() {
        let _guard = no_grad_guard();
        let _ = tensor.fill_(0.3);
    }
    let prompts = [vec![3, 4, 5], vec![6], vec![7]];
    let alone = |row: usize, with: bool| {
        let plugs = Plugs { adapter: with.then(|| adapter.view()), ..Plugs::default() };
        generate_with(&model, &prompts[row..=row], &greedy(8), plugs, |_| ControlFlow::Continue(())).unwrap().remove(0)
    };
    let rows = Tensor::from_slice(&[true, false, true]);
    let adapter_view = Some(adapter.view().with_rows(&rows).unwrap());
    let plugs = Plugs { adapter: adapter_view, ..Plugs::default() };
    let texts = generate_with(&model, &prompts, &greedy(8), plugs, ends_first).unwrap();
    assert_eq!(texts[0].tokens, alone(0, true).tokens[..1]);
    assert_eq!(texts[1].tokens, alone(1, false).tokens);
    assert_eq!(texts[2].tokens, alone(2, true).tokens);
    assert_ne!(alone(2, true).tokens, alone(2, false).tokens);
    let refused = Decoding::new(&model, &prompts[1..], &greedy(1), Plugs { adapter: adapter_view, ..Plugs::default() });
    assert!(matches!(refused, Err(Error::Shape { .. })));
}

#[test]
fn a_hook_knows_its_rows_when_others_end() {
    let model = model(&tiny());
    let prompts = [vec![3, 4, 5], vec![6], vec![7, 8]];
    let direction = (Tensor::arange(16, (Kind::Double, model.device())) * 0.7).sin();
    let strengths = [0.0, 1.5, -1.5];
    // Row `r` of the call is prompt `first + r`.
    let run = |prompts: &[Vec<u32>], first: usize, on_token: fn(lm::generate::Token) -> ControlFlow<()>| {
        let mut hook = |_: Site, x: &Tensor, tokens: &TokenInfo<'_>| {
            let by_row: Vec<f64> = tokens.rows.iter().map(|&row| strengths[first + row]).collect();
            Ok(Some(x + Tensor::from_slice(&by_row).view([-1, 1, 1]) * &direction))
        };
        let mut hooks = Hooks::new().on(&[Site::ResidPost(0)], &mut hook);
        let plugs = Plugs { hooks: Some(&mut hooks), ..Plugs::default() };
        generate_with(&model, prompts, &greedy(8), plugs, on_token).unwrap()
    };
    let together = run(&prompts, 0, ends_first);
    assert_eq!(together[0].tokens.len(), 1);
    for row in 1..3 {
        let alone = run(&prompts[row..=row], row, |_| ControlFlow::Continue(()));
        assert_eq!(together[row].tokens, alone[0].tokens, "row {row}");
    }
}

/// Fails once, for row 1 at a step.
#[derive(Debug)]
struct FailsOnce(Option<usize>);

impl LogitsProcessor for FailsOnce {
    fn process(&mut self, _: &mut [f32], info: &StepInfo<'_>) -> lm::Result<()> {
        if info.row == 1 && self.0 == Some(info.step) {
            self.0 = None;
            return Err(Error::invalid("processor", "patient", "not"));
        }
        Ok(())
    }
}

#[test]
fn a_step_that_failed_can_be_tried_again_and_leaves_no_trace() {
    let model = model(&tiny());
    let prompts = [vec![3, 4, 5], vec![6]];
    let config = GenerateConfig { temperature: 1.0, seed: 3, ..greedy(6) };
    let expected = generate(&model, &prompts, &config).unwrap();
    for at in [0, 3] {
        let mut fails = FailsOnce(Some(at));
        let mut steps = Vec::new();
        let mut reader = |_: Site, _: &Tensor, tokens: &TokenInfo<'_>| {
            steps.push(tokens.step);
            Ok(None)
        };
        let mut hooks = Hooks::new().on(&[Site::ResidPost(0)], &mut reader);
        let plugs = Plugs { processors: vec![&mut fails], hooks: Some(&mut hooks), ..Plugs::default() };
        let mut decoding = Decoding::new(&model, &prompts, &config, plugs).unwrap();
        for _ in 0..at {
            let _ = decoding.step().unwrap().unwrap();
        }
        let before = (decoding.cache().len(), decoding.cache().steps());
        assert!(decoding.step().is_err());
        assert_eq!((decoding.cache().len(), decoding.cache().steps()), before);
        while decoding.step().unwrap().is_some() {}
        let texts = decoding.finish();
        for (text, expected) in texts.iter().zip(&expected) {
            assert_eq!(text.tokens, expected.tokens, "failed at step {at}");
        }
        let mut wanted: Vec<usize> = (0..6).collect();
        wanted.insert(at, at);
        assert_eq!(steps, wanted);
    }
}

#[test]
fn a_row_of_a_batch_draws_what_it_draws_alone() {
    let model = model(&tiny());
    let prompts = [vec![3, 4, 5], vec![6], vec![7, 8]];
    let config = GenerateConfig { temperature: 1.0, seed: 5, ..greedy(12) };
    let together = generate(&model, &prompts, &config).unwrap();
    // Row 0 has the same random numbers, whatever stands below it; row 1 has others.
    assert_eq!(generate(&model, &prompts[..1], &config).unwrap()[0].tokens, together[0].tokens);
    let same = generate(&model, &[vec![6], vec![6]], &config).unwrap();
    assert_ne!(same[0].tokens, same[1].tokens);
    assert_eq!(same[1].tokens, together[1].tokens);
}

/// Allows one token a step.
#[derive(Debug)]
struct Says(Vec<u32>);

impl LogitsProcessor for Says {
    fn process(&mut self, logits: &mut [f32], info: &StepInfo<'_>) -> lm::Result<()> {
        logits.fill(f32::NEG_INFINITY);
        logits[self.0[info.step] as usize] = 0.0;
        Ok(())
    }
}

/// A random model with a byte-level tokenizer whose token 262 is `a` and the first byte of a character of two.
fn with_text() -> lm::Lm {
    let mut file = gguf::File::default();
    gguf::with_tokenizer(&mut file, "gpt-2");
    for (key, value) in &mut file.metadata {
        match (key.as_str(), value) {
            ("tokenizer.ggml.tokens", gguf::Value::Texts(tokens)) => {
                tokens.push(format!("a{}", gguf::character_of(0xC3)));
            }
            ("tokenizer.ggml.token_type", gguf::Value::Ints(types)) => types.push(1),
            _ => {}
        }
    }
    let tokenizer = lm::gguf::Gguf::from_bytes(file.bytes()).unwrap().tokenizer().unwrap();
    let model = model(&lm::config::ModelConfig { vocab: 263, ..tiny() });
    lm::Lm { model, tokenizer, template: None, stop: vec![256] }
}

#[test]
fn a_stream_that_was_ended_is_not_called_again() {
    let lm = with_text();
    let run = |end: bool| {
        let mut says = Says(vec![262, 0xA4, 262]);
        let plugs = Plugs { processors: vec![&mut says], ..Plugs::default() };
        let mut texts = Vec::new();
        let _ = lm
            .stream(&[97], &greedy(3), plugs, |text| {
                texts.push(text.to_owned());
                if end { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })
            .unwrap();
        texts
    };
    assert_eq!(run(false), ["a", "\u{e4}", "a", "\u{fffd}"]);
    assert_eq!(run(true), ["a"]);
}

#[test]
fn the_checkpoints_stop_tokens_can_be_left_aside() {
    let lm = with_text();
    let run = |config: GenerateConfig| {
        let mut says = Says(vec![97, 256, 98]);
        let plugs = Plugs { processors: vec![&mut says], ..Plugs::default() };
        let texts = lm.generate_tokens(&[vec![97]], &config, plugs, |_| ControlFlow::Continue(())).unwrap();
        (texts[0].tokens.len(), texts[0].stop)
    };
    assert_eq!(run(greedy(3)), (2, StopReason::StopToken));
    assert_eq!(run(GenerateConfig { ignore_checkpoint_stop: true, ..greedy(3) }), (3, StopReason::Length));
    assert_eq!(run(GenerateConfig { stop: vec![97], ..greedy(3) }), (1, StopReason::StopToken));
}
