//! How sharp a minimum is: measured on any trained model, without an optimizer.

use crate::domain::{ByDomain, DomainId, DomainLosses};
use crate::pass::PassKind;
use crate::scope::without_grad;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use tensor::stats::{Interval, t_interval};
use tensor::tch::{Tensor, no_grad};
use tensor::{ParamSet, ParamVec, Seed, fused};

/// What [`sharpness_report`] measures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SharpnessOptions {
    /// Radii of the ascent step along each domain's own gradient, in parameter units.
    pub ascent_radii: Vec<f64>,
    /// Sizes of the random directions, relative to the weights' own rows (filters).
    pub random_radii: Vec<f64>,
    /// Number of random directions.
    pub directions: usize,
    /// Level of the interval of the mean over random directions.
    pub level: f64,
    /// Seed of the random directions: with the same one, models are compared along the same noise.
    pub seed: u64,
}

impl Default for SharpnessOptions {
    fn default() -> Self {
        Self { ascent_radii: vec![0.1], random_radii: vec![0.25], directions: 20, level: 0.95, seed: 0 }
    }
}

/// Sharpness of a model on some data.
#[derive(Debug, Clone, PartialEq)]
pub struct SharpnessReport {
    /// Every domain, in the order of their numbers.
    pub domains: Vec<DomainSharpness>,
}

/// Sharpness on one domain.
#[derive(Debug, Clone, PartialEq)]
pub struct DomainSharpness {
    /// The domain.
    pub id: DomainId,
    /// Mean loss at the parameters, in nats.
    pub loss: f64,
    /// Norm of the domain's gradient.
    pub grad_norm: f64,
    /// One entry a radius of the ascent.
    pub ascent: Vec<Ascent>,
    /// One entry a size of the random directions.
    pub random: Vec<RandomRise>,
}

/// `L(θ + r g/‖g‖) − L(θ)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ascent {
    /// `r`.
    pub radius: f64,
    /// The rise of the loss, in nats.
    pub rise: f64,
}

/// `L(θ + r d) − L(θ)` over random directions `d`, each row of a weight's direction with the norm of the same row of the
/// weight; biases and other 1-D tensors stay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RandomRise {
    /// `r`.
    pub radius: f64,
    /// Mean over directions, in nats.
    pub mean: f64,
    /// Its interval; `None` for a single direction.
    pub interval: Option<Interval>,
    /// The largest; NaN if a rise isn't a number.
    pub max: f64,
}

impl SharpnessOptions {
    /// # Errors
    /// [`Error::InvalidRho`], [`Error::InvalidDirections`] or [`Error::InvalidConfig`] naming the field.
    pub fn validate(&self) -> Result<()> {
        for (field, radii) in [("ascent_radii", &self.ascent_radii), ("random_radii", &self.random_radii)] {
            radii.iter().try_for_each(|&r| crate::config::rho(field, r))?;
        }
        if self.directions == 0 && !self.random_radii.is_empty() {
            return Err(Error::InvalidDirections { directions: 0 });
        }
        if !(self.level > 0.0 && self.level < 1.0) {
            return Err(Error::invalid("level", "above 0 and below 1", self.level));
        }
        Ok(())
    }
}

impl SharpnessReport {
    /// The mean over domains of the rise along the gradient, at the first radius.
    pub fn mean_ascent(&self) -> f64 {
        self.mean(|d| d.ascent.first().map_or(f64::NAN, |a| a.rise))
    }

    /// The mean over domains of the mean over random directions, at the first size.
    pub fn mean_random(&self) -> f64 {
        self.mean(|d| d.random.first().map_or(f64::NAN, |r| r.mean))
    }

    /// The mean over domains of the largest rise over random directions, at the first size.
    pub fn mean_worst_random(&self) -> f64 {
        self.mean(|d| d.random.first().map_or(f64::NAN, |r| r.max))
    }

    fn mean(&self, of: impl Fn(&DomainSharpness) -> f64) -> f64 {
        self.domains.iter().map(of).sum::<f64>() / self.domains.len() as f64
    }
}

