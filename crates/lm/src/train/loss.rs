//! Losses on log-probabilities. They know nothing of a decoder.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use tensor::tch::{Kind, Tensor};

/// Log-probability of each token given those before it: `[batch, time − 1]`, entry `t` that of token `t + 1`.
///
/// `logits` is `[batch, time, vocab]`, `ids` `[batch, time]` (i64), `mask` `[batch, time]` (bool) the tokens that count.
/// The others have 0, and neither they nor the logits in front of them get a gradient. The sums are f32, f64 for f64.
///
/// # Errors
/// [`Error::Shape`] for shapes that don't fit; [`Error::TokenOutOfRange`] for a counted token beyond the vocabulary.
pub fn token_log_probs(logits: &Tensor, ids: &Tensor, mask: &Tensor) -> Result<Tensor> {
    let [batch, time] = batch_and_time(ids)?;
    if logits.dim() != 3 || logits.size()[..2] != [batch, time] {
        return Err(Error::shape("The logits", format!("[{batch}, {time}, vocab]"), logits));
    }
    let counted = Counted::new(ids, mask)?;
    let rows = logits.f_reshape([batch * time, logits.size()[2]])?.f_index_select(0, &counted.before)?; // (n, vocab)
    counted.spread(&counted.log_probs(&rows)?)
}

fn batch_and_time(ids: &Tensor) -> Result<[i64; 2]> {
    match ids.size()[..] {
        [batch, time] if batch > 0 && time > 1 => Ok([batch, time]),
        _ => Err(Error::shape("The tokens", "[batch, time] with at least 2 tokens", ids)),
    }
}

/// Where the counted tokens of a batch are: for models that compute logits only there.
#[derive(Debug)]
pub struct Counted {
    /// Place in `[batch · time]` of the token before each counted one, whose logits predict it, `[n]`.
    pub before: Tensor,
    /// The counted tokens, `[n]` of i64.
    pub targets: Tensor,
    /// Place in `[batch · (time − 1)]`.
    place: Tensor,
    batch: i64,
    time: i64,
}

impl Counted {
    /// For `ids` and `mask` as [`token_log_probs`] takes them. The first token of a row has none before it and never
    /// counts.
    ///
    /// # Errors
    /// [`Error::Shape`] for shapes that don't fit.
    pub fn new(ids: &Tensor, mask: &Tensor) -> Result<Self> {
        let [batch, time] = batch_and_time(ids)?;
        if mask.size() != [batch, time] {
            return Err(Error::shape("The mask of counted tokens", format!("[{batch}, {time}]"), mask));
        }
        let place = mask.f_narrow(1, 1, time - 1)?.f_reshape([-1])?.f_nonzero()?.f_reshape([-1])?; // (n)
        let targets = ids.f_narrow(1, 1, time - 1)?.f_reshape([-1])?.f_index_select(0, &place)?;
        // Row b, column t of time − 1 columns is row b, column t of time ones.
        let before = place.f_add(&place.f_divide_scalar_mode(time - 1, "floor")?)?;
        Ok(Self { before, targets, place, batch, time })
    }

    /// Log-probabilities `[n]` of the counted tokens from the logits `[n, vocab]` before them.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::TokenOutOfRange`].
    pub fn log_probs(&self, logits: &Tensor) -> Result<Tensor> {
        let n = self.targets.size()[0];
        if logits.dim() != 2 || logits.size()[0] != n {
            return Err(Error::shape("The logits of counted tokens", format!("[{n}, vocab]"), logits));
        }
        let vocab = logits.size()[1];
        if n > 0 {
            let (low, high) = (self.targets.f_min()?.f_int64_value(&[])?, self.targets.f_max()?.f_int64_value(&[])?);
            if low < 0 || high >= vocab {
                let id = if low < 0 { low } else { high };
                let first = self.targets.f_eq(id)?.f_to_kind(Kind::Int64)?.f_argmax(0, false)?;
                let place = self.place.f_int64_value(&[first.f_int64_value(&[])?])?;
                return Err(Error::TokenOutOfRange { id, row: (place / (self.time - 1)) as usize, vocab });
            }
        }
        let logits = logits.f_to_kind(if logits.kind() == Kind::Double { Kind::Double } else { Kind::Float })?;
        let chosen = logits.f_gather(1, &self.targets.f_unsqueeze(1)?, false)?.f_squeeze_dim(1)?;
        Ok(chosen.f_sub(&logits.f_logsumexp([1i64].as_slice(), false)?)?)
    }

