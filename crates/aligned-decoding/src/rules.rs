//! The rules on logits: alignment-aware decoding and what it is compared with. No model, no tensor.
//!
//! A rule runs in two halves, so that the reference is asked for as little as it needs: [`Chooser::candidates`] looks at the
//! policy's logits, [`Chooser::decide`] at the reference's, of all tokens or of the candidates only. [`choose`] does both.
//!
//! Every score is of the form s·z_d + t·A, with A relative to the policy's favourite and clipped (see [`mod@crate::select`]): for
//! extrapolation ℓ_r + γ(ℓ_d − ℓ_r) = ℓ_d + (γ − 1)A. Constants in v change neither arg-max nor softmax.

use crate::config::{Needs, Rule};
use crate::select::{Candidate, Choice, Selector, advantages, best, best_advantage, plausible, same_length};
use crate::{Error, Result, error::Side};

/// Logits of the reference.
#[derive(Debug, Clone, Copy)]
pub enum RefLogits<'a> {
    /// None: the rule doesn't need them, or there is one candidate.
    None,
    /// Of the candidates, in their order.
    Candidates(&'a [f32]),
    /// Of all tokens.
    All(&'a [f32]),
}

/// A rule with its settings and the memory that it uses again from step to step.
#[derive(Debug, Clone)]
pub struct Chooser {
    rule: Rule,
    ratio_clip: f64,
    selector: Selector,
    top: Candidate,
    weights: Vec<f64>,
}

impl Chooser {
    /// For a rule whose advantages are cut off `ratio_clip` nats above the favourite's.
    ///
    /// # Errors
    /// As [`Rule::validate`].
    pub fn new(rule: Rule, ratio_clip: f64) -> Result<Self> {
        rule.validate()?;
        let top = Candidate { id: 0, z: 0.0 };
        Ok(Self { rule, ratio_clip, selector: Selector::default(), top, weights: Vec::new() })
    }

    /// The tokens that the policy allows, by rising id: V_α, or what the rule has instead of it.
    ///
    /// # Errors
    /// As [`plausible`].
    pub fn candidates(&mut self, z_policy: &[f32], alpha: f64) -> Result<&[Candidate]> {
        let candidates = &mut self.selector.candidates;
        match self.rule {
            Rule::RatioTopK { k } => {
                self.top = plausible(z_policy, 0.0, candidates)?;
                keep_top_k(candidates, k);
            }
            Rule::RatioTopP { p } => {
                self.top = plausible(z_policy, 0.0, candidates)?;
                keep_top_p(candidates, p);
            }
            _ => self.top = plausible(z_policy, alpha, candidates)?,
        }
        Ok(candidates)
    }

    /// The token, after [`candidates`](Self::candidates) of the same step. `uniform` from \[0, 1) decides where the rule draws.
    ///
    /// # Errors
    /// [`Error::NonFiniteLogits`] for NaN or +∞ of the reference; [`Error::InvalidArgument`] for less of the reference than the
    /// rule needs, or slices of other lengths.
    pub fn decide(&mut self, z_policy: &[f32], z_ref: RefLogits<'_>, uniform: f64) -> Result<Choice> {
        let count = self.selector.candidates.len();
        let choice = |token, gain, clipped| Choice { token, top: self.top.id, candidates: count, gain, clipped };
        match self.rule {
            Rule::GreedyDpo | Rule::FilterOnly { greedy: true } => Ok(choice(self.top.id, 0.0, 0)),
            Rule::FilterOnly { greedy: false } => {
                let at = ((uniform * count as f64) as usize).min(count - 1);
                Ok(choice(self.selector.candidates[at].id, 0.0, 0))
            }
            Rule::Sample { from: Side::Policy, temperature, top_p, min_p } => {
                Ok(choice(sample(z_policy, [temperature, uniform], top_p, min_p, Side::Policy)?, 0.0, 0))
            }
            Rule::Sample { from: Side::Reference, temperature, top_p, min_p } => {
                let z = all(z_ref, z_policy)?;
                Ok(choice(sample(z, [temperature, uniform], top_p, min_p, Side::Reference)?, 0.0, 0))
            }
            Rule::GreedyRef => {
                Ok(choice(sample(all(z_ref, z_policy)?, [0.0, uniform], None, None, Side::Reference)?, 0.0, 0))
            }
            Rule::Eft { gamma, temperature } => {
                let z = all(z_ref, z_policy)?;
                // Every token is a candidate; V_α was only counted.
                let mut every = Vec::with_capacity(z.len());
                plausible(z_policy, 0.0, &mut every)?;
                let gains = &mut self.selector.advantages;
                let clipped = advantages(&every, |i| z[every[i].id as usize], self.ratio_clip, gains)?;
                let score = |i: usize| f64::from(every[i].z) + (gamma - 1.0) * gains[i];
                let at = draw(&every, score, temperature, uniform, &mut self.weights);
                let favourite = every.iter().position(|c| c.id == self.top.id).map_or(0.0, |i| gains[i]);
                let gain = gains[at] - favourite;
                Ok(Choice { token: every[at].id, top: self.top.id, candidates: count, gain, clipped })
            }
            _ if count == 1 => Ok(choice(self.top.id, 0.0, 0)),
            _ => self.by_advantage(z_policy, z_ref, uniform),
        }
    }

    fn by_advantage(&mut self, z_policy: &[f32], z_ref: RefLogits<'_>, uniform: f64) -> Result<Choice> {
        let Selector { candidates, advantages: gains } = &mut self.selector;
        let clipped = match z_ref {
            RefLogits::All(z) => {
                same_length(z_policy.len(), z.len())?;
                advantages(candidates, |i| z[candidates[i].id as usize], self.ratio_clip, gains)?
            }
            RefLogits::Candidates(z) => {
                same_length(candidates.len(), z.len())?;
                advantages(candidates, |i| z[i], self.ratio_clip, gains)?
            }
            RefLogits::None => {
                let expected = format!("given: `{:?}` compares {} candidates", self.rule, candidates.len());
                return Err(Error::invalid("z_ref", expected, "none"));
            }
        };
        let at = match self.rule {
            Rule::AadSample { tau } => draw(candidates, |i| gains[i], tau, uniform, &mut self.weights),
            Rule::AadMix { w } => best(candidates, |i| w * gains[i] + (1.0 - w) * f64::from(candidates[i].z)),
            _ => best_advantage(candidates, gains),
        };
        let favourite = candidates.iter().position(|c| c.id == self.top.id).map_or(0.0, |i| gains[i]);
        let gain = gains[at] - favourite;
        Ok(Choice { token: candidates[at].id, top: self.top.id, candidates: candidates.len(), gain, clipped })
    }

    /// Whether [`decide`](Self::decide) needs the reference after these candidates.
    pub fn needs_reference(&self) -> bool {
        match self.rule.needs() {
            Needs::Policy => false,
            Needs::All => true,
            Needs::Candidates => self.selector.candidates.len() > 1,
        }
    }

    /// Whether the candidates' logits of the reference are all that it reads.
    pub fn needs_candidates_only(&self) -> bool {
        self.rule.needs() == Needs::Candidates
    }

    /// The candidates of the last step, by rising id.
    pub fn last_candidates(&self) -> &[Candidate] {
        &self.selector.candidates
    }
}

/// One step of a rule on all logits.
///
/// ```
/// use aligned_decoding::{Rule, rules::choose};
///
/// let (policy, reference) = ([2.0f32, 1.9, 0.5], [2.5f32, 1.0, 0.5]);
/// assert_eq!(choose(Rule::Aad, &policy, &reference, 0.1, 0.0)?.token, 1);
/// assert_eq!(choose(Rule::GreedyDpo, &policy, &reference, 0.1, 0.0)?.token, 0);
/// # Ok::<(), aligned_decoding::Error>(())
/// ```
///
/// # Errors
/// As [`Chooser::new`], [`Chooser::candidates`] and [`Chooser::decide`].
pub fn choose(rule: Rule, z_policy: &[f32], z_ref: &[f32], alpha: f64, uniform: f64) -> Result<Choice> {
    same_length(z_policy.len(), z_ref.len())?;
    let mut chooser = Chooser::new(rule, crate::select::RATIO_CLIP)?;
    chooser.candidates(z_policy, alpha)?;
    chooser.decide(z_policy, RefLogits::All(z_ref), uniform)
}

/// Extrapolation across sizes: arg-max of ℓ_big + γ(ℓ_policy − ℓ_ref), a small pair's advantage on a large base model
/// \[prior work: emulated fine-tuning, proxy tuning\].
///
/// # Errors
/// [`Error::InvalidArgument`] for slices of different lengths; [`Error::NonFiniteLogits`]; [`Error::NothingAllowed`].
pub fn cross_size(z_big: &[f32], z_policy: &[f32], z_ref: &[f32], gamma: f64) -> Result<u32> {
    same_length(z_big.len(), z_policy.len())?;
    same_length(z_policy.len(), z_ref.len())?;
    let mut every = Vec::new();
    plausible(z_policy, 0.0, &mut every)?;
    let mut gains = Vec::new();
    advantages(&every, |i| z_ref[every[i].id as usize], crate::select::RATIO_CLIP, &mut gains)?;
    // The big model forbids with −∞ too.
    let mut allowed = Vec::with_capacity(every.len());
    let mut scores = Vec::with_capacity(every.len());
    for (candidate, gain) in every.iter().zip(&gains) {
        let z = z_big[candidate.id as usize];
        if z.is_nan() || z == f32::INFINITY {
            return Err(Error::non_finite(Side::Policy, candidate.id, z));
        }
        if z > f32::NEG_INFINITY {
            allowed.push(Candidate { id: candidate.id, z });
            scores.push(f64::from(z) + gamma * gain);
        }
    }
    if allowed.is_empty() {
        return Err(Error::NothingAllowed { step: 0, row: 0 });
    }
    Ok(allowed[best(&allowed, |i| scores[i])].id)
}

/// Places of the tokens that would complete n tokens in a row that the text has already.
pub fn repeating(text: &[u32], n: usize) -> impl Iterator<Item = u32> + '_ {
    let known = if n == 0 || text.len() + 1 < n { &[][..] } else { text };
    let ending = &known[(known.len() + 1).saturating_sub(n).min(known.len())..];
    known.windows(n.max(1)).filter(move |w| w[..n - 1] == *ending).map(move |w| w[n - 1])
}

