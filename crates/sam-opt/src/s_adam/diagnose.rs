//! Roughness of a loss around a point, without an optimizer.

use super::config::{ProbeNorm, check_probe};
use super::lgi::{kink_from_losses, lgi_from_probes, lgi_from_residuals, lgi_interval, null_lgi_p_value};
use super::probe::{Prober, Reading};
use crate::pass::{Pass, PassKind};
use crate::scope::{StepScope, StepSeed, without_grad};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use tensor::ndarray::Array1;
use tensor::tch::{self, Device, Kind, Tensor};
use tensor::{ParamSet, Seed};

/// Settings of a diagnosis.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProbeOpts {
    /// Directions.
    pub k_directions: usize,
    /// Radius σ, in parameter units.
    pub sigma: f64,
    /// ζ of the published statistic.
    pub zeta: f64,
    /// What has length 1 in a direction.
    pub probe_norm: ProbeNorm,
    /// Also the kink form, with four forward passes a direction instead of one.
    pub kink: bool,
    /// Reseeds libtorch's global generator before every pass, and after the last one by a number drawn from it before the
    /// first.
    pub sync_rng: bool,
    /// Level of the interval.
    pub confidence: f64,
    /// Seed of the noise.
    pub seed: u64,
}

impl Default for ProbeOpts {
    fn default() -> Self {
        Self {
            k_directions: 32,
            sigma: 0.01,
            zeta: 1e-6,
            probe_norm: ProbeNorm::PerTensor,
            kink: true,
            sync_rng: true,
            confidence: 0.95,
            seed: 0,
        }
    }
}