    /// Puts values `[n]` in their places of `[batch, time − 1]`, with 0 elsewhere.
    ///
    /// # Errors
    /// What libtorch reports.
    pub fn spread(&self, values: &Tensor) -> Result<Tensor> {
        let all = Tensor::f_zeros([self.batch * (self.time - 1)], (values.kind(), values.device()))?;
        Ok(all.f_index_copy(0, &self.place, values)?.f_view([self.batch, self.time - 1])?)
    }
}

/// Mean negative log-likelihood of the counted tokens, a scalar: what supervised fine-tuning minimizes. Arguments as for
/// [`token_log_probs`].
///
/// # Errors
/// As [`token_log_probs`]; [`Error::InvalidArgument`] if no token counts.
pub fn next_token_nll(logits: &Tensor, ids: &Tensor, mask: &Tensor) -> Result<Tensor> {
    let log_probs = token_log_probs(logits, ids, mask)?;
    let n = mask.f_narrow(1, 1, mask.size()[1] - 1)?.f_sum(Kind::Int64)?.f_int64_value(&[])?;
    if n == 0 {
        return Err(Error::invalid("mask", "one with at least one counted token after the first", "one without"));
    }
    Ok(log_probs.f_sum(log_probs.kind())?.f_neg()?.f_div_scalar(n)?)
}

/// Which function of the margin is minimized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum DpoKind {
    /// `−(1 − ε) log σ(m) − ε log σ(−m)` with the label smoothing ε. ("Direct Preference Optimization: Your Language Model
    /// is Secretly a Reward Model", Rafailov et al., 2023.)
    #[default]
    Sigmoid,
    /// `(m/β − 1/(2β))²`. ("A General Theoretical Paradigm to Understand Learning from Human Preferences", Azar et al.,
    /// 2023.)
    Ipo,
}

/// Settings of [`dpo_loss`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DpoLoss {
    /// β, how much a nat of log-ratio counts.
    pub beta: f64,
    /// The function of the margin.
    pub kind: DpoKind,
    /// ε: the share of pairs believed to be labelled the wrong way round; [`DpoKind::Sigmoid`] only.
    pub label_smoothing: f64,
    /// Weight of the negative log-likelihood of the chosen texts, a mean over the tokens of a text and then over texts. It
    /// holds their probability up, which the margin alone doesn't.
    pub sft_weight: f64,
}

impl Default for DpoLoss {
    /// β = 0.1, sigmoid, nothing else.
    fn default() -> Self {
        Self { beta: 0.1, kind: DpoKind::Sigmoid, label_smoothing: 0.0, sft_weight: 0.0 }
    }
}

impl DpoLoss {
    /// # Errors
    /// [`Error::InvalidArgument`] for the first field that can't be.
    pub fn validate(&self) -> Result<()> {
        if !(self.beta.is_finite() && self.beta > 0.0) {
            return Err(Error::invalid("beta", "positive and finite", self.beta));
        }
        if !(0.0..0.5).contains(&self.label_smoothing) {
            return Err(Error::invalid("label_smoothing", "from 0 to below 0.5", self.label_smoothing));
        }
        if self.kind == DpoKind::Ipo && self.label_smoothing != 0.0 {
            let expected = "0 with IPO, which has no labels to smooth";
            return Err(Error::invalid("label_smoothing", expected, self.label_smoothing));
        }
        if !(self.sft_weight.is_finite() && self.sft_weight >= 0.0) {
            return Err(Error::invalid("sft_weight", "at least 0 and finite", self.sft_weight));
        }
        Ok(())
    }
}

/// Log-probabilities of `n` pairs of texts, each summed over the tokens of its completion.
#[derive(Debug)]
pub struct PairScores {
    /// Of the preferred texts, `[n]`.
    pub chosen: Tensor,
    /// Of the others, `[n]`.
    pub rejected: Tensor,
}

