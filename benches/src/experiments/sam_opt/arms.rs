//! The optimizers of the experiments and their hyper-parameters.

use anyhow::{Context as _, Result};
use sam_opt::{Adam, AdamConfig, Gsam, GsamConfig, ParamGroup, Pass, Sagm, SagmConfig, Sam, SamConfig, SamStats};
use serde::{Deserialize, Serialize};
use tensor::tch::Tensor;

/// An optimizer with its hyper-parameters, over Adam with learning rate 1e-3.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "method", rename_all = "snake_case")]
pub(super) enum Method {
    /// Empirical risk minimization: the base optimizer alone.
    Erm {
        weight_decay: f64,
    },
    Sam {
        rho: f64,
    },
    Asam {
        rho: f64,
    },
    Gsam {
        rho: f64,
        alpha: f64,
    },
    Sagm {
        rho: f64,
        alpha: f64,
    },
}

/// Learning rate of the protocols.
const LR: f64 = 1e-3;
/// The methods whose hyper-parameters are searched.
pub(super) const SEARCHED: [&str; 5] = ["erm", "sam", "asam", "gsam", "sagm"];
/// Candidates of each method.
pub(super) const CANDIDATES: usize = 7;

impl Method {
    /// The candidates among which validation on the source domains chooses: [`CANDIDATES`] of every method, in
    /// ascending order, about geometric, with room on both sides of the usual values.
    pub(super) fn grid(name: &str) -> Option<Vec<Method>> {
        let rhos: [f64; CANDIDATES] = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0];
        // ASAM measures its radius relative to the weights, so the same effect takes a larger number.
        let relative: [f64; CANDIDATES] = [0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0];
        let decays: [f64; CANDIDATES] = [0.0, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3];
        Some(match name {
            "erm" => decays.map(|weight_decay| Method::Erm { weight_decay }).into(),
            "sam" => rhos.map(|rho| Method::Sam { rho }).into(),
            "asam" => relative.map(|rho| Method::Asam { rho }).into(),
            // α = 0.1 is the specification's for this protocol; ρ matters far more.
            "gsam" => rhos.map(|rho| Method::Gsam { rho, alpha: 0.1 }).into(),
            "sagm" => rhos.map(|rho| Method::Sagm { rho, alpha: 0.001 }).into(),
            _ => return None,
        })
    }

    /// Settings as words.
    pub(super) fn settings(&self) -> String {
        let (name, value) = self.searched();
        format!("{name} {value}{}", self.fixed())
    }

    /// Name and value of the hyper-parameter that the search varies.
    fn searched(&self) -> (&'static str, f64) {
        match *self {
            Method::Erm { weight_decay } => ("weight decay", weight_decay),
            Method::Sam { rho } | Method::Asam { rho } | Method::Gsam { rho, .. } | Method::Sagm { rho, .. } => {
                ("ρ", rho)
            }
        }
    }

    /// What the search doesn't vary, as the rest of a list.
    fn fixed(&self) -> String {
        match self {
            Method::Gsam { alpha, .. } | Method::Sagm { alpha, .. } => format!(", α {alpha}"),
            _ => String::new(),
        }
    }

    /// Builds the optimizer over a group.
    pub(super) fn build(&self, group: ParamGroup, seed: u64) -> Result<Optimizer> {
        let shared = |rho: f64| SamConfig { seed, ..SamConfig::sam(rho) };
        let groups = vec![group];
        Ok(match *self {
            Method::Erm { weight_decay } => {
                let adam = Adam::from_config(AdamConfig { lr: LR, weight_decay, ..AdamConfig::default() });
                Optimizer::Sam(Sam::new(groups, adam, shared(0.0))?)
            }
            Method::Sam { rho } => Optimizer::Sam(Sam::new(groups, Adam::new(LR), shared(rho))?),
            Method::Asam { rho } => {
                let config = SamConfig { seed, ..SamConfig::asam(rho) };
                Optimizer::Sam(Sam::new(groups, Adam::new(LR), config)?)
            }
            Method::Gsam { rho, alpha } => {
                Optimizer::Gsam(Gsam::new(groups, Adam::new(LR), GsamConfig { alpha, sam: shared(rho) })?)
            }
            Method::Sagm { rho, alpha } => {
                Optimizer::Sagm(Sagm::new(groups, Adam::new(LR), SagmConfig { alpha, sam: shared(rho) })?)
            }
        })
    }
}

/// One of the optimizers, behind one `step`.
#[derive(Debug)]
pub(super) enum Optimizer {
    Sam(Sam<Adam>),
    Gsam(Gsam<Adam>),
    Sagm(Sagm<Adam>),
}

impl Optimizer {
    pub(super) fn step(
        &mut self,
        closure: impl FnMut(&Pass<'_>) -> sam_opt::Result<Tensor>,
    ) -> sam_opt::Result<SamStats> {
        match self {
            Optimizer::Sam(optimizer) => optimizer.step(closure),
            Optimizer::Gsam(optimizer) => optimizer.step(closure),
            Optimizer::Sagm(optimizer) => optimizer.step(closure),
        }
    }
}

/// What the searches of a protocol found; the committed file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Tuned {
    /// Seeds that the searches used; evaluation never does.
    pub(super) seeds: Vec<u64>,
    /// One search for each arm and each held-out domain.
    pub(super) searches: Vec<Search>,
}

/// The search of one method for one fold. It has seen the fold's source domains only: the domain that another
/// fold trains on may be the one that this fold holds out, so folds can't share a choice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Search {
    /// Arm.
    pub(super) arm: String,
    /// The domain that the fold holds out.
    pub(super) held_out: String,
    /// The choice.
    pub(super) chosen: Method,
    /// All candidates, in the order of [`Method::grid`].
    pub(super) trials: Vec<Trial>,
}