/// Measures how the loss of each domain rises around the parameters. `losses` does a fresh forward pass each time it is
/// called, in evaluation mode (running statistics, no dropout), always on the same data; one domain does.
///
/// Costs a pass with backward for each domain, a forward pass for each radius and domain, and one for each random direction
/// and size. Parameters are restored bit for bit, also after an error.
///
/// ```
/// use sam_opt::{DomainId, DomainLosses, SharpnessOptions, sharpness_report, tensor::{ParamSet, tch::{Kind, Tensor}}};
/// let w = Tensor::from_slice(&[3.0f32, 4.0]).reshape([1, 2]).set_requires_grad(true);
/// let params = ParamSet::new([("w".to_owned(), w.shallow_clone())])?;
/// let report = sharpness_report(&params, || {
///     Ok(DomainLosses::PerDomain(vec![(DomainId(0), (&w * 2.0).sum(Kind::Float))]))
/// }, &SharpnessOptions::default())?;
/// // A linear loss rises by radius times slope.
/// assert!((report.mean_ascent() - 0.1 * 8f64.sqrt()).abs() < 1e-5);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Invalid options, losses without a graph at the parameters, of wrong shape or not finite there, other domains in a later
/// call, parameters that are under an open guard.
pub fn sharpness_report(
    params: &ParamSet,
    mut losses: impl FnMut() -> Result<DomainLosses>,
    options: &SharpnessOptions,
) -> Result<SharpnessReport> {
    options.validate()?;
    let main = ByDomain::finite(losses()?, PassKind::Main, true)?;
    let mut gradients = Vec::with_capacity(main.len());
    for k in 0..main.len() {
        let loss = main.tensor().get(k as i64);
        gradients.push(if k + 1 < main.len() {
            params.gradient_keeping_graph(&loss)?
        } else {
            params.gradient(&loss)?
        });
    }
    let mut probe = |index: usize| -> Result<Vec<f64>> {
        let kind = PassKind::Probe(index);
        let there = without_grad(|| ByDomain::new(losses()?, kind, true))?;
        main.check_later(&there, kind)?;
        Ok(there.values.iter().zip(&main.values).map(|(there, here)| there - here).collect())
    };
    let mut domains: Vec<DomainSharpness> = Vec::with_capacity(main.len());
    for (k, gradient) in gradients.iter().enumerate() {
        let grad_norm = gradient.norm();
        let mut ascent = Vec::with_capacity(options.ascent_radii.len());
        for &radius in &options.ascent_radii {
            let alphas = vec![radius / (grad_norm + 1e-12); params.len()];
            let _guard = params.perturb(&alphas, gradient, None)?;
            ascent.push(Ascent { radius, rise: probe(k)?[k] });
        }
        domains.push(DomainSharpness { id: main.ids[k], loss: main.values[k], grad_norm, ascent, random: Vec::new() });
    }
    for &radius in &options.random_radii {
        let mut rises = vec![Vec::with_capacity(options.directions); main.len()];
        for i in 0..options.directions {
            let seed = Seed::new(options.seed).child("sam-opt.sharpness").index(i as u64);
            let direction = filter_normalized(params, seed)?;
            let _guard = params.perturb(&vec![radius; params.len()], &direction, None)?;
            for (rises, rise) in rises.iter_mut().zip(probe(i)?) {
                rises.push(rise);
            }
        }
        for (domain, rises) in domains.iter_mut().zip(rises) {
            domain.random.push(RandomRise {
                radius,
                mean: rises.iter().sum::<f64>() / rises.len() as f64,
                interval: t_interval(&rises, options.level).ok(),
                // NaN if a rise is: `f64::max` would leave it out.
                max: rises.iter().copied().fold(f64::NEG_INFINITY, |a, b| if b.is_nan() || b > a { b } else { a }),
            });
        }
    }
    Ok(SharpnessReport { domains })
}

