//! The pair check: are two checkpoints a policy and the model that it was trained from?
//!
//! A wrong reference isn't seen in the output at once: text decoded against it is only worse. What tells them apart is how little
//! preference training changes: tokenizers are the same, weights nearly so, and log-probabilities differ by tenths of a nat a token.

use crate::engine::{Engine, Heads, values};
use crate::generate::{NOT_A_PAIR, log_probs_of};
use crate::pair::ModelPair;
use crate::select::{check_alpha, plausible};
use crate::{Error, Result};
use lm::linear::Projection;
use lm::lora::Adapter;
use lm::model::{CausalLm, Model};
use serde::{Deserialize, Serialize};
use tensor::stats::quantile;
use tensor::tch::{Kind, Tensor, no_grad_guard};

/// How two models differ on texts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Examination {
    /// Tokens that were predicted.
    pub tokens: usize,
    /// Mean A of the texts' tokens, in nats.
    pub mean_advantage: f64,
    /// Mean |A|.
    pub mean_abs_advantage: f64,
    /// Quantiles of A at 5, 50 and 95 %.
    pub quantiles: [f64; 3],
    /// Mean negative log-likelihood of the tokens under the policy, in nats.
    pub policy_nll: f64,
    /// Under the reference.
    pub reference_nll: f64,
    /// Mean KL(π_d ‖ π_r) over the places, in nats.
    pub divergence: f64,
    /// Share of places where both models like the same token best.
    pub agreement: f64,
    /// Share of places with one candidate, |V_α| = 1: what a lazy reference saves at most.
    pub single_share: f64,
    /// Mean |V_α|.
    pub mean_candidates: f64,
}

/// Compares two models on texts.
///
/// # Errors
/// [`Error::BadAlpha`]; [`Error::EmptyPrompt`], [`Error::ContextOverflow`], [`Error::TokenOutOfRange`]; [`Error::InvalidArgument`] if no
/// text has two tokens; [`Error::NonFiniteLogits`]; what the models report.
pub fn examine<P: CausalLm, R: CausalLm>(
    pair: &ModelPair<P, R>,
    texts: &[Vec<u32>],
    alpha: f64,
) -> Result<Examination> {
    check_alpha(alpha)?;
    let _guard = no_grad_guard();
    let heads = Heads::new(None, pair.tokens())?;
    let (mut advantages, mut ours, mut theirs) = (Vec::new(), 0.0, 0.0);
    let (mut divergence, mut agree, mut single, mut candidates) = (0.0, 0.0, 0, 0);
    let mut kept = Vec::new();
    for (row, text) in texts.iter().enumerate() {
        pair.check_text(row, text, &[])?;
        let n = text.len() - 1;
        if n == 0 {
            continue;
        }
        let ids: Vec<i64> = text.iter().map(|&id| id.into()).collect();
        let read = Tensor::f_from_slice(&ids[..n])?.f_view([1, -1])?.f_to_device(pair.device())?;
        let mut engine = Engine::new(pair, true);
        let policy = engine.read(&read, None)?.f_squeeze_dim(0)?; // (n, width)
        let Some(caught_up) = engine.catch_up()? else { continue };
        let z_policy = heads.all(pair.policy(), &policy)?; // (n, tokens)
        let z_ref = heads.all(pair.reference(), &caught_up.hidden.f_squeeze_dim(0)?)?;
        let (a, b) = (log_probs_of(&z_policy, &ids[1..])?, log_probs_of(&z_ref, &ids[1..])?);
        ours += a.iter().sum::<f64>();
        theirs += b.iter().sum::<f64>();
        advantages.extend(a.iter().zip(&b).map(|(a, b)| a - b));
        let (l_policy, l_ref) = (z_policy.f_log_softmax(-1, None)?, z_ref.f_log_softmax(-1, None)?);
        let terms = l_policy.f_exp()?.f_mul(&l_policy.f_sub(&l_ref)?)?;
        // A token that the policy forbids adds nothing.
        divergence += terms.f_nan_to_num(0.0, None, None)?.f_sum(Kind::Double)?.f_double_value(&[])?;
        let same = z_policy.f_argmax(-1, false)?.f_eq_tensor(&z_ref.f_argmax(-1, false)?)?;
        agree += same.f_to_kind(Kind::Double)?.f_sum(Kind::Double)?.f_double_value(&[])?;
        for (step, z) in values(&z_policy)?.chunks_exact(heads.places()).enumerate() {
            plausible(z, alpha, &mut kept).map_err(|e| heads.located(e, step, row))?;
            single += usize::from(kept.len() == 1);
            candidates += kept.len();
        }
    }
    let n = advantages.len() as f64;
    if advantages.is_empty() {
        return Err(Error::invalid("texts", "at least one of two tokens or more", texts.len()));
    }
    let quantiles = [quantile(&advantages, 0.05)?, quantile(&advantages, 0.5)?, quantile(&advantages, 0.95)?];
    Ok(Examination {
        tokens: advantages.len(),
        mean_advantage: advantages.iter().sum::<f64>() / n,
        mean_abs_advantage: advantages.iter().map(|a| a.abs()).sum::<f64>() / n,
        quantiles,
        policy_nll: -ours / n,
        reference_nll: -theirs / n,
        divergence: divergence / n,
        agreement: agree / n,
        single_share: single as f64 / n,
        mean_candidates: candidates as f64 / n,
    })
}

