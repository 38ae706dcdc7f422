//! Entropy-aware beam search over advantages. **A reconstruction, not the paper's**: that the paper has such a variant is reported, its
//! details were not found. Here a beam branches only where the policy, within V_α, is undecided.

use crate::config::{AadConfig, ReferenceMode, StopReason};
use crate::engine::{Engine, Heads, normalizers, values};
use crate::pair::ModelPair;
use crate::rules::repeating;
use crate::select::{advantages, best_advantage, plausible};
use crate::{Error, Result};
use lm::model::CausalLm;
use serde::{Deserialize, Serialize};
use tensor::tch::{Tensor, no_grad_guard};

/// Settings of [`beam`], besides those of a decoding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BeamConfig {
    /// Beams that are kept.
    pub beams: usize,
    /// A beam branches where the entropy of the policy over V_α is above this, in nats; elsewhere it goes on with the highest
    /// advantage.
    pub min_entropy: f64,
    /// The result has the highest Σ A / length^λ.
    pub length_power: f64,
}

impl Default for BeamConfig {
    /// Four beams, half a nat, λ = 1.
    fn default() -> Self {
        Self { beams: 4, min_entropy: 0.5, length_power: 1.0 }
    }
}

/// A text that was found.
#[derive(Debug, Clone, PartialEq)]
pub struct BeamText {
    /// The tokens after the prompt.
    pub tokens: Vec<u32>,
    /// Σ A, in nats.
    pub sum_advantage: f64,
    /// Why it ended.
    pub stop: StopReason,
}

impl BeamText {
    fn score(&self, power: f64) -> f64 {
        self.sum_advantage / (self.tokens.len().max(1) as f64).powf(power)
    }
}

/// A way on from a beam.
struct Branch {
    beam: usize,
    place: u32,
    sum: f64,
}