/// Noise with the norm of the weight's own row in each row; nothing for 1-D tensors.
fn filter_normalized(params: &ParamSet, seed: Seed) -> Result<ParamVec> {
    no_grad(|| {
        let mut parts = Vec::with_capacity(params.len());
        for (i, w) in params.tensors().iter().enumerate() {
            let noise = w.detach().zeros_like();
            if w.dim() >= 2 {
                fused::fill_normal(&noise, seed, i as u64)?;
                let norm = |t: &Tensor| -> Result<Tensor> {
                    let axes: Vec<i64> = (1..t.dim() as i64).collect();
                    Ok(t.f_square()?.f_sum_dim_intlist(axes.as_slice(), true, t.kind())?.f_sqrt()?)
                };
                let factor = norm(&w.detach())?.f_div(&norm(&noise)?.f_add_scalar(1e-12)?)?;
                parts.push(Some(noise.f_mul(&factor)?));
            } else {
                parts.push(Some(noise));
            }
        }
        Ok(ParamVec::new(parts))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor::tch::Kind;

    fn params() -> (Tensor, ParamSet) {
        let w = Tensor::from_slice(&[3.0f32, 4.0, 0.0, 1.0]).reshape([2, 2]).set_requires_grad(true);
        let set = ParamSet::new([("w".to_owned(), w.shallow_clone())]).unwrap();
        (w, set)
    }

    #[test]
    fn rows_of_a_direction_have_the_norms_of_the_weights_rows() {
        let (_, set) = params();
        let d = filter_normalized(&set, Seed::new(1)).unwrap();
        let rows = d.parts()[0].as_ref().unwrap().square().sum_dim_intlist([1i64].as_slice(), false, Kind::Float);
        assert!((rows.double_value(&[0]) - 25.0).abs() < 1e-4 && (rows.double_value(&[1]) - 1.0).abs() < 1e-5);
    }

    #[test]
    fn each_domain_is_measured_along_its_own_gradient_and_everything_is_restored() {
        let (w, set) = params();
        let minimum = w.detach().copy();
        let losses = || {
            let bowl = (&w - &minimum).square().sum(Kind::Float);
            Ok(DomainLosses::PerDomain(vec![(DomainId(5), bowl), (DomainId(2), (&w * 2.0).sum(Kind::Float))]))
        };
        let report = sharpness_report(&set, losses, &SharpnessOptions::default()).unwrap();
        let [plane, bowl] = &report.domains[..] else { panic!("two domains") };
        assert_eq!((plane.id, bowl.id), (DomainId(2), DomainId(5)));
        // Radius times slope; and at the bowl's minimum there is no slope to follow.
        assert!((plane.ascent[0].rise - 0.1 * 4.0).abs() < 1e-5, "{plane:?}");
        assert!(bowl.ascent[0].rise.abs() < 1e-9, "{bowl:?}");
        // ‖0.25 d‖² = 0.0625 · 26 for every direction.
        assert!((bowl.random[0].mean - 1.625).abs() < 1e-4 && (bowl.random[0].max - 1.625).abs() < 1e-4);
        let interval = plane.random[0].interval.unwrap();
        assert!(interval.low < plane.random[0].mean && plane.random[0].mean < interval.high);
        assert_eq!(w, minimum);
    }

    #[test]
    fn bad_options_and_an_error_on_the_way_leave_the_parameters_alone() {
        let (w, set) = params();
        let before = w.detach().copy();
        let bad = SharpnessOptions { ascent_radii: vec![-1.0], ..SharpnessOptions::default() };
        assert!(matches!(sharpness_report(&set, || unreachable!(), &bad), Err(Error::InvalidRho { .. })));
        let mut calls = 0;
        let result = sharpness_report(
            &set,
            || {
                calls += 1;
                if calls == 3 {
                    return Err(Error::NoDomain { pass: PassKind::Main });
                }
                Ok(DomainLosses::PerDomain(vec![(DomainId(0), w.square().sum(Kind::Float))]))
            },
            &SharpnessOptions::default(),
        );
        assert!(result.is_err() && calls == 3);
        assert_eq!(w, before);
    }
}
