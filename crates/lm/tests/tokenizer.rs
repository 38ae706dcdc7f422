//! Tokenizers: encoding, streaming, malformed metadata.

#[path = "common/gguf.rs"]
mod gguf;

use gguf::{File, Value, with_tokenizer};
use lm::Error;
use lm::gguf::Gguf;
use lm::tokenizer::Tokenizer;
use proptest::prelude::*;

fn file(pre: &str) -> File {
    let mut file = File::default();
    with_tokenizer(&mut file, pre);
    file
}

fn read(file: &File) -> lm::Result<Tokenizer> {
    Gguf::from_bytes(file.bytes())?.tokenizer()
}

fn tokenizer() -> Tokenizer {
    read(&file("gpt-2")).unwrap()
}

const END: u32 = 256;
const HELLO: u32 = 260;
const SPACE_HELLO: u32 = 261;

#[test]
fn merges_are_applied_in_their_order_and_specials_are_whole() {
    let tokenizer = tokenizer();
    assert_eq!(tokenizer.encode("hello hello", false).unwrap(), [HELLO, SPACE_HELLO]);
    assert_eq!(tokenizer.encode("help", false).unwrap(), [258, u32::from(b'p')]);
    assert_eq!(tokenizer.encode("a<|end|>\n", false).unwrap(), [97, END, 10]);
    assert_eq!(tokenizer.encode("", true).unwrap(), [0; 0]);
    assert_eq!(tokenizer.decode(&[HELLO, END, SPACE_HELLO], false).unwrap(), "hello<|end|> hello");
    assert_eq!(tokenizer.decode(&[HELLO, END, SPACE_HELLO], true).unwrap(), "hello hello");
    assert!(tokenizer.is_special(END) && !tokenizer.is_special(HELLO));
    assert_eq!((tokenizer.vocab(), tokenizer.eos(), tokenizer.bos()), (262, Some(END), None));
}

#[test]
fn pre_tokenizers_cut_as_they_should() {
    // The merge of 1 and 2, 2 and 3 shows where digits are kept together.
    let with_digits = |pre: &str| {
        let mut file = file(pre);
        for (key, value) in &mut file.metadata {
            match (key.as_str(), value) {
                ("tokenizer.ggml.tokens", Value::Texts(tokens)) => {
                    tokens.extend(["12", "1234", "34", "\u{120}\u{120}"].map(str::to_owned));
                }
                ("tokenizer.ggml.token_type", Value::Ints(types)) => types.extend([1; 4]),
                ("tokenizer.ggml.merges", Value::Texts(merges)) => {
                    merges.extend(["1 2", "3 4", "12 34", "\u{120} \u{120}"].map(str::to_owned));
                }
                _ => {}
            }
        }
        read(&file).unwrap()
    };
    let bytes = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    let encode = |pre: &str, text: &str| with_digits(pre).encode(text, false).unwrap();
    assert_eq!(encode("gpt-2", "1234"), [263]);
    assert_eq!(encode("smollm", "1234"), bytes("1234"));
    assert_eq!(encode("qwen2", "1234"), bytes("1234"));
    // Llama 3 cuts after three digits.
    assert_eq!(encode("llama-bpe", "1234"), [262, 51, 52]);
    // All leave the last space to the word.
    for pre in ["gpt-2", "smollm", "llama-bpe", "qwen2"] {
        assert_eq!(encode(pre, "   hello"), [265, SPACE_HELLO], "{pre}");
    }
    // Normal form C: e and a combining accent become one character of two bytes.
    assert_eq!(encode("qwen2", "e\u{301}"), [0xC3, 0xA9]);
    assert_eq!(encode("gpt-2", "e\u{301}"), [0x65, 0xCC, 0x81]);
}