/// The texts of a prompt, the best first, at most as many as there are beams. Of `config` it reads α, the lengths and stop rules, bans,
/// allowed tokens, the n-gram rule and the clip; the rule is always the arg-max of A.
///
/// # Errors
/// As [`generate`](crate::generate::generate); [`Error::InvalidArgument`] for no beams, or numbers that aren't finite.
pub fn beam<P: CausalLm, R: CausalLm>(
    pair: &ModelPair<P, R>,
    prompt: &[u32],
    config: &AadConfig,
    search: &BeamConfig,
) -> Result<Vec<BeamText>> {
    let config = AadConfig { reference: ReferenceMode::Eager, ..config.clone() };
    config.validate()?;
    if search.beams == 0 {
        return Err(Error::invalid("beams", "at least 1", 0));
    }
    for (name, x) in [("min_entropy", search.min_entropy), ("length_power", search.length_power)] {
        if !x.is_finite() {
            return Err(Error::invalid(name, "finite", x));
        }
    }
    pair.check_text(0, prompt, &[])?;
    let _guard = no_grad_guard();
    let heads = Heads::new(config.allowed.as_deref(), pair.tokens())?;
    let mut engine = Engine::new(pair, true);
    let mut beams = vec![BeamText { tokens: Vec::new(), sum_advantage: 0.0, stop: StopReason::Length }];
    let mut finished: Vec<BeamText> = Vec::new();
    let ids: Vec<i64> = prompt.iter().map(|&id| id.into()).collect();
    let mut input = Tensor::f_from_slice(&ids)?.f_view([1, -1])?.f_to_device(pair.device())?;
    for step in 0..config.max_new_tokens {
        let hidden = engine.read(&input, None)?.f_select(1, -1)?;
        let Some(theirs) = engine.catch_up()? else { break };
        let z_policy = heads.all(pair.policy(), &hidden)?; // (beams, places)
        let z_ref = heads.all(pair.reference(), &theirs.hidden.f_select(1, -1)?)?;
        // A of a place is its raw difference less this.
        let shifts: Vec<f64> =
            normalizers(&z_policy)?.iter().zip(normalizers(&z_ref)?).map(|(ours, theirs)| ours - theirs).collect();
        let (mut ours, theirs) = (values(&z_policy)?, values(&z_ref)?);
        let mut branches = Vec::new();
        for (i, z) in ours.chunks_exact_mut(heads.places()).enumerate() {
            let text = [prompt, &beams[i].tokens].concat();
            let repeated = config.no_repeat_ngram.map(|n| repeating(&text, n).collect::<Vec<_>>()).unwrap_or_default();
            for place in config.banned.iter().chain(&repeated).filter_map(|&id| heads.place(id)) {
                z[place as usize] = f32::NEG_INFINITY;
            }
            let z_ref = &theirs[i * heads.places()..(i + 1) * heads.places()];
            let ways = ways_on(z, z_ref, &config, search).map_err(|e| heads.located(e, step, i))?;
            branches.extend(ways.into_iter().map(|(place, raw)| Branch {
                beam: i,
                place,
                sum: beams[i].sum_advantage + raw - shifts[i],
            }));
        }
        branches.sort_by(|a, b| b.sum.total_cmp(&a.sum));
        branches.truncate(search.beams);
        let (mut kept, mut rows, mut last) = (Vec::new(), Vec::new(), Vec::new());
        for branch in branches {
            let mut tokens = beams[branch.beam].tokens.clone();
            let id = heads.id(branch.place);
            tokens.push(id);
            let mut text = BeamText { tokens, sum_advantage: branch.sum, stop: StopReason::Length };
            let ended = config.stops(prompt.len(), &text.tokens);
            let full = (prompt.len() + text.tokens.len()) as i64 > pair.context();
            if let Some(stop) = ended.or(full.then_some(StopReason::Context)) {
                text.stop = stop;
                finished.push(text);
            } else {
                kept.push(text);
                rows.push(branch.beam as i64);
                last.push(i64::from(id));
            }
        }
        beams = kept;
        if beams.is_empty() {
            break;
        }
        engine.select_rows(&rows)?;
        input = Tensor::f_from_slice(&last)?.f_view([-1, 1])?.f_to_device(pair.device())?;
    }
    finished.extend(beams);
    finished.sort_by(|a, b| b.score(search.length_power).total_cmp(&a.score(search.length_power)));
    finished.truncate(search.beams);
    Ok(finished)
}

/// The tokens with which a text may go on, each with z_d − z_r (clipped): all candidates where the policy is undecided, else the one
/// with the highest advantage.
fn ways_on(z: &[f32], z_ref: &[f32], config: &AadConfig, search: &BeamConfig) -> Result<Vec<(u32, f64)>> {
    let mut candidates = Vec::new();
    plausible(z, config.alpha, &mut candidates)?;
    let mut gains = Vec::new();
    advantages(&candidates, |i| z_ref[candidates[i].id as usize], config.ratio_clip, &mut gains)?;
    let entropy = {
        let normalizer = crate::select::log_sum_exp(&candidates.iter().map(|c| c.z).collect::<Vec<_>>());
        candidates.iter().map(|c| f64::from(c.z) - normalizer).map(|l| -l * l.exp()).sum::<f64>()
    };
    // Gains are relative to a favourite; its raw difference brings them back.
    let raw = |i: usize| {
        let z = z_ref[candidates[i].id as usize];
        (z > f32::NEG_INFINITY).then(|| f64::from(candidates[i].z) - f64::from(z) - gains[i])
    };
    let finite = (0..candidates.len()).filter(|&i| gains[i] < config.ratio_clip).find_map(raw).unwrap_or(0.0);
    let way = |i: usize| (candidates[i].id, gains[i] + finite);
    if entropy > search.min_entropy {
        return Ok((0..candidates.len()).map(way).collect());
    }
    Ok(vec![way(best_advantage(&candidates, &gains))])
}
