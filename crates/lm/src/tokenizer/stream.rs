//! Decoding of tokens as they come.

use super::{Tokenizer, guarded};
use crate::Result;

/// Gives the text of tokens that come one after the other, complete characters only: one character may be several tokens.
///
/// All pieces together, with that of [`finish`](Self::finish), are what [`Tokenizer::decode`] gives for all tokens.
#[derive(Debug)]
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    skip_special: bool,
    /// Bytes of a character that isn't complete; only for byte-level tokenizers.
    bytes: Vec<u8>,
    /// Tokens whose text isn't settled, behind those whose text was given last; only for other tokenizers.
    window: Vec<u32>,
    /// How many of the window's tokens have been given.
    given: usize,
}

/// A character is at most so many tokens; what is still unreadable then isn't UTF-8.
const MOST_TOKENS_OF_A_CHARACTER: usize = 4;

impl<'a> DecodeStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, bytes: Vec::new(), window: Vec::new(), given: 0 }
    }

    /// Takes the next token; the text that is complete with it, often one word, sometimes empty.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`]; the stream is then what it was before.
    pub fn push(&mut self, id: u32) -> Result<String> {
        if self.tokenizer.byte_level {
            self.tokenizer.push_bytes(id, self.skip_special, &mut self.bytes)?;
            return Ok(self.complete());
        }
        self.tokenizer.need(id)?;
        if self.skip_special && self.tokenizer.is_special(id) {
            return Ok(String::new());
        }
        self.window.push(id);
        match self.settled(false) {
            Ok(text) => Ok(text),
            Err(error) => {
                self.window.pop();
                Err(error)
            }
        }
    }

    /// What is left when no token comes any more: an incomplete character, as U+FFFD.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn finish(mut self) -> Result<String> {
        if self.tokenizer.byte_level {
            return Ok(String::from_utf8_lossy(&self.bytes).into_owned());
        }
        self.settled(true)
    }

    /// Takes the complete characters from the front of the bytes.
    fn complete(&mut self) -> String {
        let mut text = String::new();
        let mut used = 0;
        for chunk in self.bytes.utf8_chunks() {
            text.push_str(chunk.valid());
            used += chunk.valid().len();
            let invalid = chunk.invalid();
            if invalid.is_empty() {
                continue;
            }
            // Only at the very end can more bytes still complete it.
            let at_end = used + invalid.len() == self.bytes.len();
            if at_end && std::str::from_utf8(invalid).is_err_and(|e| e.error_len().is_none()) {
                break;
            }
            text.push(char::REPLACEMENT_CHARACTER);
            used += invalid.len();
        }
        self.bytes.drain(..used);
        text
    }

    /// The text of the window beyond what was given. A decoder may treat a first token in a special way (drop its space), so the
    /// tokens given last stay in the window as context.
    fn settled(&mut self, at_end: bool) -> Result<String> {
        let decode = |ids: &[u32]| guarded(|| self.tokenizer.inner.decode(ids, self.skip_special));
        let (before, all) = (decode(&self.window[..self.given])?, decode(&self.window)?);
        let pending = self.window.len() - self.given;
        let incomplete = all.ends_with(char::REPLACEMENT_CHARACTER) && pending < MOST_TOKENS_OF_A_CHARACTER;
        if pending == 0 || (incomplete && !at_end) {
            return Ok(String::new());
        }
        // Text that was given can't be taken back, even if the decoder now reads it in another way; then only what is longer counts.
        let new = all.strip_prefix(before.as_str()).or(all.get(before.len()..)).unwrap_or("").to_owned();
        self.window.drain(..self.given);
        self.given = self.window.len();
        Ok(new)
    }
}
