//! The reference model as people use it: text, caches, packed weights, conversations.

mod common;

use common::difference;
use lm::generate::{GenerateConfig, left_pad};
use lm::hooks::{Hooks, Site, TokenInfo};
use lm::model::Pass;
use lm::template::Message;
use lm::tensor::tch::{Kind, Tensor, no_grad_guard};
use lm::{Lm, LoadOptions, Weights};
use std::sync::{Mutex, OnceLock};

const SENTENCE: &str = "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. It is named \
    after the engineer Gustave Eiffel, whose company designed and built the tower from 1887 to 1889.";

fn load(weights: Weights) -> Option<Lm> {
    let path = common::smollm2()?;
    Some(Lm::load(&path, &LoadOptions { weights, ..LoadOptions::default() }).unwrap())
}

/// Calls the test with the dense model, which is loaded once for all tests of this file.
fn with_dense(test: impl FnOnce(&Lm)) {
    // A model can be handed from thread to thread, not shared.
    static DENSE: OnceLock<Option<Mutex<Lm>>> = OnceLock::new();
    if let Some(lm) = DENSE.get_or_init(|| load(Weights::Dense).map(Mutex::new)) {
        test(&lm.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
    }
}

fn ids(text: &[u32]) -> Tensor {
    common::ids(text)
}

#[test]
fn the_greedy_text_is_the_specifications() {
    with_dense(|lm| {
        let config = GenerateConfig { max_new_tokens: 12, ..GenerateConfig::default() };
        let text = lm.generate(&["Once upon a time"], &config).unwrap();
        assert_eq!(text[0], ", the city of Nova Haven was a thriving metropolis, with");
    });
}

#[test]
fn packed_weights_give_the_same_text_and_nearly_the_same_logits_in_a_fifth_of_the_memory() {
    with_dense(|dense| {
        let Some(packed) = load(Weights::Packed) else { return };
        assert!(packed.model.bytes() * 5 < dense.model.bytes());
        let tokens = dense.encode(SENTENCE).unwrap();
        let logits = |lm: &Lm| lm.model.logits(&ids(&tokens), &mut Pass::default()).unwrap();
        assert!(difference(&logits(&packed), &logits(dense)) < 2e-3);
        let config = GenerateConfig { max_new_tokens: 12, ..GenerateConfig::default() };
        let text = packed.generate(&["Once upon a time"], &config).unwrap();
        assert_eq!(text[0], ", the city of Nova Haven was a thriving metropolis, with");
        assert_eq!(packed.model.fingerprint().unwrap(), dense.model.fingerprint().unwrap());
    });
}

#[test]
fn decoding_with_hooks_and_rows_of_a_batch_are_the_full_pass_of_each_text() {
    with_dense(|lm| {
        let _guard = no_grad_guard();
        let texts = ["The capital of France is", "Once upon a time"].map(|t| lm.encode(t).unwrap());
        let mut hook = |_: Site, x: &Tensor, tokens: &TokenInfo<'_>| {
            let moved = tokens.positions.gt(0).unsqueeze(-1).to_kind(x.kind());
            Ok(Some(x + moved * 0.5))
        };
        let mut hooks = Hooks::new().on(&[Site::ResidPost(15)], &mut hook);
        let (batch, real) = left_pad(&texts, lm.model.device()).unwrap();
        let mut cache = lm.model.new_cache();
        let mut pass =
            Pass { cache: Some(&mut cache), real: real.as_ref(), hooks: Some(&mut hooks), ..Pass::default() };
        let first = lm.model.last_logits(&batch, &mut pass).unwrap();
        let next = first.argmax(-1, true);
        let mut pass = Pass { cache: Some(&mut cache), hooks: Some(&mut hooks), ..Pass::default() };
        let second = lm.model.last_logits(&next, &mut pass).unwrap();
        for (row, text) in texts.iter().enumerate() {
            let mut text = text.clone();
            text.push(next.int64_value(&[row as i64, 0]) as u32);
            let full = lm.model.logits(&ids(&text), &mut Pass { hooks: Some(&mut hooks), ..Pass::default() }).unwrap();
            let n = text.len() as i64;
            assert!(difference(&first.get(row as i64), &full.get(0).get(n - 2)) < 1e-3);
            assert!(difference(&second.get(row as i64), &full.get(0).get(n - 1)) < 2e-3);
        }
    });
}

#[test]
fn position_0_is_an_attention_sink_which_is_why_pooling_starts_at_1() {
    with_dense(|lm| {
        let tokens = lm.encode(SENTENCE).unwrap();
        let mut norms = Vec::new();
        let mut reader = |_: Site, x: &Tensor, _: &TokenInfo<'_>| {
            norms =
                Vec::<f64>::try_from(x.get(0).norm_scalaropt_dim(2.0, [1i64].as_slice(), false).to_kind(Kind::Double))
                    .unwrap();
            Ok(None)
        };
        let site = Site::ResidPost(15);
        let mut hooks = Hooks::new().on(&[site], &mut reader).stop_after(site);
        let _ = lm.model.hidden(&ids(&tokens), &mut Pass { hooks: Some(&mut hooks), ..Pass::default() }).unwrap();
        assert!(norms[0] > 10_000.0, "{}", norms[0]);
        assert!(norms[1..].iter().all(|&n| n < 1_000.0));
    });
}

#[test]
fn a_conversation_is_answered_and_ends_at_the_templates_end() {
    with_dense(|lm| {
        let prompt = lm.encode_chat(&[Message::new("user", "What is the capital of France?")]).unwrap();
        let config = GenerateConfig { max_new_tokens: 32, ..GenerateConfig::default() };
        let mut streamed = String::new();
        let generation = lm
            .stream(&prompt, &config, lm::generate::Plugs::default(), |text| {
                streamed.push_str(text);
                std::ops::ControlFlow::Continue(())
            })
            .unwrap();
        assert!(streamed.contains("Paris"), "{streamed}");
        assert_eq!(streamed, lm.decode(&generation.tokens).unwrap());
        assert_eq!(generation.stop, lm::generate::StopReason::StopToken);
    });
}