/// What [`dpo_loss`] finds.
#[derive(Debug)]
pub struct DpoOutput {
    /// The loss, a scalar, mean over pairs.
    pub loss: Tensor,
    /// `m = β [log π(y_w)/π_ref(y_w) − log π(y_l)/π_ref(y_l)]`, `[n]`, without gradient.
    pub margins: Tensor,
    /// Share of pairs with a positive margin.
    pub accuracy: f64,
    /// `log π(y_w)/π_ref(y_w)`, `[n]`, without gradient: falling far below 0 means that the policy is losing the texts that
    /// it should like.
    pub chosen_ratios: Tensor,
    /// `log π(y_l)/π_ref(y_l)`, `[n]`, without gradient.
    pub rejected_ratios: Tensor,
}

/// The loss of direct preference optimization.
///
/// `chosen_tokens` `[n]` is the number of tokens of each chosen text, which only [`DpoLoss::sft_weight`] needs. The
/// reference gets no gradient. With policy = reference the loss is ln 2 (1/(4β²) for IPO).
///
/// # Errors
/// As [`DpoLoss::validate`]; [`Error::Shape`] for log-probabilities that aren't `[n]` with the same n ≥ 1.
pub fn dpo_loss(
    policy: &PairScores,
    reference: &PairScores,
    chosen_tokens: &Tensor,
    config: &DpoLoss,
) -> Result<DpoOutput> {
    config.validate()?;
    let n = policy.chosen.numel() as i64;
    let named = [
        ("The policy's chosen log-probabilities", &policy.chosen),
        ("The policy's rejected log-probabilities", &policy.rejected),
        ("The reference's chosen log-probabilities", &reference.chosen),
        ("The reference's rejected log-probabilities", &reference.rejected),
        ("The numbers of chosen tokens", chosen_tokens),
    ];
    for (what, tensor) in named {
        if n == 0 || tensor.size() != [n] {
            return Err(Error::shape(what, format!("[{}]", n.max(1)), tensor));
        }
    }
    let kind = policy.chosen.kind();
    let ratio = |policy: &Tensor, reference: &Tensor| policy.f_sub(&reference.f_detach()?.f_to_kind(kind)?);
    let chosen = ratio(&policy.chosen, &reference.chosen)?;
    let rejected = ratio(&policy.rejected, &reference.rejected)?;
    let difference = chosen.f_sub(&rejected)?;
    let margins = difference.f_mul_scalar(config.beta)?;
    let losses = match config.kind {
        DpoKind::Sigmoid if config.label_smoothing == 0.0 => margins.f_log_sigmoid()?.f_neg()?,
        DpoKind::Sigmoid => {
            let right = margins.f_log_sigmoid()?.f_mul_scalar(config.label_smoothing - 1.0)?;
            right.f_sub(&margins.f_neg()?.f_log_sigmoid()?.f_mul_scalar(config.label_smoothing)?)?
        }
        DpoKind::Ipo => difference.f_sub_scalar(0.5 / config.beta)?.f_square()?,
    };
    let mut loss = losses.f_mean(kind)?;
    if config.sft_weight > 0.0 {
        let nll = policy.chosen.f_div(&chosen_tokens.f_to_kind(kind)?.f_clamp_min(1.0)?)?.f_mean(kind)?.f_neg()?;
        loss = loss.f_add(&nll.f_mul_scalar(config.sft_weight)?)?;
    }
    let margins = margins.f_detach()?;
    let accuracy = margins.f_gt(0.0)?.f_to_kind(Kind::Double)?.f_mean(Kind::Double)?.f_double_value(&[])?;
    let (chosen_ratios, rejected_ratios) = (chosen.f_detach()?, rejected.f_detach()?);
    Ok(DpoOutput { loss, margins, accuracy, chosen_ratios, rejected_ratios })
}

/// The loss of a reward model under Bradley and Terry's model of preferences: mean of `−log σ(r(y_w) − r(y_l))` over
/// rewards `[n]`.
///
/// # Errors
/// [`Error::Shape`] unless both are `[n]` with the same n ≥ 1.
pub fn bradley_terry(chosen: &Tensor, rejected: &Tensor) -> Result<Tensor> {
    let n = chosen.numel() as i64;
    for (what, tensor) in [("The chosen rewards", chosen), ("The rejected rewards", rejected)] {
        if n == 0 || tensor.size() != [n] {
            return Err(Error::shape(what, format!("[{}]", n.max(1)), tensor));
        }
    }
    Ok(chosen.f_sub(rejected)?.f_log_sigmoid()?.f_mean(chosen.kind())?.f_neg()?)
}