/// A candidate's score on the validation parts of the fold's source domains: accuracy in percent and loss in
/// nats, means over domains and seeds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Trial {
    pub(super) candidate: Method,
    pub(super) validation_accuracy: f64,
    pub(super) validation_loss: f64,
}

impl Trial {
    /// The trial with the highest accuracy; of several, the one with the lowest loss.
    pub(super) fn best(trials: &[Trial]) -> Option<&Trial> {
        trials.iter().max_by(|a, b| {
            let loss = b.validation_loss.total_cmp(&a.validation_loss);
            a.validation_accuracy.total_cmp(&b.validation_accuracy).then(loss)
        })
    }
}

impl Search {
    /// Whether a better value may lie outside the grid. No decay is the end of what there is, not of the grid.
    fn is_on_the_edge(&self) -> bool {
        let is = |trial: Option<&Trial>| trial.is_some_and(|t| t.candidate == self.chosen);
        let nothing = self.chosen == Method::Erm { weight_decay: 0.0 };
        !nothing && (is(self.trials.first()) || is(self.trials.last()))
    }
}

impl Tuned {
    /// Reads a committed search.
    pub(super) fn parse(text: &str) -> Result<Self> {
        serde_json::from_str(text)
            .context("the committed search can't be read: make it again with `tessera-bench tune`")
    }

    /// The choice for an arm where `held_out` is held out.
    pub(super) fn chosen(&self, arm: &str, held_out: &str) -> Result<&Method> {
        let search = self.searches.iter().find(|s| s.arm == arm && s.held_out == held_out);
        search.map(|s| &s.chosen).with_context(|| format!("the search has no arm \"{arm}\" with {held_out} held out"))
    }

    /// The choices for an arm in words: `ρ 0.1 / 0.01 (edge of the grid) / 0.2, α 0.1, chosen for each fold …`.
    pub(super) fn note(&self, arm: &str) -> Option<String> {
        let searches: Vec<&Search> = self.searches.iter().filter(|s| s.arm == arm).collect();
        let first = searches.first()?;
        let value = |search: &&Search| {
            let edge = if search.is_on_the_edge() { " (edge of the grid)" } else { "" };
            format!("{}{edge}", search.chosen.searched().1)
        };
        let values: Vec<String> = searches.iter().map(value).collect();
        Some(format!(
            "{} {}{}, chosen for each fold on its source validation among {}",
            first.chosen.searched().0,
            values.join(" / "),
            first.chosen.fixed(),
            first.trials.len()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn search(held_out: &str, chosen: f64) -> Search {
        let trials = Method::grid("gsam").unwrap().into_iter().map(|candidate| {
            let best = candidate.searched().1 == chosen;
            Trial { candidate, validation_accuracy: if best { 90.0 } else { 80.0 }, validation_loss: 0.5 }
        });
        let trials: Vec<Trial> = trials.collect();
        let chosen = Trial::best(&trials).unwrap().candidate.clone();
        Search { arm: "gsam".into(), held_out: held_out.into(), chosen, trials }
    }

    #[test]
    fn every_fold_uses_its_own_choice_and_the_note_names_each() {
        let tuned = Tuned { seeds: vec![1000], searches: vec![search("x", 0.1), search("y", 0.01), search("z", 1.0)] };
        assert_eq!(*tuned.chosen("gsam", "x").unwrap(), Method::Gsam { rho: 0.1, alpha: 0.1 });
        assert_eq!(*tuned.chosen("gsam", "y").unwrap(), Method::Gsam { rho: 0.01, alpha: 0.1 });
        let message = tuned.chosen("gsam", "w").unwrap_err().to_string();
        assert!(message.contains("\"gsam\"") && message.contains("w held out"), "{message}");
        assert_eq!(
            tuned.note("gsam").unwrap(),
            "ρ 0.1 / 0.01 (edge of the grid) / 1 (edge of the grid), α 0.1, chosen for each fold on its source \
             validation among 7"
        );
        assert_eq!(tuned.note("sam"), None);
    }

    #[test]
    fn of_equal_accuracies_the_lower_loss_is_chosen() {
        let trial = |rho: f64, accuracy: f64, loss: f64| Trial {
            candidate: Method::Sam { rho },
            validation_accuracy: accuracy,
            validation_loss: loss,
        };
        let trials = [trial(0.1, 90.0, 0.4), trial(0.2, 90.0, 0.3), trial(0.5, 90.0, 0.5), trial(1.0, 89.0, 0.1)];
        assert_eq!(Trial::best(&trials).unwrap().candidate, Method::Sam { rho: 0.2 });
    }

    #[test]
    fn no_weight_decay_is_no_edge_but_the_largest_is() {
        let trials: Vec<Trial> = Method::grid("erm")
            .unwrap()
            .into_iter()
            .map(|candidate| Trial { candidate, validation_accuracy: 0.0, validation_loss: 0.0 })
            .collect();
        let with = |weight_decay: f64| Search {
            arm: "erm".into(),
            held_out: "x".into(),
            chosen: Method::Erm { weight_decay },
            trials: trials.clone(),
        };
        assert!(!with(0.0).is_on_the_edge() && !with(1e-5).is_on_the_edge() && with(3e-3).is_on_the_edge());
    }

    #[test]
    fn every_method_has_as_many_candidates_in_ascending_order() {
        for name in SEARCHED {
            let values: Vec<f64> = Method::grid(name).unwrap().iter().map(|m| m.searched().1).collect();
            assert_eq!(values.len(), CANDIDATES, "{name}");
            assert!(values.is_sorted_by(|a, b| a < b), "{name}: {values:?}");
        }
    }
}
