//! Whether a run's damping did more than a smaller learning rate would have done.

use super::config::{LgiKind, SAdamConfig};
use super::lgi::null_lgi_mean_damping;
use super::stats::SAdamStats;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Collects the dampings of a run.
///
/// ```
/// use sam_opt::{SAdamConfig, s_adam::DampingLog};
/// # let stats: Vec<sam_opt::SAdamStats> = Vec::new();
/// let mut log = DampingLog::new(&SAdamConfig::default());
/// for stats in &stats { // from every `step`
///     log.push(stats);
/// }
/// if let Some(report) = log.report() {
///     println!("{report}");
/// }
/// ```
#[derive(Debug, Clone)]
pub struct DampingLog {
    null: Option<f64>,
    weight_decay: f64,
    damps_decay: bool,
    /// Whether steps without a probe keep the last one's damping.
    probes: bool,
    dampings: Vec<f64>,
    /// The dampings that were measured or drawn anew.
    fresh: Vec<f64>,
    lgis: Vec<f64>,
    lrs: f64,
}

impl DampingLog {
    /// An empty log for runs with these settings.
    pub fn new(config: &SAdamConfig) -> Self {
        let published = matches!(config.lgi, LgiKind::Published | LgiKind::RandomNull);
        Self {
            null: (published && config.damps()).then(|| null_lgi_mean_damping(config.k_directions, config.lambda)),
            weight_decay: config.weight_decay,
            damps_decay: config.damp_weight_decay,
            probes: config.lgi.probes() && config.damps(),
            dampings: Vec::new(),
            fresh: Vec::new(),
            lgis: Vec::new(),
            lrs: 0.0,
        }
    }

    /// Takes a step in.
    pub fn push(&mut self, stats: &SAdamStats) {
        self.dampings.push(stats.damping);
        if stats.forwards > 1 || !self.probes {
            self.fresh.push(stats.damping);
        }
        self.lgis.extend(stats.lgi);
        self.lrs += stats.lr;
    }

    /// What the run's damping was; `None` before the first step.
    pub fn report(&self) -> Option<DampingReport> {
        let n = self.dampings.len();
        if n == 0 {
            return None;
        }
        let mean = self.dampings.iter().sum::<f64>() / n as f64;
        let square: f64 = self.dampings.iter().map(|a| (a - mean).powi(2)).sum();
        // A damping that is kept for some steps would look like memory.
        let autocorrelation = autocorrelation(&self.fresh);
        let lr = self.lrs / n as f64;
        Some(DampingReport {
            steps: n,
            mean_damping: mean,
            sd_damping: (square / n as f64).sqrt(),
            null_mean_damping: self.null,
            mean_lgi: (!self.lgis.is_empty()).then(|| self.lgis.iter().sum::<f64>() / self.lgis.len() as f64),
            autocorrelation,
            equivalent_lr: mean * lr,
            // Decay shrinks by lr·λ; undamped, AdamW at a·lr needs λ/a for that.
            equivalent_weight_decay: if self.damps_decay { self.weight_decay } else { self.weight_decay / mean },
            // Twice the standard error of an autocorrelation of independent numbers.
            constant_explains: autocorrelation <= 1.96 / (self.fresh.len().max(1) as f64).sqrt(),
        })
    }
}

fn autocorrelation(values: &[f64]) -> f64 {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let deviations: Vec<f64> = values.iter().map(|a| a - mean).collect();
    let square: f64 = deviations.iter().map(|d| d * d).sum();
    let lagged: f64 = deviations.windows(2).map(|pair| pair[0] * pair[1]).sum();
    if square > 0.0 { lagged / square } else { 0.0 }
}

/// What the damping of a run was, and which AdamW is the same on average.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DampingReport {
    /// Steps seen.
    pub steps: usize,
    /// Mean damping `a`.
    pub mean_damping: f64,
    /// Its standard deviation from step to step.
    pub sd_damping: f64,
    /// The mean that `k` probes give on a smooth loss in many dimensions; `None` where the LGI isn't the published one.
    pub null_mean_damping: Option<f64>,
    /// Mean LGI, where there was one.
    pub mean_lgi: Option<f64>,
    /// Autocorrelation of the damping from one measurement to the next: what tracks the loss surface has memory, noise hasn't.
    pub autocorrelation: f64,
    /// Learning rate at which AdamW takes steps of the same mean size: `a·η`.
    pub equivalent_lr: f64,
    /// Weight decay that this AdamW needs: decay isn't damped by default.
    pub equivalent_weight_decay: f64,
    /// Whether the damping can't be told from a constant with independent noise, so that a smaller learning rate explains
    /// the run. Such a damping is noise in the step size at best.
    pub constant_explains: bool,
}

impl fmt::Display for DampingReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "This run's damping (mean {:.3} over {} steps) equals AdamW at the learning rate {:.3e} with weight decay {:.3e}.",
            self.mean_damping, self.steps, self.equivalent_lr, self.equivalent_weight_decay
        )?;
        if let Some(null) = self.null_mean_damping {
            write!(f, " On a smooth loss, with slopes well above √ζ, it would be {null:.3}.")?;
        }
        if self.sd_damping <= 1e-12 * self.mean_damping {
            f.write_str(" The damping is constant: this is AdamW at that learning rate.")?;
        } else if self.constant_explains {
            f.write_str(
                " Warning: from step to step the damping is independent noise; a constant, that is a smaller learning rate, explains the result.",
            )?;
        }
        Ok(())
    }
}
