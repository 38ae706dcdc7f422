//! The texts of VADER: 23,700 snippets of four domains, each with the mean of 20 people's ratings of its sentiment, from the
//! source distribution of the Python package `vaderSentiment` 3.3.2.
//!
//! C. J. Hutto and E. Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text", ICWSM 2014.
//! MIT.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::cache::{read_verified, set_dir};
use crate::catalog::catalog;
use crate::packed::read_each;
use crate::{Error, Result};

/// Name of the set.
pub const NAME: &str = "vader-sentiment";
const FILE: &str = "hutto_ICWSM_2014.tar.gz";

/// Where a text comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Domain {
    /// Twitter.
    Tweets,
    /// Sentences of film reviews.
    Movies,
    /// Sentences of customers' reviews of technical products.
    Products,
    /// Sentences of opinion pieces of a newspaper.
    Editorials,
}

impl Domain {
    /// All four, in the order in which [`load`] returns them.
    pub const ALL: [Self; 4] = [Self::Tweets, Self::Movies, Self::Products, Self::Editorials];

    /// `tweets`, `movies`, `products` or `editorials`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tweets => "tweets",
            Self::Movies => "movies",
            Self::Products => "products",
            Self::Editorials => "editorials",
        }
    }

    fn file(self) -> &'static str {
        match self {
            Self::Tweets => "tweets_GroundTruth.txt",
            Self::Movies => "movieReviewSnippets_GroundTruth.txt",
            Self::Products => "amazonReviewSnippets_GroundTruth.txt",
            Self::Editorials => "nytEditorialSnippets_GroundTruth.txt",
        }
    }
}

/// A text with its rating.
#[derive(Debug, Clone, PartialEq)]
pub struct Rated {
    /// Where it comes from.
    pub domain: Domain,
    /// Its number in its domain; for products and editorials that of the document and that of the sentence, as in `3_14`.
    pub id: String,
    /// Mean human rating, from −4 (extremely negative) to 4 (extremely positive).
    pub rating: f64,
    /// The text, without white space at its ends. Bytes that aren't UTF-8 are replaced, `&amp;`, `&lt;` and `&gt;` are
    /// characters again.
    pub text: String,
}

/// The texts from the cache, domain by domain in the order of [`Domain::ALL`].
///
/// # Errors
/// [`Error::Missing`] if the set isn't in the cache; [`Error::WrongLength`] or [`Error::WrongHash`] if the file is damaged.
pub fn load() -> Result<Vec<Rated>> {
    load_from(&set_dir(NAME)?)
}

/// As [`load`], from the folder `dir`.
///
/// # Errors
/// As [`load`].
pub fn load_from(dir: &Path) -> Result<Vec<Rated>> {
    let bytes = read_verified(catalog().set(NAME)?, FILE, dir)?;
    let mut all = Vec::with_capacity(23_700);
    let domain_of = |name: &str| Domain::ALL.into_iter().find(|d| name.rsplit('/').next() == Some(d.file()));
    let wanted = |name: &str| domain_of(name).is_some();
    read_each(FILE, &bytes, wanted, |name, content| {
        if let Some(domain) = domain_of(name) {
            parse(domain, &String::from_utf8_lossy(&content), &mut all)?;
        }
        Ok(())
    })?;
    all.sort_by_key(|rated| rated.domain);
    match Domain::ALL.into_iter().find(|d| !all.iter().any(|rated| rated.domain == *d)) {
        Some(domain) => Err(Error::malformed(FILE, format!("{} isn't in it", domain.file()))),
        None => Ok(all),
    }
}

/// Lines of `id`, tab, rating, tab, text.
fn parse(domain: Domain, content: &str, all: &mut Vec<Rated>) -> Result<()> {
    for (number, line) in content.lines().enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        let bad = |what: &str| Error::malformed(domain.file(), format!("line {} {what}", number + 1));
        let mut fields = line.splitn(3, '\t');
        let (Some(id), Some(rating), Some(text)) = (fields.next(), fields.next(), fields.next()) else {
            return Err(bad("doesn't consist of an id, a rating and a text with tabs between"));
        };
        let rating: f64 = rating.trim().parse().map_err(|_| bad("has a rating that is no number"))?;
        if !(-4.0..=4.0).contains(&rating) {
            return Err(bad("has a rating that isn't from −4 to 4"));
        }
        // Ampersands first: some texts were escaped twice.
        let text = text.replace("&amp;", "&").replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">");
        let text = text.trim().to_owned();
        all.push(Rated { domain, id: id.trim().to_owned(), rating, text });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_an_id_a_rating_and_a_text() {
        let mut all = Vec::new();
        parse(Domain::Tweets, "1\t2.5\tLove &amp;lt;3 &amp; more\t! \r\n\r\n2_1\t-4\tno", &mut all).unwrap();
        assert_eq!((all.len(), all[0].text.as_str(), all[0].rating), (2, "Love <3 & more\t!", 2.5));
        assert_eq!((all[1].id.as_str(), all[1].text.as_str()), ("2_1", "no"));
    }

    #[test]
    fn a_line_that_is_something_else_is_named() {
        for (line, what) in [("1\t2", "tabs"), ("1\tx\tt", "no number"), ("1\t5\tt", "−4 to 4"), ("1\tNaN\tt", "−4")]
        {
            let content = format!("1\t0\tfine\n{line}\n");
            let message = parse(Domain::Movies, &content, &mut Vec::new()).unwrap_err().to_string();
            assert!(message.starts_with("movieReviewSnippets_GroundTruth.txt: line 2"), "{message}");
            assert!(message.contains(what), "{message}");
        }
    }
}
