//! Text to tokens and back: from a `tokenizer.json` or from the metadata of a GGUF file.

mod gguf;
mod hugging_face;
mod stream;

pub(crate) use hugging_face::token_text;
pub use stream::DecodeStream;

use crate::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A tokenizer.
///
/// Special tokens that stand in a text (`<|im_end|>`) become their token, as chat templates need it; don't encode texts of strangers
/// together with a template's if that matters.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// By id; none for a hole in the numbering.
    tokens: Vec<Option<String>>,
    special: BTreeSet<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    /// Put before and after a text with `add_special`, where the library's own post-processor doesn't.
    prefix: Vec<u32>,
    suffix: Vec<u32>,
    /// Whether tokens are written in the alphabet that GPT-2 gives to bytes.
    byte_level: bool,
    /// Bytes that no token stands for; only of a byte-level tokenizer, and usually none of valid UTF-8.
    lost: Vec<u8>,
}

/// Where two tokenizers first differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The first id that they treat differently.
    pub id: u32,
    /// The token here, none beyond the vocabulary.
    pub here: Option<String>,
    /// The token there.
    pub there: Option<String>,
    /// What differs, in words.
    pub what: &'static str,
}

impl Tokenizer {
    /// Wraps the library's tokenizer; both constructors end here.
    fn new(mut inner: tokenizers::Tokenizer) -> Result<Self> {
        // A tokenizer.json may say that texts are cut or padded, which would change prompts in silence.
        inner.with_truncation(None).map_err(|e| report(&e))?;
        inner.with_padding(None);
        let mut tokens = Vec::new();
        let by_id: BTreeMap<u32, String> = inner.get_vocab(true).into_iter().map(|(token, id)| (id, token)).collect();
        for (id, token) in by_id {
            if id as usize >= MOST_TOKENS {
                let reason = format!("the token `{token}` has the id {id}, but fewer than {MOST_TOKENS} are read");
                return Err(Error::Tokenizer { reason });
            }
            tokens.resize(id as usize, None);
            tokens.push(Some(token));
        }
        let added = inner.get_added_tokens_decoder();
        let special = added.iter().filter(|(_, token)| token.special).map(|(&id, _)| id).collect();
        let byte_level = matches!(inner.get_decoder(), Some(tokenizers::DecoderWrapper::ByteLevel(_)));
        let lost = if byte_level { lost_bytes(&inner) } else { Vec::new() };
        Ok(Self {
            inner,
            tokens,
            special,
            bos: None,
            eos: None,
            prefix: Vec::new(),
            suffix: Vec::new(),
            byte_level,
            lost,
        })
    }

    /// Number of tokens, special ones with them: one more than the largest id.
    pub fn vocab(&self) -> usize {
        self.tokens.len()
    }

    /// The token with this id, as the vocabulary writes it (`Ġthe`).
    pub fn token(&self, id: u32) -> Option<&str> {
        self.tokens.get(id as usize)?.as_deref()
    }