#[test]
fn marks_are_added_where_the_file_wants_them() {
    let mut wanted = file("gpt-2");
    wanted.set("tokenizer.ggml.bos_token_id", 0).set("tokenizer.ggml.add_bos_token", true);
    wanted.set("tokenizer.ggml.add_eos_token", true);
    let tokenizer = read(&wanted).unwrap();
    assert_eq!(tokenizer.encode("hello", true).unwrap(), [0, HELLO, END]);
    assert_eq!(tokenizer.encode("hello", false).unwrap(), [HELLO]);
    wanted.unset("tokenizer.ggml.bos_token_id");
    assert!(read(&wanted).unwrap_err().to_string().contains("bos_token_id"));
}

#[test]
fn bytes_that_are_not_utf8_are_refused_with_their_place() {
    let error = tokenizer().encode_bytes(b"caf\xC3\xA9 \xFF", false).unwrap_err();
    assert!(matches!(error, Error::Utf8 { at: 6, .. }), "{error}");
    assert_eq!(tokenizer().encode_bytes(b"hello", false).unwrap(), [HELLO]);
    assert!(matches!(tokenizer().encode_bytes(b"\xC3", false), Err(Error::Utf8 { at: 0, .. })));
}

#[test]
fn a_character_that_is_several_tokens_comes_whole() {
    let tokenizer = tokenizer();
    let ids = tokenizer.encode("é🙂!", false).unwrap();
    assert_eq!(ids.len(), 7);
    let mut stream = tokenizer.decode_stream(false);
    let pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    assert_eq!(pieces, ["", "é", "", "", "", "🙂", "!"]);
    assert_eq!(stream.finish().unwrap(), "");
    // Cut off in the middle: the rest is shown as such, at the end only.
    let mut stream = tokenizer.decode_stream(false);
    assert_eq!(stream.push(0xF0).unwrap() + &stream.push(0x9F).unwrap(), "");
    assert!(stream.push(9999).is_err());
    assert_eq!(stream.finish().unwrap(), "\u{FFFD}");
}

#[test]
fn an_id_beyond_the_vocabulary_is_an_error() {
    assert!(tokenizer().decode(&[HELLO, 262], false).unwrap_err().to_string().contains("no token 262"));
}

#[test]
fn a_table_of_embeddings_may_be_padded_but_not_short() {
    let tokenizer = tokenizer();
    assert!(tokenizer.check_model(262).is_ok() && tokenizer.check_model(320).is_ok());
    let error = tokenizer.check_model(261).unwrap_err();
    assert!(matches!(error, Error::VocabMismatch { expected: 262, got: 261, .. }), "{error}");
    assert!(tokenizer.check_model(-1).is_err());
}

#[test]
fn the_first_difference_of_two_tokenizers_is_found() {
    let here = tokenizer();
    let changed = |key: &str, change: &dyn Fn(&mut Value)| {
        let mut other = file("gpt-2");
        other.metadata.iter_mut().filter(|(k, _)| k == key).for_each(|(_, value)| change(value));
        read(&other).unwrap()
    };
    assert_eq!(here.first_difference(&tokenizer()), None);
    let longer = changed("tokenizer.ggml.tokens", &|v| {
        if let Value::Texts(tokens) = v {
            tokens[255] = "\u{143}x".to_owned();
        }
    });
    let difference = here.first_difference(&longer).unwrap();
    assert_eq!((difference.id, difference.there.as_deref()), (255, Some("\u{143}x")));
    let special = changed("tokenizer.ggml.token_type", &|v| {
        if let Value::Ints(types) = v {
            types[256] = 1;
        }
    });
    assert_eq!(here.first_difference(&special).unwrap().id, END);
    let merges = changed("tokenizer.ggml.merges", &|v| {
        if let Value::Texts(merges) = v {
            merges.swap(2, 3);
        }
    });
    // The third merge here makes `lo`.
    assert_eq!(here.first_difference(&merges).unwrap().id, 259);
}