/// All logits of the reference.
fn all<'a>(z_ref: RefLogits<'a>, z_policy: &[f32]) -> Result<&'a [f32]> {
    match z_ref {
        RefLogits::All(z) => same_length(z_policy.len(), z.len()).map(|()| z),
        _ => Err(Error::invalid("z_ref", "given for all tokens, because the rule looks at all", "not")),
    }
}

/// A draw from softmax(score/temperature), or the best for the temperature 0.
fn draw(
    candidates: &[Candidate],
    score: impl Fn(usize) -> f64,
    temperature: f64,
    uniform: f64,
    weights: &mut Vec<f64>,
) -> usize {
    let top = best(candidates, &score);
    if temperature == 0.0 {
        return top;
    }
    let max = score(top);
    weights.clear();
    weights.extend((0..candidates.len()).map(|i| ((score(i) - max) / temperature).exp()));
    invert(weights, uniform)
}

/// The place at which the distribution function of `weights` passes `uniform`.
fn invert(weights: &[f64], uniform: f64) -> usize {
    let target = uniform * weights.iter().sum::<f64>();
    let mut sum = 0.0;
    let passed = weights.iter().position(|w| {
        sum += w;
        sum > target
    });
    // Rounding may leave the target at the very end: the last that has a weight then.
    passed.or_else(|| weights.iter().rposition(|w| *w > 0.0)).unwrap_or(0)
}

