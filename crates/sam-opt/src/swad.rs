//! SWAD: averages of the weights over a stretch of training.

use crate::config::at_least;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use tensor::tch::{Kind, Tensor, no_grad};
use tensor::{ParamSet, ParamVec};

/// Settings of [`SwadAverager`] \[prior work: SWAD\].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SwadConfig {
    /// `N_s`: the average starts where the validation loss of the oldest of so many evaluations is the smallest.
    pub patience_start: usize,
    /// `N_e`: it ends when the smallest loss of the last so many evaluations is above the threshold.
    pub patience_end: usize,
    /// The threshold, in means of the losses at the start.
    pub tolerance: f64,
}

impl Default for SwadConfig {
    fn default() -> Self {
        Self { patience_start: 3, patience_end: 6, tolerance: 1.3 }
    }
}

/// Where the averager is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SwadPhase {
    /// The validation loss still falls.
    Waiting,
    /// Iterates are averaged.
    Averaging,
    /// The validation loss has risen: nothing is added any more.
    Stopped,
}

/// The iterates between two evaluations, as their sum.
#[derive(Debug)]
struct Segment {
    sum: ParamVec,
    count: u64,
    loss: f64,
}

/// Averages every iterate from where the validation loss stops falling to where it rises
/// \[prior work: SWAD; the order of the last evaluations is a reconstruction\].
///
/// Call [`update`](Self::update) after every step and [`evaluate`](Self::evaluate) with the validation loss every so many
/// steps. The average is that of the iterates from the oldest of the `N_s` evaluations (with those that led to it) to the
/// last evaluation before the `N_e` whose losses were all above the threshold. If the loss never stops falling, the
/// average is the last iterate alone. Half-precision parameters are summed, and their average is given, in f32.
///
/// ```
/// use sam_opt::{SwadAverager, SwadConfig, SwadPhase, tensor::{ParamSet, tch::Tensor}};
/// let w = Tensor::from_slice(&[0.0f32]);
/// let params = ParamSet::new([("w".to_owned(), w.shallow_clone())])?;
/// let mut swad = SwadAverager::new(SwadConfig::default())?;
/// for (step, loss) in [3.0, 1.0, 1.1, 1.2, 1.15].into_iter().enumerate() {
///     let _ = w.shallow_clone().fill_(step as f64);
///     swad.update(&params)?;
///     swad.evaluate(loss)?;
/// }
/// assert_eq!(swad.phase(), SwadPhase::Averaging);
/// let average = swad.average()?.expect("iterates were seen");      // of the steps 1 to 4
/// assert_eq!(average.parts()[0].as_ref().unwrap().double_value(&[0]), 2.5);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct SwadAverager {
    config: SwadConfig,
    phase: SwadPhase,
    /// Iterates since the last evaluation.
    open: Option<(ParamVec, u64)>,
    last: Option<ParamVec>,
    /// Waiting: the last `N_s` segments. Averaging: the last `N_e`, which the end may leave out.
    recent: VecDeque<Segment>,
    total: Option<(ParamVec, u64)>,
    threshold: f64,
}

impl SwadAverager {
    /// # Errors
    /// [`Error::InvalidConfig`] naming the field.
    pub fn new(config: SwadConfig) -> Result<Self> {
        for (field, value) in [("patience_start", config.patience_start), ("patience_end", config.patience_end)] {
            if value == 0 {
                return Err(Error::invalid(field, "at least 1 evaluation", value));
            }
        }
        at_least("tolerance", config.tolerance, 1.0)?;
        Ok(Self {
            config,
            phase: SwadPhase::Waiting,
            open: None,
            last: None,
            recent: VecDeque::new(),
            total: None,
            threshold: f64::INFINITY,
        })
    }

    /// Where it is.
    pub fn phase(&self) -> SwadPhase {
        self.phase
    }