#[test]
fn malformed_metadata_is_named() {
    let texts = |list: &[&str]| Value::Texts(list.iter().map(|&t| t.to_owned()).collect());
    for (key, value, part) in [
        ("tokenizer.ggml.model", Some(Value::from("llama")), "tokenizer.json"),
        ("tokenizer.ggml.model", None, "tokenizer.ggml.model"),
        ("tokenizer.ggml.pre", Some(Value::from("tekken")), "`tekken`"),
        ("tokenizer.ggml.pre", None, "names none"),
        ("tokenizer.ggml.tokens", None, "missing"),
        ("tokenizer.ggml.tokens", Some(texts(&[])), "tokens"),
        ("tokenizer.ggml.tokens", Some(texts(&["a", "b", "a"])), "tokens[2]"),
        ("tokenizer.ggml.tokens", Some(Value::Ints(vec![1])), "list of strings"),
        ("tokenizer.ggml.token_type", Some(Value::Ints(vec![1, 2])), "one type for each of the 262"),
        ("tokenizer.ggml.token_type", Some(Value::Ints(vec![-1; 262])), "from 0"),
        ("tokenizer.ggml.merges", None, "missing"),
        ("tokenizer.ggml.merges", Some(texts(&["h e", "hel"])), "merges[1]"),
        ("tokenizer.ggml.merges", Some(texts(&["h "])), "merges[0]"),
        ("tokenizer.ggml.merges", Some(texts(&[" "])), "merges[0]"),
        ("tokenizer.ggml.merges", Some(texts(&[""])), "merges[0]"),
        ("tokenizer.ggml.merges", Some(texts(&["h e", "x y"])), "merges[1]"),
        ("tokenizer.ggml.merges", Some(texts(&["é 東"])), "merges[0]"),
        ("tokenizer.ggml.eos_token_id", Some(262.into()), "eos_token_id"),
        ("tokenizer.ggml.bos_token_id", Some(Value::I32(-1)), "bos_token_id"),
        ("tokenizer.ggml.add_bos_token", Some(1.into()), "true or false"),
    ] {
        let mut file = file("gpt-2");
        file.unset(key);
        if let Some(value) = value.clone() {
            file.metadata.push((key.to_owned(), value));
        }
        let message = read(&file).unwrap_err().to_string();
        assert!(message.contains(part), "{key} {value:?}: {message}");
    }
}

#[test]
fn a_byte_without_a_token_is_an_error_and_not_dropped() {
    let mut file = file("gpt-2");
    for (key, value) in &mut file.metadata {
        if let ("tokenizer.ggml.tokens", Value::Texts(tokens)) = (key.as_str(), value) {
            tokens[usize::from(b'q')] = "unused".to_owned();
        }
    }
    let tokenizer = read(&file).unwrap();
    let message = tokenizer.encode("iq", false).unwrap_err().to_string();
    assert!(message.contains("0x71 (at 1)"), "{message}");
    assert!(tokenizer.encode("hello", false).is_ok());
}

/// A SentencePiece-like tokenizer: spaces are `▁`, bytes that aren't tokens are `<0x..>`.
fn pieces() -> Tokenizer {
    let mut vocab: Vec<(String, u32)> = (0..256).map(|byte| (format!("<0x{byte:02X}>"), byte)).collect();
    let words = ["▁", "h", "e", "l", "o", "▁h", "▁he", "ll"];
    vocab.extend(words.into_iter().zip(256..).map(|(word, id)| (word.to_owned(), id)));
    let vocab: serde_json::Map<String, serde_json::Value> = vocab.into_iter().map(|(t, id)| (t, id.into())).collect();
    let json = serde_json::json!({
        "version": "1.0",
        "truncation": { "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0 },
        "padding": null,
        "added_tokens": [{ "id": 264, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true }],
        "normalizer": { "type": "Sequence", "normalizers": [
            { "type": "Prepend", "prepend": "▁" },
            { "type": "Replace", "pattern": { "String": " " }, "content": "▁" },
        ] },
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "▁" }, "content": " " },
            { "type": "ByteFallback" },
            { "type": "Fuse" },
            { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
        ] },
        "model": { "type": "BPE", "vocab": vocab, "merges": ["▁ h", "▁h e", "l l"], "byte_fallback": true,
            "unk_token": null, "fuse_unk": false },
    });
    let config = serde_json::json!({ "eos_token": { "content": "</s>" }, "bos_token": null });
    Tokenizer::from_json(json.to_string().as_bytes(), &config).unwrap()
}

