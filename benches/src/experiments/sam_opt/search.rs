//! The search for hyper-parameters: on validation data, with seeds that are never evaluated, with the same number of
//! candidates for every method of an experiment. Its result is committed under `benches/tuned/`.

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// First seed of a search, far from those that are evaluated.
pub(super) const FIRST: u64 = 1000;
/// Seeds of a search.
pub(super) const SEEDS: u64 = 3;
/// Candidates of each method in the searches over domains.
pub(super) const CANDIDATES: usize = 7;

/// A method with the settings that a search chooses among.
pub(super) trait Candidate: Clone + std::fmt::Debug + PartialEq + Serialize + DeserializeOwned {
    /// Name of what the search varies; empty where [`varied`](Self::varied) names several settings itself.
    fn name(&self) -> &'static str;

    /// Its value in words.
    fn varied(&self) -> String;

    /// What the search doesn't vary, as the rest of a list (`", α 0.1"`).
    fn fixed(&self) -> String {
        String::new()
    }

    /// Whether the grid is a line, at whose ends a better value may lie outside.
    fn on_a_line(&self) -> bool {
        true
    }

    /// Whether nothing lies beyond this value (no weight decay), so that it is no edge.
    fn is_natural_end(&self) -> bool {
        false
    }

    /// Settings as words.
    fn settings(&self) -> String {
        format!("{} {}{}", self.name(), self.varied(), self.fixed()).trim_start().to_owned()
    }
}

/// A candidate's score on validation data.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Score {
    /// Percent.
    pub(super) accuracy: f64,
    /// Nats.
    pub(super) loss: f64,
}

/// What the searches of an experiment found; the committed file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, bound = "M: Candidate")]
pub(super) struct Tuned<M> {
    /// Seeds that the searches used; evaluation never does.
    pub(super) seeds: Vec<u64>,
    /// One search for each arm and each fold.
    pub(super) searches: Vec<Search<M>>,
}

/// The search of one method for one fold (a held-out domain, a data set). It has seen the fold's training and
/// validation data only: the domain that another fold trains on may be the one that this fold holds out, so folds can't
/// share a choice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, bound = "M: Candidate")]
pub(super) struct Search<M> {
    /// Arm.
    pub(super) arm: String,
    /// The fold: the domain that it holds out, or the data set.
    pub(super) fold: String,
    /// The choice.
    pub(super) chosen: M,
    /// All candidates, in the order of the grid.
    pub(super) trials: Vec<Trial<M>>,
}

/// A candidate's score: accuracy in percent and loss in nats, means over seeds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, bound = "M: Candidate")]
pub(super) struct Trial<M> {
    pub(super) candidate: M,
    pub(super) validation_accuracy: f64,
    pub(super) validation_loss: f64,
}

impl<M> Trial<M> {
    /// The trial with the highest accuracy; of several, the one with the lowest loss.
    pub(super) fn best(trials: &[Trial<M>]) -> Option<&Trial<M>> {
        trials.iter().max_by(|a, b| {
            let loss = b.validation_loss.total_cmp(&a.validation_loss);
            a.validation_accuracy.total_cmp(&b.validation_accuracy).then(loss)
        })
    }
}

impl<M: Candidate> Search<M> {
    /// Whether a better value may lie outside the grid.
    fn is_on_the_edge(&self) -> bool {
        let is = |trial: Option<&Trial<M>>| trial.is_some_and(|t| t.candidate == self.chosen);
        self.chosen.on_a_line() && !self.chosen.is_natural_end() && (is(self.trials.first()) || is(self.trials.last()))
    }
}

impl<M: Candidate> Tuned<M> {
    /// Reads a committed search.
    pub(super) fn parse(text: &str) -> Result<Self> {
        serde_json::from_str(text)
            .context("the committed search can't be read: make it again with `tessera-bench tune`")
    }

    /// The choice for an arm in a fold.
    pub(super) fn chosen(&self, arm: &str, fold: &str) -> Result<&M> {
        let search = self.searches.iter().find(|s| s.arm == arm && s.fold == fold);
        search.map(|s| &s.chosen).with_context(|| format!("the search has no arm \"{arm}\" for the fold {fold}"))
    }

    /// Refuses seeds that the search has used.
    pub(super) fn check_seed(&self, seed: u64) -> Result<()> {
        ensure!(
            !self.seeds.contains(&seed),
            "Seed {seed} belongs to the search for hyper-parameters and is never evaluated."
        );
        Ok(())
    }

    /// The choices for an arm in words: `ρ 0.1 / 0.01 (edge of the grid) / 0.2, α 0.1, chosen …`.
    pub(super) fn note(&self, arm: &str) -> Option<String> {
        let searches: Vec<&Search<M>> = self.searches.iter().filter(|s| s.arm == arm).collect();
        let first = searches.first()?;
        let value = |search: &&Search<M>| {
            let edge = if search.is_on_the_edge() { " (edge of the grid)" } else { "" };
            format!("{}{edge}", search.chosen.varied())
        };
        let values: Vec<String> = searches.iter().map(value).collect();
        let each = if searches.len() > 1 { " for each fold" } else { "" };
        let name = first.chosen.name();
        let text = format!("{name} {}{}", values.join(" / "), first.chosen.fixed());
        Some(format!("{}, chosen{each} on validation among {}", text.trim_start(), first.trials.len()))
    }
}

