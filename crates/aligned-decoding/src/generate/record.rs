//! What is kept of each row of a decoding, and what comes out.

use crate::Result;
use crate::config::StopReason;
use crate::engine::{Heads, normalizers};
use crate::guard::Guard;
use crate::rules::Chooser;
use crate::select::Choice;
use rand::{SeedableRng as _, rngs::StdRng};
use serde::{Deserialize, Serialize};
use tensor::Seed;
use tensor::tch::{Kind, Tensor};

/// Something that the caller should know.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Warning {
    /// The mean |A| over the prompts' tokens is above 5 nats: the reference is probably not the model that the policy was trained from.
    NotAPair {
        /// It, in nats a token.
        mean: f64,
    },
}

impl std::fmt::Display for Warning {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotAPair { mean } => write!(
                f,
                "The models differ by {mean:.1} nats a token on the prompts: the reference is probably not the model that this \
                 policy was trained from."
            ),
        }
    }
}

/// Counts of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Stats {
    /// Tokens that were chosen.
    pub steps: usize,
    /// Candidates of all steps together, Σ |V_α|.
    pub candidates: usize,
    /// Steps with one candidate.
    pub single: usize,
    /// Steps at which another token was chosen than the policy's favourite.
    pub departures: usize,
    /// Advantages that were clipped.
    pub clipped: usize,
    /// Passes of the reference in which this row took part, the prompt's among them.
    pub reference_passes: usize,
    /// Positions before a decision that the reference has read: less than `steps` where the end of a text was left unread.
    pub reference_positions: usize,
}

impl Stats {
    /// Mean |V_α|; none without steps.
    pub fn mean_candidates(&self) -> Option<f64> {
        (self.steps > 0).then(|| self.candidates as f64 / self.steps as f64)
    }

    /// Share of steps with one candidate; none without steps.
    pub fn single_share(&self) -> Option<f64> {
        (self.steps > 0).then(|| self.single as f64 / self.steps as f64)
    }

    /// Those of several texts together. (Rows of a batch share their passes; each counts them.)
    pub fn sum<'a>(all: impl IntoIterator<Item = &'a Self>) -> Self {
        all.into_iter().fold(Self::default(), |a, b| Self {
            steps: a.steps + b.steps,
            candidates: a.candidates + b.candidates,
            single: a.single + b.single,
            departures: a.departures + b.departures,
            clipped: a.clipped + b.clipped,
            reference_passes: a.reference_passes + b.reference_passes,
            reference_positions: a.reference_positions + b.reference_positions,
        })
    }
}

/// A candidate of a step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TraceCandidate {
    /// The token.
    pub id: u32,
    /// Its log-probability under the policy, in nats.
    pub policy: f64,
    /// Under the reference.
    pub reference: f64,
}

impl TraceCandidate {
    /// A = ℓ_d − ℓ_r.
    pub fn advantage(&self) -> f64 {
        self.policy - self.reference
    }
}

/// A step of a decoding: where preference training changed the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepTrace {
    /// The token that was chosen.
    pub chosen: u32,
    /// What the policy alone would have taken.
    pub policy_top: u32,
    /// Number of candidates, |V_α|.
    pub plausible: usize,
    /// The most probable candidates under the policy (at most 32), the most probable first, and the chosen token if it isn't among them.
    pub candidates: Vec<TraceCandidate>,
    /// A of the chosen token.
    pub advantage: f64,
}

/// Candidates of a step that are kept in a trace.
const TRACED: usize = 32;

/// A finished text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Generation {
    /// The tokens after the prompt.
    pub tokens: Vec<u32>,
    /// Σ A over the tokens, in nats; none without scores.
    pub sum_advantage: Option<f64>,
    /// Log-probability of the tokens under the policy, in nats; none without scores.
    pub logp_policy: Option<f64>,
    /// Under the reference.
    pub logp_ref: Option<f64>,
    /// Log-probability of each token under the policy; empty without scores. Bans don't count, the list of allowed tokens does.
    pub policy_log_probs: Vec<f64>,
    /// Under the reference.
    pub ref_log_probs: Vec<f64>,
    /// Why it ended.
    pub stop: StopReason,
    /// The steps, if they were asked for.
    pub trace: Option<Vec<StepTrace>>,
    /// Counts.
    pub stats: Stats,
    /// What the caller should know of the pair; the same in all rows.
    pub warning: Option<Warning>,
}

impl Generation {
    /// Mean negative log-likelihood a token under the reference, in nats: how far from ordinary text it is. None without scores or
    /// tokens.
    pub fn ref_nll(&self) -> Option<f64> {
        self.logp_ref.filter(|_| !self.tokens.is_empty()).map(|l| -l / self.tokens.len() as f64)
    }
}

/// What the reference thinks of a token.
#[derive(Debug)]
pub(crate) enum Scored {
    /// Its log-probability.
    Done(f64),
    /// The final activations `[width]` before it.
    Hidden(Tensor),
}

/// A step before the reference's log-probabilities are known.
#[derive(Debug)]
struct Step {
    choice: Choice,
    /// Place and log-probability under the policy.
    candidates: Vec<(u32, f64)>,
}

