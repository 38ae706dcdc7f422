//! What must hold for any bytes: a value that keeps its promises, or an error; never a panic and never much memory. Used by the fuzz
//! targets and, on their corpus, by the tests.

use lm::config::ModelConfig;
use lm::gguf::Gguf;
use lm::template::{ChatTemplate, Message};
use lm::tokenizer::Tokenizer;
use serde_json::Value;

/// A GGUF file: configuration, tokenizer, template, and the tensors that are small. Whether all was right.
pub(crate) fn gguf(bytes: &[u8]) -> bool {
    let Ok(mut file) = Gguf::from_bytes(bytes.to_vec()) else {
        return false;
    };
    let config = file.config();
    if let Ok(config) = &config {
        config.validate().expect("a configuration that was read is valid");
        assert!(config.layers <= file.index().entries.len());
    }
    let tokenizer = file.tokenizer();
    if let Ok(tokenizer) = &tokenizer {
        use_tokenizer(tokenizer);
        if let Ok(Some(template)) = file.template(tokenizer) {
            use_template(&template);
        }
    }
    let small = |range: &std::ops::Range<u64>| range.end - range.start < 1 << 12;
    let entries: Vec<_> = file.index().entries.iter().filter(|e| small(&e.range)).take(8).cloned().collect();
    for entry in entries {
        if let Ok(numbers) = file.floats(&entry.name) {
            assert_eq!(numbers.len() as u64, entry.shape.iter().product::<u64>());
        }
    }
    config.is_ok() && tokenizer.is_ok()
}

/// A `config.json`. What was read is valid, and comes back from what is written.
pub(crate) fn config_json(bytes: &[u8]) -> bool {
    let Ok(json) = serde_json::from_slice::<Value>(bytes) else {
        return false;
    };
    let Ok(config) = ModelConfig::from_hugging_face(&json) else {
        return false;
    };
    config.validate().expect("a configuration that was read is valid");
    let again = ModelConfig::from_hugging_face(&config.to_hugging_face()).expect("what is written can be read");
    assert_eq!((again.width, again.layers, again.rope.is_some()), (config.width, config.layers, config.rope.is_some()));
    true
}

/// A `tokenizer.json`.
pub(crate) fn tokenizer_json(bytes: &[u8]) -> bool {
    match Tokenizer::from_json(bytes, &Value::Null) {
        Ok(tokenizer) => {
            use_tokenizer(&tokenizer);
            true
        }
        Err(_) => false,
    }
}

/// A chat template.
pub(crate) fn template(bytes: &[u8]) -> bool {
    let Ok(source) = std::str::from_utf8(bytes) else {
        return false;
    };
    match ChatTemplate::new(source, "<s>", "</s>") {
        Ok(template) => use_template(&template),
        Err(_) => false,
    }
}

fn use_tokenizer(tokenizer: &Tokenizer) {
    for text in ["", "Hello 12, wörld\n", "<|im_end|>  \u{1F642}"] {
        let Ok(ids) = tokenizer.encode(text, true) else { continue };
        assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab()));
        let mut stream = tokenizer.decode_stream(false);
        for &id in &ids {
            // A hostile tokenizer may give ids that it has no token for.
            let _ = stream.push(id);
        }
        let _ = stream.finish();
        let _ = tokenizer.decode(&ids, true);
    }
    assert_eq!(tokenizer.first_difference(tokenizer), None);
}

fn use_template(template: &ChatTemplate) -> bool {
    let talk =
        [Message::new("system", "s"), Message::user("Hi"), Message::new("assistant", "Yes."), Message::user("?")];
    let all = template.render(&talk, true).is_ok();
    template.render(&talk[1..2], false).is_ok() && all
}