/// Scores every candidate of every arm in every fold, and returns the committed file's text.
///
/// # Errors
/// What a score reports, an arm without candidates, arms with different numbers of them.
pub(super) fn run_search<M: Candidate>(
    experiment: &str,
    arms: &[(&str, Vec<M>)],
    folds: &[&str],
    mut score: impl FnMut(&M, &str, u64) -> Result<Score>,
) -> Result<String> {
    let mut searches = Vec::new();
    for (arm, grid) in arms {
        ensure!(
            grid.len() == arms[0].1.len(),
            "{arm} has {} candidates, {} has {}",
            grid.len(),
            arms[0].0,
            arms[0].1.len()
        );
        for fold in folds {
            let mut trials = Vec::new();
            for candidate in grid {
                let (mut accuracy, mut loss) = (0.0, 0.0);
                for seed in FIRST..FIRST + SEEDS {
                    let score = score(candidate, fold, seed)?;
                    accuracy += score.accuracy / SEEDS as f64;
                    loss += score.loss / SEEDS as f64;
                }
                println!("{experiment} {arm}, {fold}, {}: {accuracy:.2} % {loss:.4}", candidate.settings());
                trials.push(Trial {
                    candidate: candidate.clone(),
                    validation_accuracy: accuracy,
                    validation_loss: loss,
                });
            }
            let chosen = Trial::best(&trials).context("a grid has candidates")?.candidate.clone();
            searches.push(Search { arm: (*arm).into(), fold: (*fold).into(), chosen, trials });
        }
    }
    let tuned = Tuned { seeds: (FIRST..FIRST + SEEDS).collect(), searches };
    Ok(serde_json::to_string_pretty(&tuned)? + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    struct Radius(f64);

    impl Candidate for Radius {
        fn name(&self) -> &'static str {
            "ρ"
        }

        fn varied(&self) -> String {
            self.0.to_string()
        }

        fn fixed(&self) -> String {
            ", α 0.1".into()
        }

        fn is_natural_end(&self) -> bool {
            self.0 == 0.0
        }
    }

    fn search(fold: &str, chosen: f64) -> Search<Radius> {
        let trials: Vec<Trial<Radius>> = [0.0, 0.01, 0.1, 1.0]
            .into_iter()
            .map(|rho| {
                let validation_accuracy = if rho == chosen { 90.0 } else { 80.0 };
                Trial { candidate: Radius(rho), validation_accuracy, validation_loss: 0.5 }
            })
            .collect();
        let chosen = Trial::best(&trials).unwrap().candidate.clone();
        Search { arm: "gsam".into(), fold: fold.into(), chosen, trials }
    }

    #[test]
    fn every_fold_uses_its_own_choice_and_the_note_names_each() {
        let searches = vec![search("x", 0.1), search("y", 0.0), search("z", 1.0)];
        let tuned = Tuned { seeds: vec![1000], searches };
        assert_eq!(*tuned.chosen("gsam", "x").unwrap(), Radius(0.1));
        assert_eq!(*tuned.chosen("gsam", "y").unwrap(), Radius(0.0));
        let message = tuned.chosen("gsam", "w").unwrap_err().to_string();
        assert!(message.contains("\"gsam\"") && message.contains("fold w"), "{message}");
        // The end of what there is, no radius, is no edge of the grid.
        let note = "ρ 0.1 / 0 / 1 (edge of the grid), α 0.1, chosen for each fold on validation among 4";
        assert_eq!(tuned.note("gsam").unwrap(), note);
        assert_eq!(tuned.note("sam"), None);
        let one = Tuned { seeds: vec![1000], searches: vec![search("x", 0.1)] };
        assert_eq!(one.note("gsam").unwrap(), "ρ 0.1, α 0.1, chosen on validation among 4");
        assert!(tuned.check_seed(999).is_ok());
        assert!(tuned.check_seed(1000).unwrap_err().to_string().contains("Seed 1000"));
    }

    #[test]
    fn of_equal_accuracies_the_lower_loss_is_chosen() {
        let trial = |rho: f64, accuracy: f64, loss: f64| Trial {
            candidate: Radius(rho),
            validation_accuracy: accuracy,
            validation_loss: loss,
        };
        let trials = [trial(0.1, 90.0, 0.4), trial(0.2, 90.0, 0.3), trial(0.5, 90.0, 0.5), trial(1.0, 89.0, 0.1)];
        assert_eq!(Trial::best(&trials).unwrap().candidate, Radius(0.2));
    }

    #[test]
    fn a_search_scores_all_candidates_on_its_own_seeds_and_its_file_reads_back() {
        let mut seen = Vec::new();
        let arms = [("a", vec![Radius(0.1), Radius(0.2)]), ("b", vec![Radius(0.3), Radius(0.4)])];
        let text = run_search("toy", &arms, &["x"], |candidate, fold, seed| {
            seen.push((candidate.0, fold.to_owned(), seed));
            Ok(Score { accuracy: 100.0 * candidate.0, loss: 0.0 })
        })
        .unwrap();
        assert_eq!(seen.len(), 4 * SEEDS as usize);
        let tuned = Tuned::<Radius>::parse(&text).unwrap();
        assert_eq!((tuned.chosen("a", "x").unwrap().0, tuned.chosen("b", "x").unwrap().0), (0.2, 0.4));
        assert!(seen.iter().all(|(_, _, seed)| tuned.check_seed(*seed).is_err()));
        let uneven = [("a", vec![Radius(0.1)]), ("b", vec![])];
        assert!(run_search("toy", &uneven, &["x"], |_, _, _| Ok(Score { accuracy: 0.0, loss: 0.0 })).is_err());
    }
}