#[test]
fn a_tokenizer_json_is_read_and_cuts_no_text() {
    let tokenizer = pieces();
    // ▁he, ll, o, ▁he: four tokens, though the file asks for two at most.
    assert_eq!(tokenizer.encode("hello he", false).unwrap(), [262, 263, 260, 262]);
    assert_eq!((tokenizer.eos(), tokenizer.bos(), tokenizer.vocab()), (Some(264), None, 265));
    assert_eq!(tokenizer.decode(&[262, 263, 260, 262, 264], true).unwrap(), "hello he");
}

#[test]
fn a_malformed_tokenizer_json_is_an_error() {
    let none = serde_json::Value::Null;
    for json in [
        "",
        "{}",
        "[]",
        r#"{"model":{"type":"BPE","vocab":{"a":0},"merges":["a b"]}}"#,
        // The library cuts the second half of a merge by the length of the prefix.
        r#"{"version":"1.0","added_tokens":[],"normalizer":null,"pre_tokenizer":null,"post_processor":null,"decoder":null,
            "model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"],"continuing_subword_prefix":"xxxx"}}"#,
        r#"{"version":"1.0","added_tokens":[],"normalizer":null,"pre_tokenizer":null,"post_processor":null,"decoder":null,
            "model":{"type":"WordLevel","vocab":{"a":4294967295},"unk_token":"a"}}"#,
    ] {
        assert!(matches!(Tokenizer::from_json(json.as_bytes(), &none), Err(Error::Tokenizer { .. })), "{json}");
    }
    // A mark that is put before texts, with a number that no token has: found by the fuzzer.
    let json = r#"{"version":"1.0","added_tokens":[],"normalizer":null,"pre_tokenizer":null,"decoder":null,
        "post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"s","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[],
            "special_tokens":{"s":{"id":"s","ids":[8],"tokens":["s"]}}},
        "model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}"#;
    let tokenizer = Tokenizer::from_json(json.as_bytes(), &none).unwrap();
    assert!(tokenizer.encode("a", true).unwrap_err().to_string().contains("no token 8"));
    assert_eq!(tokenizer.encode("a", false).unwrap(), [0]);
    let folder = tempfile::tempdir().unwrap();
    assert!(matches!(Tokenizer::from_hugging_face(folder.path()), Err(Error::Io { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn texts_come_back_and_streams_agree(text in "[hel o🙂é東\n\u{301}x1-9]{0,24}") {
        for tokenizer in [tokenizer(), pieces()] {
            let ids = tokenizer.encode(&text, false).unwrap();
            let decoded = tokenizer.decode(&ids, false).unwrap();
            // SentencePiece's decoder drops one leading space, which its encoder adds.
            prop_assert_eq!(&decoded, &text);
            let mut stream = tokenizer.decode_stream(false);
            let mut streamed = String::new();
            for id in ids {
                streamed.push_str(&stream.push(id).unwrap());
            }
            streamed.push_str(&stream.finish().unwrap());
            prop_assert_eq!(streamed, decoded);
        }
    }

    #[test]
    fn any_tokens_stream_to_what_they_decode_to(ids in prop::collection::vec(0u32..262, 0..24), skip: bool) {
        let tokenizer = tokenizer();
        let mut stream = tokenizer.decode_stream(skip);
        let mut streamed = String::new();
        for &id in &ids {
            streamed.push_str(&stream.push(id).unwrap());
        }
        streamed.push_str(&stream.finish().unwrap());
        prop_assert_eq!(streamed, tokenizer.decode(&ids, skip).unwrap());
    }
}