    /// Takes the parameters after a step.
    ///
    /// # Errors
    /// Parameters of another shape than before.
    pub fn update(&mut self, params: &ParamSet) -> Result<()> {
        if self.phase == SwadPhase::Stopped {
            return Ok(());
        }
        let now = widened(params)?;
        match &mut self.open {
            None => self.open = Some((now.copy(), 1)),
            Some((sum, count)) => {
                sum.axpy(1.0, &now)?;
                *count += 1;
            }
        }
        self.last = Some(now);
        Ok(())
    }

    /// Takes the validation loss of the parameters of the last [`update`](Self::update).
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] before the first update or for a loss that isn't finite.
    pub fn evaluate(&mut self, validation_loss: f64) -> Result<SwadPhase> {
        if !validation_loss.is_finite() {
            return Err(Error::invalid("validation_loss", "finite", validation_loss));
        }
        if self.phase == SwadPhase::Stopped {
            return Ok(self.phase);
        }
        let (sum, count) = self
            .open
            .take()
            .ok_or_else(|| Error::invalid("evaluate", "called after `update`", "called without a new iterate"))?;
        self.recent.push_back(Segment { sum, count, loss: validation_loss });
        match self.phase {
            SwadPhase::Waiting => {
                while self.recent.len() > self.config.patience_start {
                    self.recent.pop_front();
                }
                let oldest = self.recent.front().map_or(f64::INFINITY, |s| s.loss);
                let full = self.recent.len() == self.config.patience_start;
                if full && self.recent.iter().all(|s| oldest <= s.loss) {
                    let mean = self.recent.iter().map(|s| s.loss).sum::<f64>() / self.recent.len() as f64;
                    self.threshold = self.config.tolerance * mean;
                    self.phase = SwadPhase::Averaging;
                    self.settle()?;
                }
            }
            SwadPhase::Averaging => {
                self.settle()?;
                let full = self.recent.len() == self.config.patience_end;
                if full && self.recent.iter().all(|s| s.loss > self.threshold) {
                    self.recent.clear();
                    self.phase = SwadPhase::Stopped;
                }
            }
            SwadPhase::Stopped => {}
        }
        Ok(self.phase)
    }

    /// Adds the segments that the end can't leave out any more.
    fn settle(&mut self) -> Result<()> {
        while self.recent.len() > self.config.patience_end {
            if let Some(segment) = self.recent.pop_front() {
                add(&mut self.total, &segment.sum, segment.count)?;
            }
        }
        Ok(())
    }

    /// The average so far; the last iterate before an average has started; `None` without any.
    ///
    /// # Errors
    /// What libtorch reports.
    pub fn average(&self) -> Result<Option<ParamVec>> {
        if self.phase == SwadPhase::Waiting {
            return Ok(self.last.as_ref().map(ParamVec::copy));
        }
        let mut total = self.total.as_ref().map(|(sum, count)| (sum.copy(), *count));
        for segment in &self.recent {
            add(&mut total, &segment.sum, segment.count)?;
        }
        // Iterates since the last evaluation belong to no judged stretch.
        Ok(match total {
            Some((sum, count)) => {
                sum.scale(1.0 / count as f64)?;
                Some(sum)
            }
            None => self.last.as_ref().map(ParamVec::copy),
        })
    }
}

/// A copy of the parameters, half-precision ones in f32: a sum of many iterates would round in their own kind.
fn widened(params: &ParamSet) -> Result<ParamVec> {
    let copy = |tensor: &Tensor| -> Result<Option<Tensor>> {
        let half = matches!(tensor.kind(), Kind::Half | Kind::BFloat16);
        Ok(Some(if half { tensor.f_to_kind(Kind::Float)? } else { tensor.copy() }))
    };
    no_grad(|| Ok(ParamVec::new(params.tensors().iter().map(copy).collect::<Result<_>>()?)))
}

fn add(total: &mut Option<(ParamVec, u64)>, sum: &ParamVec, count: u64) -> Result<()> {
    match total {
        None => *total = Some((sum.copy(), count)),
        Some((all, n)) => {
            all.axpy(1.0, sum)?;
            *n += count;
        }
    }
    Ok(())
}
