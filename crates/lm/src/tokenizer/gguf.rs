//! Tokenizers from the metadata of a GGUF file.

use super::{Tokenizer, guarded};
use crate::load::gguf::Metadata;
use crate::{Error, Result};
use std::collections::HashSet;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::normalizer::SplitDelimiterBehavior;
use tokenizers::{AddedToken, PreTokenizerWrapper};

const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const PRE: &str = "tokenizer.ggml.pre";

/// How a text is cut before merging. Only those whose rules are known for certain: a wrong one gives wrong tokens, and text that
/// still looks well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PreTokenizer {
    /// GPT-2's pattern on bytes.
    Gpt2,
    /// Every digit by itself, then GPT-2's.
    SmolLm,
    /// Llama 3's pattern; a word that is a token as a whole isn't merged.
    Llama3,
    /// Llama 3's pattern with every digit by itself, on text in Unicode's normal form C.
    Qwen2,
}

impl PreTokenizer {
    /// The names that files use.
    const NAMES: [(&'static str, Self); 6] = [
        ("gpt-2", Self::Gpt2),
        ("smollm", Self::SmolLm),
        ("llama-bpe", Self::Llama3),
        ("llama3", Self::Llama3),
        ("llama-v3", Self::Llama3),
        ("qwen2", Self::Qwen2),
    ];

    fn named(name: &str) -> Result<Self> {
        let found = Self::NAMES.iter().find(|(known, _)| *known == name);
        found.map(|(_, pre)| *pre).ok_or_else(|| Error::PreTokenizer {
            name: name.to_owned(),
            known: Self::NAMES.map(|(known, _)| known).join(", "),
        })
    }

    fn build(self) -> Result<PreTokenizerWrapper> {
        let bytes = |regex| PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, regex));
        let split = |digits: &str| -> Result<PreTokenizerWrapper> {
            let pattern = SplitPattern::Regex(format!(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ));
            let split = guarded(|| Split::new(pattern, SplitDelimiterBehavior::Isolated, false))?;
            Ok(PreTokenizerWrapper::Split(split))
        };
        let sequence = |first| PreTokenizerWrapper::Sequence(Sequence::new(vec![first, bytes(false)]));
        Ok(match self {
            Self::Gpt2 => bytes(true),
            Self::SmolLm => PreTokenizerWrapper::Sequence(Sequence::new(vec![
                PreTokenizerWrapper::Digits(Digits::new(true)),
                bytes(true),
            ])),
            Self::Llama3 => sequence(split(r"\p{N}{1,3}")?),
            Self::Qwen2 => sequence(split(r"\p{N}")?),
        })
    }
}

/// What a token is, by the numbers of `tokenizer.ggml.token_type`. The others are ordinary for us.
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;

impl Tokenizer {
    /// From a file's metadata.
    pub(crate) fn from_metadata(metadata: Metadata<'_>) -> Result<Self> {
        let model = metadata.text("tokenizer.ggml.model")?;
        if model != "gpt2" {
            let expected = "`gpt2` (byte-level BPE); for another, use a checkpoint with a tokenizer.json";
            return Err(Error::config("tokenizer.ggml.model", expected, model));
        }
        let name = if metadata.has(PRE) { metadata.text(PRE)? } else { "(the file names none)" };
        let pre = PreTokenizer::named(name)?;

        let tokens = metadata.strings(TOKENS)?;
        let (vocab, types) = (vocabulary(tokens)?, types(metadata, tokens.len())?);
        let merges = merges(metadata.strings(MERGES)?, &vocab)?;
        let model = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(pre == PreTokenizer::Llama3);
        let mut inner = tokenizers::Tokenizer::new(guarded(|| model.build())?);
        inner.with_pre_tokenizer(Some(pre.build()?));
        inner.with_decoder(Some(ByteLevel::default()));
        if pre == PreTokenizer::Qwen2 {
            inner.with_normalizer(Some(NFC));
        }
        let of_type = |wanted: u64| tokens.iter().zip(&types).filter(move |(_, kind)| **kind == wanted);
        let control: Vec<_> = of_type(CONTROL).map(|(token, _)| AddedToken::from(token.as_str(), true)).collect();
        let user: Vec<_> =
            of_type(USER_DEFINED).map(|(token, _)| AddedToken::from(token.as_str(), false).normalized(false)).collect();
        guarded(|| Ok((inner.add_special_tokens(&control), inner.add_tokens(&user))))?;

        let mut tokenizer = Self::new(inner)?;
        tokenizer.bos = metadata.token("tokenizer.ggml.bos_token_id", tokens.len())?;
        tokenizer.eos = metadata.token("tokenizer.ggml.eos_token_id", tokens.len())?;
        let adds = |key: &str, default| metadata.bool_or(key, default);
        // Llama 3's files may leave the key out and mean yes.
        if adds("tokenizer.ggml.add_bos_token", pre == PreTokenizer::Llama3 && tokenizer.bos.is_some())? {
            tokenizer.prefix = mark(tokenizer.bos, "tokenizer.ggml.bos_token_id")?;
        }
        if adds("tokenizer.ggml.add_eos_token", false)? {
            tokenizer.suffix = mark(tokenizer.eos, "tokenizer.ggml.eos_token_id")?;
        }
        Ok(tokenizer)
    }
}

/// A mark that the file wants around texts.
fn mark(token: Option<u32>, key: &str) -> Result<Vec<u32>> {
    token.map(|token| vec![token]).ok_or_else(|| Error::config(key, "a token, because it is added to texts", "missing"))
}

fn vocabulary(tokens: &[String]) -> Result<Vocab> {
    if tokens.is_empty() {
        return Err(Error::config(TOKENS, "a list of tokens", "an empty list"));
    }
    let mut seen = HashSet::with_capacity(tokens.len());
    for (id, token) in tokens.iter().enumerate() {
        if !seen.insert(token.as_str()) {
            let got = format!("`{token}` a second time");
            return Err(Error::config(format!("{TOKENS}[{id}]"), "another token than those before", got));
        }
    }
    // The header's limits keep the number of tokens far below 2³².
    Ok(tokens.iter().enumerate().map(|(id, token)| (token.clone(), id as u32)).collect())
}

/// The type of each token; ordinary where the file is silent.
fn types(metadata: Metadata<'_>, tokens: usize) -> Result<Vec<u64>> {
    if !metadata.has(TYPES) {
        return Ok(vec![1; tokens]);
    }
    let types = metadata.integers(TYPES)?;
    if types.len() != tokens {
        return Err(Error::config(TYPES, format!("one type for each of the {tokens} tokens"), types.len()));
    }
    Ok(types)
}

fn merges(lines: &[String], vocab: &Vocab) -> Result<Merges> {
    let merge = |(number, line): (usize, &String)| {
        let bad = |expected: &str| Err(Error::config(format!("{MERGES}[{number}]"), expected, format!("`{line}`")));
        // The first character belongs to the first token even if it is a space.
        let first = line.chars().next().map_or(0, char::len_utf8);
        let Some(at) = line[first..].find(' ').map(|at| at + first) else {
            return bad("two tokens with a space between");
        };
        let (left, right) = (&line[..at], &line[at + 1..]);
        if !vocab.contains_key(left) || !vocab.contains_key(right) || !vocab.contains_key(&format!("{left}{right}")) {
            return bad("two tokens of the vocabulary whose join is one too");
        }
        Ok((left.to_owned(), right.to_owned()))
    };
    lines.iter().enumerate().map(merge).collect()
}