/// A draw from one model: temperature first, then top-p, then min-p.
fn sample(
    z: &[f32],
    [temperature, uniform]: [f64; 2],
    top_p: Option<f64>,
    min_p: Option<f64>,
    model: Side,
) -> Result<u32> {
    let mut kept = Vec::new();
    let named = |error| match error {
        Error::NonFiniteLogits { step, row, id, value, .. } => Error::NonFiniteLogits { step, row, model, id, value },
        other => other,
    };
    let top = plausible(z, 0.0, &mut kept).map_err(named)?;
    if temperature == 0.0 {
        return Ok(top.id);
    }
    let scaled = |c: &Candidate| ((f64::from(c.z) - f64::from(top.z)) / temperature).exp();
    if let Some(p) = top_p {
        keep_top_p_by(&mut kept, p, scaled);
    }
    if let Some(p) = min_p {
        kept.retain(|c| scaled(c) >= p);
    }
    let weights: Vec<f64> = kept.iter().map(scaled).collect();
    Ok(kept[invert(&weights, uniform)].id)
}

/// Keeps the k highest; of equal ones those with the lower id.
fn keep_top_k(candidates: &mut Vec<Candidate>, k: usize) {
    if k < candidates.len() {
        candidates.select_nth_unstable_by(k, |a, b| by_rank(*a, *b));
        candidates.truncate(k);
        candidates.sort_unstable_by_key(|c| c.id);
    }
}

fn by_rank(a: Candidate, b: Candidate) -> std::cmp::Ordering {
    b.z.total_cmp(&a.z).then(a.id.cmp(&b.id))
}

fn keep_top_p(candidates: &mut Vec<Candidate>, p: f64) {
    let max = candidates.iter().map(|c| c.z).fold(f32::NEG_INFINITY, f32::max);
    keep_top_p_by(candidates, p, |c| (f64::from(c.z) - f64::from(max)).exp());
}

/// Keeps the heaviest until their weights sum to the share p; the one that crosses it is kept.
fn keep_top_p_by(candidates: &mut Vec<Candidate>, p: f64, weight: impl Fn(&Candidate) -> f64) {
    candidates.sort_unstable_by(|a, b| by_rank(*a, *b));
    let total: f64 = candidates.iter().map(&weight).sum();
    let mut sum = 0.0;
    let crossing = candidates.iter().position(|c| {
        sum += weight(c);
        sum >= p * total
    });
    candidates.truncate(crossing.map_or(candidates.len(), |at| at + 1));
    candidates.sort_unstable_by_key(|c| c.id);
}
