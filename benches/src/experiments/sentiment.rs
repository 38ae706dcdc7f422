//! Short texts with human ratings of their sentiment, and a judge that no language model has seen: what the experiments on
//! steering and on decoding share.

use anyhow::Result;
use datasets::vader_sentiment::{Domain, NAME, Rated, load};
use std::sync::OnceLock;
use tensor::Seed;

/// The data set.
pub(crate) const DATA: &str = NAME;

/// Names of the domains, in the order of [`Domain::ALL`].
pub(crate) const DOMAINS: [&str; 4] = ["tweets", "movies", "products", "editorials"];

/// Texts of 30 to 140 characters whose rating is at least 1 either way.
pub(crate) fn clear_snippets() -> Result<Vec<Rated>> {
    let clear = |r: &Rated| (30..=140).contains(&r.text.chars().count()) && r.rating.abs() >= 1.0;
    Ok(load()?.into_iter().filter(clear).collect())
}

/// The number of a domain.
pub(crate) fn domain_index(domain: Domain) -> usize {
    Domain::ALL.iter().position(|&d| d == domain).unwrap_or(0)
}

/// The numbers 0 to `n` − 1 in an order that the seed gives.
pub(crate) fn shuffled(n: usize, seed: Seed) -> Vec<usize> {
    use rand::seq::SliceRandom as _;
    let mut order: Vec<usize> = (0..n).collect();
    order.shuffle(&mut seed.rng());
    order
}

/// VADER's compound score of a text, from −1 (negative) to 1 (positive).
pub(crate) fn vader(text: &str) -> f64 {
    static ANALYZER: OnceLock<::vader_sentiment::SentimentIntensityAnalyzer<'static>> = OnceLock::new();
    let analyzer = ANALYZER.get_or_init(::vader_sentiment::SentimentIntensityAnalyzer::new);
    analyzer.polarity_scores(text).get("compound").copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Text, score, and how far the port may be from it.
    const VADER_GOLDEN: [(&str, f64, f64); 6] = [
        ("The film was a complete waste of time.", -0.4215, 1e-3),
        ("I LOVE this camera!!!", 0.7788, 1e-3),
        ("It is not bad, but the ending was terrible.", -0.4981, 1e-3),
        ("The committee met on Tuesday.", 0.0, 1e-3),
        // The port lets "so" count for the emoticon too.
        ("so happy :) best day ever", 0.9142, 0.02),
        ("Kind of disappointing, without any real charm.", -0.666, 1e-3),
    ];

    #[test]
    fn the_judge_gives_the_originals_scores() {
        // From the Python package vaderSentiment 3.3.2.
        for (text, score, tolerance) in VADER_GOLDEN {
            assert!((vader(text) - score).abs() < tolerance, "{text}: {}", vader(text));
        }
    }

    #[test]
    fn an_order_is_a_permutation_that_the_seed_repeats() {
        let order = shuffled(9, Seed::new(3));
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..9).collect::<Vec<_>>());
        assert_eq!(order, shuffled(9, Seed::new(3)));
        assert_ne!(order, shuffled(9, Seed::new(4)));
    }
}