impl ProbeOpts {
    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::InvalidK`], [`Error::InvalidSigma`] or [`Error::InvalidConfig`] naming the field.
    pub fn validate(&self) -> Result<()> {
        check_probe(self.k_directions, self.sigma, self.zeta)?;
        if !(self.confidence > 0.0 && self.confidence < 1.0) {
            return Err(Error::invalid("confidence", "above 0 and below 1", self.confidence));
        }
        Ok(())
    }
}

/// How rough a loss is around a point.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LgiReport {
    /// Loss at the point.
    pub loss: f64,
    /// The published LGI: about 1 on smooth losses, lower at kinks.
    pub lgi: f64,
    /// Interval of the value that infinitely many directions would give, which is at most 1 (the value from `k` of them
    /// can be up to `k/(k − 1)`): the delta method on mean over standard deviation of the slopes. `None` for fewer than
    /// eight directions and for slopes that are all 0.
    pub lgi_interval: Option<(f64, f64)>,
    /// Two-sided p-value of it, taken with ζ = 0, under the law of smooth losses in many dimensions (at least some dozens: in few
    /// dimensions slopes aren't Gaussian); `None` for fewer than two directions.
    pub p_value: Option<f64>,
    /// The residual form, 0 where the gradient predicts the slopes; `None` without a gradient.
    pub residual: Option<f64>,
    /// The kink form, 0 on quadratic functions; `None` where it wasn't asked for.
    pub kink: Option<f64>,
    /// The squared slope `s` that both compare with: the expected one of the gradient, or the mean of the central
    /// differences where there is no gradient; NaN where there is neither.
    pub slope_square: f64,
    /// Slopes `D_i`.
    pub probe_values: Vec<f64>,
    /// As [`SAdamStats::probe_snr`](super::SAdamStats::probe_snr).
    pub probe_snr: f64,
    /// Directions dropped because a loss wasn't finite.
    pub probes_dropped: usize,
    /// Forward passes.
    pub forwards: usize,
    /// As [`SAdamStats::probe_below_precision`](super::SAdamStats::probe_below_precision).
    pub probe_below_precision: bool,
}

/// Measures the roughness of the closure's loss around the parameters, which are what they were afterwards. Running
/// statistics that the closure's forward passes move stay moved: use evaluation mode or [`probe_lgi_keeping`].
///
/// The instantaneous squared slope is the residual form's reference here: near a minimum, where the gradient vanishes,
/// read `residual` and `kink` with `slope_square` beside them.
///
/// # Errors
/// Invalid options, a loss that isn't finite or has no gradient, parameters under an open guard, half-precision
/// parameters that the radius can't move.
pub fn probe_lgi(
    params: &ParamSet,
    closure: impl FnMut(&Pass<'_>) -> Result<Tensor>,
    opts: &ProbeOpts,
) -> Result<LgiReport> {
    probe_lgi_keeping(params, &[], closure, opts)
}

/// As [`probe_lgi`], and puts `buffers` (running statistics) back too.
///
/// # Errors
/// As [`probe_lgi`].
pub fn probe_lgi_keeping(
    params: &ParamSet,
    buffers: &[Tensor],
    mut closure: impl FnMut(&Pass<'_>) -> Result<Tensor>,
    opts: &ProbeOpts,
) -> Result<LgiReport> {
    opts.validate()?;
    // Drawn from the stream as it is, so that the stream after the diagnosis depends on where it was before: otherwise
    // every diagnosis would lead to the same masks and shuffles.
    let resume =
        if opts.sync_rng { Some(Tensor::f_randint(i64::MAX, [1i64], (Kind::Int64, Device::Cpu))?) } else { None };
    let _resume = Resume(resume.map(|drawn| drawn.int64_value(&[0])));
    // Never committed: the diagnosis leaves the buffers as they were.
    let scope = StepScope::open(buffers, StepSeed::new(opts.seed, 0), opts.sync_rng)?;
    let mut call = |kind: PassKind| {
        let seed = scope.seed_pass(0);
        closure(&Pass { kind, step: 0, micro: 0, seed, batch_statistics: true, overrides: None })
    };
    let read = |loss: &Tensor, pass| Reading::of(loss)?.ok_or_else(|| Error::NonScalarLoss { pass, got: loss.size() });
    let pass = PassKind::Main;
    let loss = call(pass)?;
    let center = read(&loss, pass)?;
    if !center.value.is_finite() {
        return Err(Error::NonFinite { what: "loss", pass, value: center.value });
    }
    let scalar = if loss.numel() == 1 { loss.f_reshape([] as [i64; 0])? } else { loss.f_mean(loss.kind())? };
    let gradient = params.gradient(&scalar)?;
    let present: Vec<usize> = (0..params.len()).filter(|&i| gradient.parts()[i].is_some()).collect();
    if present.is_empty() {
        return Err(Error::NoGradient { pass });
    }
    let guard = params.guard()?;
    let prober = Prober {
        params: present.iter().map(|&i| &params.tensors()[i]).collect(),
        originals: present.iter().map(|&i| &guard.originals()[i]).collect(),
        grads: gradient.present(),
        sigma: opts.sigma,
        norm: opts.probe_norm,
        seed: Seed::new(opts.seed).child("sam-opt.probe-lgi"),
    };
    let names: Vec<&str> = present.iter().map(|&i| params.names()[i].as_str()).collect();
    let below = prober.check_precision(&names)?;
    let calls = Cell::new(0);
    let probed = prober.run(opts.k_directions, opts.kink, center.value, || {
        let pass = PassKind::Probe(calls.replace(calls.get() + 1));
        Ok(read(&without_grad(|| call(pass))?, pass)?.value)
    })?;
    let slope_square = prober.slope_square()?;
    let snr = probed.snr(center.rounding);
    let residual = Some(lgi_from_residuals(&probed.residuals, slope_square));
    let kink = opts.kink.then(|| lgi_from_residuals(&probed.kinks, slope_square));
    Ok(LgiReport {
        residual,
        kink,
        slope_square,
        probe_snr: snr,
        probes_dropped: probed.dropped,
        forwards: 1 + probed.forwards,
        probe_below_precision: below,
        ..published(center.value, probed.slopes, opts)
    })
}

/// As [`probe_lgi`] for a plain function of a vector, in f64; without a gradient there is no residual form.
///
/// ```
/// use sam_opt::{s_adam::{ProbeOpts, probe_lgi_of}, tensor::ndarray::Array1};
/// let at = Array1::zeros(100);
/// let report = probe_lgi_of(|x| x.iter().map(|v| v.abs()).sum(), &at, None, &ProbeOpts::default())?;
/// assert!(report.lgi < 0.01, "the L1 norm at 0 rises alike in all directions");
/// # Ok::<(), sam_opt::Error>(())
/// ```
///
/// # Errors
/// Invalid options, an empty vector, a gradient of another length, a value at `at` that isn't finite.
pub fn probe_lgi_of(
    mut f: impl FnMut(&Array1<f64>) -> f64,
    at: &Array1<f64>,
    gradient: Option<&Array1<f64>>,
    opts: &ProbeOpts,
) -> Result<LgiReport> {
    opts.validate()?;
    if at.is_empty() {
        return Err(Error::invalid("at", "a vector of at least one number", 0));
    }
    if let Some(gradient) = gradient
        && gradient.len() != at.len()
    {
        return Err(Error::invalid("gradient", format!("as long as the point ({})", at.len()), gradient.len()));
    }
    let center = f(at);
    if !center.is_finite() {
        return Err(Error::NonFinite { what: "loss", pass: PassKind::Main, value: center });
    }
    let seed = Seed::new(opts.seed).child("sam-opt.probe-lgi");
    let (mut slopes, mut residuals, mut kinks, mut central) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut signal, mut dropped, mut forwards) = (0.0, 0, 1);
    for i in 0..opts.k_directions as u64 {
        let mut u = Array1::from_iter(seed.index(i).normal(at.len()).into_iter().map(f64::from));
        let length = u.dot(&u).sqrt();
        u /= length + 1e-12;
        let mut value = |radius: f64| f(&(at + &(&u * (radius * opts.sigma))));
        let plus = value(1.0);
        let others = opts.kink.then(|| [value(-1.0), value(0.5), value(-0.5)]);
        forwards += if opts.kink { 4 } else { 1 };
        if !plus.is_finite() || others.is_some_and(|losses| losses.iter().any(|loss| !loss.is_finite())) {
            dropped += 1;
            continue;
        }
        signal += (plus - center).powi(2);
        slopes.push((plus - center) / opts.sigma);
        if let Some(gradient) = gradient {
            residuals.push((plus - center) / opts.sigma - gradient.dot(&u));
        }
        if let Some([minus, half_plus, half_minus]) = others {
            kinks.push(kink_from_losses(center, [plus, minus, half_plus, half_minus], opts.sigma));
            central.push((plus - minus) / (2.0 * opts.sigma));
        }
    }
    let slope_square = match gradient {
        Some(gradient) => gradient.dot(gradient) / at.len() as f64,
        None => central.iter().map(|c| c * c).sum::<f64>() / central.len() as f64,
    };
    let rounding = (0.5f64.powi(53) * center.abs()).max(f64::MIN_POSITIVE);
    Ok(LgiReport {
        residual: gradient.map(|_| lgi_from_residuals(&residuals, slope_square)),
        kink: opts.kink.then(|| lgi_from_residuals(&kinks, slope_square)),
        slope_square,
        probe_snr: (signal / slopes.len() as f64).sqrt() / rounding,
        probes_dropped: dropped,
        forwards,
        ..published(center, slopes, opts)
    })
}

/// Reseeds libtorch's stream when dropped, after the scope that was opened later.
struct Resume(Option<i64>);

impl Drop for Resume {
    fn drop(&mut self) {
        if let Some(seed) = self.0 {
            tch::manual_seed(seed);
        }
    }
}

/// The published statistic with its interval and p-value; the rest is left for the caller.
fn published(loss: f64, slopes: Vec<f64>, opts: &ProbeOpts) -> LgiReport {
    let lgi = lgi_from_probes(&slopes, opts.zeta);
    LgiReport {
        loss,
        lgi,
        lgi_interval: lgi_interval(&slopes, opts.confidence),
        // The law is that of ζ = 0: with ζ the statistic falls where slopes are small, on smooth losses too.
        p_value: null_lgi_p_value(lgi_from_probes(&slopes, 0.0), slopes.len()),
        residual: None,
        kink: None,
        slope_square: f64::NAN,
        probe_values: slopes,
        probe_snr: f64::NAN,
        probes_dropped: 0,
        forwards: 0,
        probe_below_precision: false,
    }
}