    /// The id of a token, as the vocabulary writes it.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Whether the token is special: a mark that isn't text.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// All special tokens, in the order of their ids.
    pub fn special(&self) -> impl Iterator<Item = u32> + '_ {
        self.special.iter().copied()
    }

    /// The token that begins a text, if the checkpoint names one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a text, if the checkpoint names one.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The tokens of a text; with `add_special`, between the marks that the checkpoint wants around a text (often none). A chat
    /// template writes its marks itself: encode what it gives without.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] for a byte that the vocabulary has no token for, and for a mark that isn't in the vocabulary.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        if let Some(at) = text.bytes().position(|byte| self.lost.contains(&byte)) {
            let byte = text.as_bytes()[at];
            return Err(Error::Tokenizer { reason: format!("no token stands for the byte {byte:#04x} (at {at})") });
        }
        let encoding = guarded(|| self.inner.encode_fast(text, add_special))?;
        let ids = encoding.get_ids();
        // The marks of a tokenizer.json are numbers of their own, which may be any.
        for &id in ids {
            self.need(id)?;
        }
        if !add_special {
            return Ok(ids.to_vec());
        }
        Ok([&self.prefix, ids, &self.suffix].concat())
    }

    /// As [`encode`](Self::encode), of bytes that should be UTF-8.
    ///
    /// # Errors
    /// [`Error::Utf8`] with the position of the first byte that isn't.
    pub fn encode_bytes(&self, bytes: &[u8], add_special: bool) -> Result<Vec<u32>> {
        let text =
            std::str::from_utf8(bytes).map_err(|e| Error::Utf8 { what: "The text".to_owned(), at: e.valid_up_to() })?;
        self.encode(text, add_special)
    }

    /// The text of tokens; `skip_special` leaves the special ones out. Bytes that aren't UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] for an id beyond the vocabulary.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        if self.byte_level {
            let mut bytes = Vec::new();
            for &id in ids {
                self.push_bytes(id, skip_special, &mut bytes)?;
            }
            return Ok(String::from_utf8_lossy(&bytes).into_owned());
        }
        for &id in ids {
            self.need(id)?;
        }
        guarded(|| self.inner.decode(ids, skip_special))
    }

    /// A decoder for tokens that come one after the other.
    pub fn decode_stream(&self, skip_special: bool) -> DecodeStream<'_> {
        DecodeStream::new(self, skip_special)
    }

    /// Checks that a model with a table of `vocab` embeddings can be used with this tokenizer. Tables are often padded to a
    /// round number, so a larger one is good.
    ///
    /// # Errors
    /// [`Error::VocabMismatch`] if the table is smaller.
    pub fn check_model(&self, vocab: i64) -> Result<()> {
        if usize::try_from(vocab).is_ok_and(|vocab| vocab >= self.vocab()) {
            return Ok(());
        }
        Err(Error::VocabMismatch {
            what: "The model's table of embeddings".to_owned(),
            expected: self.vocab(),
            got: usize::try_from(vocab).unwrap_or(0),
            hint: "the tokenizer would give tokens that the model doesn't know; take the tokenizer of this checkpoint."
                .to_owned(),
        })
    }

    /// The first id that two tokenizers treat differently: another token, special in one of them only, or made by another merge.
    pub fn first_difference(&self, other: &Self) -> Option<Difference> {
        let difference = |id: u32, what| Difference {
            id,
            here: self.token(id).map(str::to_owned),
            there: other.token(id).map(str::to_owned),
            what,
        };
        let ids = 0..self.vocab().max(other.vocab()) as u32;
        for id in ids {
            if self.token(id) != other.token(id) {
                return Some(difference(id, "the tokens differ"));
            }
            if self.is_special(id) != other.is_special(id) {
                return Some(difference(id, "the token is special in one of them only"));
            }
        }
        let (here, there) = (self.merges(), other.merges());
        let at = (0..here.len().max(there.len())).find(|&i| here.get(i) != there.get(i))?;
        let merged = here.get(at).or(there.get(at)).map(|[a, b]| format!("{a}{b}"))?;
        Some(difference(self.id(&merged).unwrap_or(0), "the merges differ"))
    }

    /// The merges in their order; none for a model without.
    fn merges(&self) -> Vec<[String; 2]> {
        // The library shows them only in the form that it saves.
        let Ok(model) = serde_json::to_value(self.inner.get_model()) else { return Vec::new() };
        let pair = |merge: &serde_json::Value| match merge {
            serde_json::Value::String(text) => text.split_once(' ').map(|(a, b)| [a.to_owned(), b.to_owned()]),
            pair => Some([pair.get(0)?.as_str()?.to_owned(), pair.get(1)?.as_str()?.to_owned()]),
        };
        let list = model.get("merges").and_then(serde_json::Value::as_array);
        list.map(|list| list.iter().filter_map(pair).collect()).unwrap_or_default()
    }

    fn need(&self, id: u32) -> Result<&str> {
        self.token(id).ok_or_else(|| Error::Tokenizer {
            reason: format!("there is no token {id} in the vocabulary of {}", self.vocab()),
        })
    }

    /// The bytes that a byte-level token stands for.
    fn push_bytes(&self, id: u32, skip_special: bool, bytes: &mut Vec<u8>) -> Result<()> {
        let token = self.need(id)?;
        if skip_special && self.is_special(id) {
            return Ok(());
        }
        let before = bytes.len();
        for character in token.chars() {
            if let Some(byte) = byte_of(character) {
                bytes.push(byte);
            } else {
                // An added token that isn't written in the alphabet stands for itself.
                bytes.truncate(before);
                bytes.extend_from_slice(token.as_bytes());
                break;
            }
        }
        Ok(())
    }
}

/// Far above any vocabulary; bounds the table of tokens, whose length a file's ids decide.
const MOST_TOKENS: usize = 1 << 24;

/// Runs the library's code. What it reads may come from anywhere, and where it panics on a malformed tokenizer, this is an error.
fn guarded<T>(f: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(result) => result.map_err(|e| report(&e)),
        Err(_) => Err(Error::Tokenizer { reason: "the tokenizer is malformed: its library gave up on it".to_owned() }),
    }
}

fn report(error: &tokenizers::Error) -> Error {
    Error::Tokenizer { reason: error.to_string() }
}

/// GPT-2 writes bytes as printable characters: those that are printable in Latin-1 as themselves, the others, in order, from
/// U+0100 on.
fn byte_of(character: char) -> Option<u8> {
    let code = u32::from(character);
    match code {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => Some(code as u8),
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121 + 0x7F) as u8),
        0x143 => Some(0xAD),
        _ => None,
    }
}

/// The character that stands for a byte: the inverse of [`byte_of`].
fn character_of(byte: u8) -> char {
    let code = match byte {
        0x00..=0x20 => 0x100 + u32::from(byte),
        0x7F..=0xA0 => 0x121 + u32::from(byte) - 0x7F,
        0xAD => 0x143,
        _ => u32::from(byte),
    };
    // Every arm gives a code below 0x144, all of which are characters.
    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// Bytes of UTF-8 whose character isn't a token: the library would drop them from a text in silence.
fn lost_bytes(inner: &tokenizers::Tokenizer) -> Vec<u8> {
    let in_utf8 = |byte: &u8| !matches!(byte, 0xC0 | 0xC1 | 0xF5..=0xFF);
    let mut text = [0; 4];
    (0..=u8::MAX)
        .filter(in_utf8)
        .filter(|&byte| inner.token_to_id(character_of(byte).encode_utf8(&mut text)).is_none())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_a_character_of_its_own() {
        let characters: BTreeSet<char> = (0..=u8::MAX).map(character_of).collect();
        assert_eq!(characters.len(), 256);
        assert!((0..=u8::MAX).all(|byte| byte_of(character_of(byte)) == Some(byte)));
        let alphabet: BTreeSet<char> =
            tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect();
        assert_eq!(characters, alphabet);
        assert_eq!((character_of(b' '), character_of(b'\n')), ('Ġ', 'Ċ'));
    }
}
