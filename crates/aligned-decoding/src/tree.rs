//! The exact-tree laboratory: texts so short over so few tokens that the optimal policy of a reward is a sum, not a training run.
//!
//! A [`Tree`] has all texts of `depth` tokens over `vocab` tokens, a reference (an independent distribution after each prefix)
//! and a reward of whole texts. [`Tree::optimum`] gives the policy that preference training would reach if it were perfect,
//! π*(y) = π_ref(y) exp(r(y)/β)/Z, by recursion from the leaves over the soft value
//! W(s) = β log E_{y ∼ π_ref(·|s)} exp(r(y)/β) \[paper; token form derived\]. Its advantage is exact: β A(v|s) = W(sv) − W(s).
//!
//! ```
//! use aligned_decoding::{Rule, tensor::Seed, tree::{Tree, TreeConfig}};
//!
//! let tree = Tree::random(&TreeConfig::default(), Seed::new(1))?;
//! let policy = tree.optimum(tree.reward(), 4.0)?;
//! let text = tree.decode(&policy, Rule::Aad, 0.1)?;
//! // The advantages of any text sum to its reward less the soft value of the start.
//! let sum = 4.0 * policy.advantage(&tree, text);
//! assert!((sum - (tree.reward()[text] - policy.value())).abs() < 1e-9);
//! # Ok::<(), aligned_decoding::Error>(())
//! ```

use crate::config::Rule;
use crate::rules::{Chooser, RefLogits};
use crate::select::{RATIO_CLIP, check_alpha};
use crate::{Error, Result};
use rand::Rng as _;
use serde::{Deserialize, Serialize};
use tensor::Seed;

/// How a tree is drawn.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TreeConfig {
    /// Tokens.
    pub vocab: usize,
    /// Tokens of a text.
    pub depth: usize,
    /// Standard deviation of the reference's logits.
    pub spread: f64,
    /// Standard deviation of the part of the reward that isn't a sum over positions.
    pub noise: f64,
    /// Whether the reference's distribution at a position is the same after every prefix.
    pub factorised: bool,
}

impl Default for TreeConfig {
    /// Five tokens, four positions, logits N(0, 2²), reward Σ_t w_t(y_t) + 0.5·noise(y) with standard normal terms.
    fn default() -> Self {
        Self { vocab: 5, depth: 4, spread: 2.0, noise: 0.5, factorised: false }
    }
}

/// Most texts of a tree; it is held whole.
const MOST_TEXTS: usize = 1 << 22;

impl TreeConfig {
    /// # Errors
    /// [`Error::InvalidArgument`] for the first value outside its domain.
    pub fn validate(&self) -> Result<()> {
        if self.vocab < 2 {
            return Err(Error::invalid("vocab", "at least 2", self.vocab));
        }
        let texts = u32::try_from(self.depth).ok().and_then(|depth| self.vocab.checked_pow(depth));
        if self.depth == 0 || texts.is_none_or(|texts| texts > MOST_TEXTS) {
            let expected = format!("at least 1 and so small that there are at most {MOST_TEXTS} texts");
            return Err(Error::invalid("depth", expected, self.depth));
        }
        for (name, x) in [("spread", self.spread), ("noise", self.noise)] {
            if !(x.is_finite() && x >= 0.0) {
                return Err(Error::invalid(name, "at least 0 and finite", x));
            }
        }
        Ok(())
    }
}

/// A reference and a reward over all texts. Text number y has the token ⌊y / vocab^(depth−1−t)⌋ mod vocab at position t; a prefix of
/// t tokens is numbered the same way.
#[derive(Debug, Clone)]
pub struct Tree {
    vocab: usize,
    depth: usize,
    /// By position, log π_ref(v | prefix) at prefix·vocab + v.
    reference: Vec<Vec<f64>>,
    reward: Vec<f64>,
}

/// The optimal policy of a reward.
#[derive(Debug, Clone)]
pub struct Optimum {
    /// By position, log π(v | prefix) at prefix·vocab + v.
    policy: Vec<Vec<f64>>,
    /// By length of the prefix, W(prefix).
    soft: Vec<Vec<f64>>,
}

impl Optimum {
    /// Soft value of the start, W(x) = β log Z.
    pub fn value(&self) -> f64 {
        self.soft[0][0]
    }