/// A text under way.
#[derive(Debug)]
pub(crate) struct Row {
    /// Prompt and tokens so far.
    pub(crate) text: Vec<u32>,
    pub(crate) tokens: Vec<u32>,
    pub(crate) chooser: Chooser,
    pub(crate) alpha: f64,
    pub(crate) guard: Option<Guard>,
    pub(crate) rng: StdRng,
    pub(crate) stop: Option<StopReason>,
    /// Log-probabilities under the policy.
    pub(crate) policy: Vec<f64>,
    /// Under the reference, as far as it has read.
    pub(crate) scored: Vec<Scored>,
    steps: Option<Vec<Step>>,
    stats: Stats,
}

impl Row {
    pub(crate) fn new(prompt: Vec<u32>, chooser: Chooser, alpha: f64, guard: Option<Guard>, seed: Seed) -> Self {
        Self {
            text: prompt,
            tokens: Vec::new(),
            chooser,
            alpha,
            guard,
            rng: StdRng::seed_from_u64(seed.value()),
            stop: None,
            policy: Vec::new(),
            scored: Vec::new(),
            steps: None,
            stats: Stats::default(),
        }
    }

    pub(crate) fn note_pass(&mut self, positions: usize) {
        self.stats.reference_passes += 1;
        self.stats.reference_positions += positions;
    }

    pub(crate) fn count(&mut self, choice: &Choice) {
        let stats = &mut self.stats;
        stats.steps += 1;
        stats.candidates += choice.candidates;
        stats.single += usize::from(choice.candidates == 1);
        stats.departures += usize::from(choice.token != choice.top);
        stats.clipped += choice.clipped;
    }

    /// Keeps the candidates of a step, with the policy's log-probabilities; `chosen` is that of the chosen token.
    pub(crate) fn keep_step(&mut self, choice: &Choice, normalizer: f64, chosen: f64) {
        let mut candidates = self.chooser.last_candidates().to_vec();
        candidates.sort_by(|a, b| b.z.total_cmp(&a.z).then(a.id.cmp(&b.id)));
        let at = candidates.iter().position(|c| c.id == choice.token);
        candidates.truncate(TRACED);
        let mut candidates: Vec<_> = candidates.into_iter().map(|c| (c.id, f64::from(c.z) - normalizer)).collect();
        if at.is_none_or(|at| at >= TRACED) {
            candidates.push((choice.token, chosen));
        }
        self.steps.get_or_insert_default().push(Step { choice: *choice, candidates });
    }

    /// The text, with what the reference thinks of it by `logits`, its head.
    pub(crate) fn finish(
        self,
        logits: &dyn Fn(&Tensor) -> Result<Tensor>,
        heads: &Heads,
        scores: bool,
        warning: Option<Warning>,
    ) -> Result<Generation> {
        let Self { tokens, policy, scored, stop, steps, stats, .. } = self;
        let mut reference = vec![0.0; scored.len()];
        let mut trace: Vec<StepTrace> = Vec::new();
        let mut hidden = Vec::new();
        for (i, scored) in scored.into_iter().enumerate() {
            match scored {
                Scored::Done(log_prob) => reference[i] = log_prob,
                Scored::Hidden(h) => hidden.push((i, h)),
            }
        }
        // A part at a time: logits are large.
        for part in hidden.chunks(PART) {
            let stacked: Vec<&Tensor> = part.iter().map(|(_, h)| h).collect();
            let z = logits(&Tensor::f_stack(&stacked, 0)?)?; // (n, places)
            let normalizers = normalizers(&z)?;
            for (row, ((i, _), normalizer)) in part.iter().zip(normalizers).enumerate() {
                // The reference may have read a token more than was chosen.
                let Some(place) = tokens.get(*i).and_then(|&id| heads.place(id)) else { continue };
                let log_prob =
                    |place: u32| Ok::<_, crate::Error>(z.f_double_value(&[row as i64, place.into()])? - normalizer);
                reference[*i] = log_prob(place)?;
                let Some(step) = steps.as_ref().and_then(|steps| steps.get(*i)) else { continue };
                let places: Vec<i64> = step.candidates.iter().map(|(place, _)| (*place).into()).collect();
                let places = Tensor::f_from_slice(&places)?.f_to_device(z.device())?;
                let theirs = z.f_select(0, row as i64)?.f_index_select(0, &places)?.f_to_kind(Kind::Double)?;
                let theirs = Vec::<f64>::try_from(&theirs)?;
                let candidates = step.candidates.iter().zip(theirs).map(|((place, policy), z)| TraceCandidate {
                    id: heads.id(*place),
                    policy: *policy,
                    reference: z - normalizer,
                });
                trace.push(StepTrace {
                    chosen: heads.id(step.choice.token),
                    policy_top: heads.id(step.choice.top),
                    plausible: step.choice.candidates,
                    candidates: candidates.collect(),
                    advantage: policy[*i] - reference[*i],
                });
            }
        }
        reference.truncate(tokens.len());
        let (logp_policy, logp_ref) = (policy.iter().sum::<f64>(), reference.iter().sum::<f64>());
        Ok(Generation {
            tokens,
            sum_advantage: scores.then_some(logp_policy - logp_ref),
            logp_policy: scores.then_some(logp_policy),
            logp_ref: scores.then_some(logp_ref),
            policy_log_probs: policy,
            ref_log_probs: reference,
            stop: stop.unwrap_or(StopReason::Caller),
            trace: steps.map(|_| trace),
            stats,
            warning,
        })
    }
}

/// Positions whose logits are computed together.
const PART: usize = 128;