/// How far a weight has moved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WeightDelta {
    /// Which.
    pub name: String,
    /// Frobenius norm of the difference.
    pub norm: f64,
    /// The same as a share of the reference's norm.
    pub relative: f64,
}

fn delta(name: String, weight: &Tensor, change: &Tensor) -> Result<WeightDelta> {
    let norm = |t: &Tensor| t.f_to_kind(Kind::Double)?.f_norm()?.f_double_value(&[]);
    let (norm, of) = (norm(change)?, norm(weight)?);
    let relative = if of > 0.0 {
        norm / of
    } else if norm > 0.0 {
        f64::INFINITY
    } else {
        0.0
    };
    Ok(WeightDelta { name, norm, relative })
}

/// How far the embeddings and every projection of a policy have moved from the reference's; packed weights are unpacked one by one.
///
/// # Errors
/// [`Error::InvalidArgument`] for models of other shapes.
pub fn weight_deltas(policy: &Model, reference: &Model) -> Result<Vec<WeightDelta>> {
    let _guard = no_grad_guard();
    let layers = reference.config().layers;
    if policy.config().layers != layers {
        let expected = format!("of {layers} layers, as the reference is");
        return Err(Error::invalid("policy", expected, policy.config().layers));
    }
    let mut out = Vec::new();
    let mut add = |name: String, ours: &Tensor, theirs: &Tensor| -> Result<()> {
        if ours.size() != theirs.size() {
            let expected = format!("of the shape {:?}, as the reference's", theirs.size());
            return Err(Error::invalid(format!("`{name}` of the policy"), expected, format!("{:?}", ours.size())));
        }
        let kind = if theirs.kind() == Kind::Double { Kind::Double } else { Kind::Float };
        let theirs = theirs.f_to_kind(kind)?;
        out.push(delta(name, &theirs, &ours.f_to_kind(kind)?.f_sub(&theirs)?)?);
        Ok(())
    };
    add("embeddings".into(), &policy.embedding().weight()?, &reference.embedding().weight()?)?;
    for layer in 0..layers {
        for which in Projection::ALL {
            if let (Some(ours), Some(theirs)) = (policy.linear(layer, which)?, reference.linear(layer, which)?) {
                add(format!("layers.{layer}.{}", which.name()), &ours.weight()?, &theirs.weight()?)?;
            }
        }
    }
    Ok(out)
}

/// What an adapter adds to the projections of a model.
///
/// # Errors
/// What the model's layers report.
pub fn adapter_deltas(model: &Model, adapter: &Adapter) -> Result<Vec<WeightDelta>> {
    let _guard = no_grad_guard();
    let mut out = Vec::new();
    for layer in 0..model.config().layers {
        for which in Projection::ALL {
            if let (Some(linear), Some(change)) = (model.linear(layer, which)?, adapter.weight_delta(layer, which)?) {
                out.push(delta(format!("layers.{layer}.{}", which.name()), &linear.weight()?, &change)?);
            }
        }
    }
    Ok(out)
}

/// What there is to say about a pair, in sentences; empty if nothing is odd. The bounds are ours \[ours\].
pub fn findings(examination: &Examination, weights: &[WeightDelta]) -> Vec<String> {
    let mut out = Vec::new();
    let e = examination;
    if e.mean_abs_advantage > NOT_A_PAIR {
        out.push(format!(
            "The models differ by {:.1} nats a token (above {NOT_A_PAIR}): the reference is probably not the model that this policy \
             was trained from.",
            e.mean_abs_advantage
        ));
    } else if e.mean_abs_advantage == 0.0 {
        out.push("The models are the same: every rule decodes what the policy does greedily.".to_owned());
    } else if e.mean_abs_advantage > 2.0 {
        out.push(format!(
            "The models differ by {:.1} nats a token: the policy has moved far, or this isn't its reference. Expect text to degenerate \
             at small α.",
            e.mean_abs_advantage
        ));
    }
    if e.policy_nll > e.reference_nll + 1.0 {
        out.push(format!(
            "The policy finds the texts much less likely than the reference does ({:.2} against {:.2} nats a token): it may have \
             collapsed, or the two are the wrong way round.",
            e.policy_nll, e.reference_nll
        ));
    }
    if let Some(most) = weights.iter().filter(|w| w.relative > 0.5).max_by(|a, b| a.relative.total_cmp(&b.relative)) {
        out.push(format!(
            "`{}` has moved by {:.0} % of its norm: preference training moves weights by a few percent.",
            most.name,
            100.0 * most.relative
        ));
    }
    out
}