    /// Soft values W of the prefixes of so many tokens; of whole texts the reward.
    pub fn soft_values(&self, tokens: usize) -> Option<&[f64]> {
        self.soft.get(tokens).map(Vec::as_slice)
    }

    /// log π(v | prefix) of a position, at prefix·vocab + v.
    pub fn log_probs(&self, position: usize) -> Option<&[f64]> {
        self.policy.get(position).map(Vec::as_slice)
    }

    /// Σ_t A of a text.
    pub fn advantage(&self, tree: &Tree, text: usize) -> f64 {
        tree.log_prob_of(&self.policy, text) - tree.log_prob_of(&tree.reference, text)
    }
}

impl Tree {
    /// Draws reference and reward.
    ///
    /// # Errors
    /// As [`TreeConfig::validate`].
    pub fn random(config: &TreeConfig, seed: Seed) -> Result<Self> {
        config.validate()?;
        let TreeConfig { vocab, depth, spread, .. } = *config;
        let texts = vocab.pow(depth as u32);
        let reference = (0..depth).map(|t| {
            let prefixes = vocab.pow(t as u32);
            let drawn = if config.factorised { vocab } else { prefixes * vocab };
            let z = seed.child("reference").index(t as u64).normal(drawn);
            let logits = (0..prefixes * vocab).map(|i| spread * f64::from(z[i % drawn]));
            let mut logits: Vec<f64> = logits.collect();
            logits.chunks_mut(vocab).for_each(normalize);
            logits
        });
        let reference = reference.collect();
        let weights: Vec<Vec<f32>> = (0..depth).map(|t| seed.child("reward").index(t as u64).normal(vocab)).collect();
        let noise = seed.child("noise").normal(texts);
        let reward = (0..texts).map(|y| {
            let additive: f64 = (0..depth).map(|t| f64::from(weights[t][token(y, t, vocab, depth)])).sum();
            additive + config.noise * f64::from(noise[y])
        });
        Ok(Self { vocab, depth, reference, reward: reward.collect() })
    }

    /// From log-probabilities of the reference, by position at prefix·vocab + v, and rewards of all texts.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for other lengths, or numbers that aren't finite.
    pub fn new(vocab: usize, reference: Vec<Vec<f64>>, reward: Vec<f64>) -> Result<Self> {
        let depth = reference.len();
        TreeConfig { vocab, depth, ..TreeConfig::default() }.validate()?;
        for (t, level) in reference.iter().enumerate() {
            let expected = vocab.pow(t as u32 + 1);
            if level.len() != expected || level.iter().any(|l| !l.is_finite()) {
                let expected = format!("{expected} finite log-probabilities");
                return Err(Error::invalid(format!("the reference at position {t}"), expected, level.len()));
            }
        }
        let tree = Self { vocab, depth, reference, reward: Vec::new() };
        tree.check_reward(&reward)?;
        Ok(Self { reward, ..tree })
    }

    fn check_reward(&self, reward: &[f64]) -> Result<()> {
        let texts = self.vocab.pow(self.depth as u32);
        if reward.len() == texts && reward.iter().all(|r| r.is_finite()) {
            return Ok(());
        }
        Err(Error::invalid("reward", format!("finite, one for each of {texts} texts"), reward.len()))
    }

    /// The true reward of every text.
    pub fn reward(&self) -> &[f64] {
        &self.reward
    }

    /// The true reward with normal noise added to each text: an imperfect preference signal.
    pub fn noisy_reward(&self, deviation: f64, seed: Seed) -> Vec<f64> {
        let noise = seed.child("signal").normal(self.reward.len());
        self.reward.iter().zip(noise).map(|(r, n)| r + deviation * f64::from(n)).collect()
    }

    /// The policy that maximizes E r − β KL(π ‖ π_ref).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for β that isn't positive, or another number of rewards.
    pub fn optimum(&self, reward: &[f64], beta: f64) -> Result<Optimum> {
        if !(beta.is_finite() && beta > 0.0) {
            return Err(Error::invalid("beta", "positive and finite", beta));
        }
        self.check_reward(reward)?;
        let mut soft = vec![Vec::new(); self.depth + 1];
        soft[self.depth] = reward.to_vec();
        let mut policy = vec![Vec::new(); self.depth];
        for t in (0..self.depth).rev() {
            let terms = self.reference[t].iter().zip(&soft[t + 1]).map(|(l, w)| l + w / beta);
            let mut terms: Vec<f64> = terms.collect();
            soft[t] = terms.chunks(self.vocab).map(|terms| beta * log_sum_exp(terms)).collect();
            terms.chunks_mut(self.vocab).for_each(normalize);
            policy[t] = terms;
        }
        Ok(Optimum { policy, soft })
    }

    /// The text that a rule without draws decodes.
    ///
    /// # Errors
    /// [`Error::BadAlpha`], as [`Rule::validate`]; [`Error::InvalidArgument`] for a rule that draws.
    pub fn decode(&self, policy: &Optimum, rule: Rule, alpha: f64) -> Result<usize> {
        if rule.is_random() {
            return Err(Error::invalid("rule", "one that doesn't draw", format!("{rule:?}")));
        }
        self.walk(policy, rule, alpha, || 0.0)
    }

    /// A text that a rule draws.
    ///
    /// # Errors
    /// [`Error::BadAlpha`], as [`Rule::validate`].
    pub fn sample(&self, policy: &Optimum, rule: Rule, alpha: f64, seed: Seed) -> Result<usize> {
        let mut rng = seed.rng();
        self.walk(policy, rule, alpha, || rng.random())
    }

    fn walk(&self, policy: &Optimum, rule: Rule, alpha: f64, mut uniform: impl FnMut() -> f64) -> Result<usize> {
        check_alpha(alpha)?;
        let mut chooser = Chooser::new(rule, RATIO_CLIP)?;
        let mut prefix = 0;
        for t in 0..self.depth {
            let at = prefix * self.vocab..(prefix + 1) * self.vocab;
            let row = |log_probs: &[f64]| log_probs[at.clone()].iter().map(|&l| l as f32).collect::<Vec<f32>>();
            let (z_policy, z_ref) = (row(&policy.policy[t]), row(&self.reference[t]));
            chooser.candidates(&z_policy, alpha)?;
            let choice = chooser.decide(&z_policy, RefLogits::All(&z_ref), uniform())?;
            prefix = prefix * self.vocab + choice.token as usize;
        }
        Ok(prefix)
    }

    /// log π(y) under distributions by position.
    fn log_prob_of(&self, levels: &[Vec<f64>], text: usize) -> f64 {
        let prefix = |tokens: usize| text / self.vocab.pow((self.depth - tokens) as u32);
        (0..self.depth).map(|t| levels[t][prefix(t + 1)]).sum()
    }

    /// π(y) of every text.
    pub fn probabilities(&self, policy: &Optimum) -> Vec<f64> {
        (0..self.reward.len()).map(|y| self.log_prob_of(&policy.policy, y).exp()).collect()
    }

    /// Expected true reward of texts drawn from the policy: a sum over all, without draws.
    pub fn expected_reward(&self, policy: &Optimum) -> f64 {
        self.probabilities(policy).iter().zip(&self.reward).map(|(p, r)| p * r).sum()
    }

    /// Expected true reward of the best of n draws from the policy, by what `picker` thinks of them; exact: the best of n is
    /// at most the i-th worst with the probability F_i^n.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for n = 0 or another number of values.
    pub fn best_of(&self, policy: &Optimum, n: u32, picker: &[f64]) -> Result<f64> {
        if n == 0 {
            return Err(Error::invalid("n", "at least 1", 0));
        }
        self.check_reward(picker)?;
        let probabilities = self.probabilities(policy);
        let mut order: Vec<usize> = (0..picker.len()).collect();
        order.sort_by(|&a, &b| picker[a].total_cmp(&picker[b]));
        let (mut below, mut expected) = (0.0f64, 0.0);
        for y in order {
            let upto = (below + probabilities[y]).min(1.0);
            expected += (upto.powf(f64::from(n)) - below.powf(f64::from(n))) * self.reward[y];
            below = upto;
        }
        Ok(expected)
    }
}

/// The token of a text at a position.
fn token(text: usize, position: usize, vocab: usize, depth: usize) -> usize {
    text / vocab.pow((depth - 1 - position) as u32) % vocab
}

fn log_sum_exp(values: &[f64]) -> f64 {
    let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    max + values.iter().map(|v| (v - max).exp()).sum::<f64>().ln()
}

fn normalize(values: &mut [f64]) {
    let normalizer = log_sum_exp(values);
    for value in values {
        *value -= normalizer;
    }
}
