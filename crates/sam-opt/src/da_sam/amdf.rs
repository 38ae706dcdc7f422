//! Adaptive multi-directional flattening: probes around the guided direction \[reconstruction\].
//!
//! Directions are made of noise that is drawn again when it is needed, in the parameters' own memory (which is backed up
//! while they are perturbed): besides the copy and the gradient nothing of the parameters' size is kept.

use super::config::AmdfConfig;
use super::{Memory, Probe};
use crate::Result;
use crate::direction::products;
use tensor::tch::{Tensor, no_grad};
use tensor::{ParamSet, ParamVec, RestoreGuard, Seed, fused};

/// `u_m = a g + Σ_j b_j z_{mj}` over the tensors `j` of the perturbed parameters: direction `m` as the coefficients of the
/// gradient and of each tensor's noise.
#[derive(Debug, Clone)]
pub(super) struct Direction {
    gradient: f64,
    noise: Vec<f64>,
}

/// The directions around `u_0 = g/‖g‖` and the means to put the parameters on them.
pub(super) struct Directions<'a> {
    set: &'a ParamSet,
    gradient: &'a ParamVec,
    norm: f64,
    zeta: f64,
    /// Noise of all directions of a step.
    seed: Seed,
    /// Radius of each tensor.
    radii: Vec<f64>,
}

impl<'a> Directions<'a> {
    pub(super) fn new(
        set: &'a ParamSet,
        gradient: &'a ParamVec,
        norm: f64,
        zeta: f64,
        seed: Seed,
        radii: Vec<f64>,
    ) -> Self {
        Self { set, gradient, norm, zeta, seed, radii }
    }

    /// The tensors that have a gradient, with their position.
    fn present(&self) -> impl Iterator<Item = (usize, &Tensor, &Tensor)> {
        let pairs = self.set.tensors().iter().zip(self.gradient.parts()).enumerate();
        pairs.filter_map(|(j, (tensor, part))| part.as_ref().map(|part| (j, tensor, part)))
    }

    /// `u_0`.
    pub(super) fn guided(&self) -> Direction {
        Direction { gradient: 1.0 / self.norm, noise: vec![0.0; self.set.len()] }
    }

    fn noise_seed(&self, m: usize) -> Seed {
        self.seed.index(m as u64)
    }

    /// Moves the parameters to `θ + scale · ρ u_m` and returns the coefficients of `u_m`; `m = 0` is the guided direction.
    pub(super) fn visit(&self, m: usize, scale: f64, guard: &RestoreGuard) -> Result<Direction> {
        let mut direction = self.guided();
        if m > 0 {
            // u = (u_0 + ζ z)/‖u_0 + ζ z‖ with z rescaled on each tensor to the norm of u_0 there.
            let (mut square, mut noise) = (1.0, vec![0.0; self.set.len()]);
            for (j, tensor, part) in self.present() {
                fused::fill_normal(tensor, self.noise_seed(m), j as u64)?;
                let [zz, zg, gg] = products(tensor, part)?;
                let rescale = if zz > 0.0 { (gg / zz).sqrt() / self.norm } else { 0.0 };
                noise[j] = self.zeta * rescale;
                square += noise[j] * noise[j] * zz + 2.0 * noise[j] * zg / self.norm;
            }
            let length = square.max(0.0).sqrt();
            // The noise would have to be the opposite of the gradient: then there is no direction to speak of.
            if length > 1e-6 {
                direction.gradient /= length;
                direction.noise = noise.into_iter().map(|b| b / length).collect();
            }
        }
        for (j, tensor, part) in self.present() {
            let radius = scale * self.radii[j];
            let (a, b) = (radius * direction.gradient, radius * direction.noise[j]);
            place(tensor, &guard.originals()[j], part, a, b)?;
        }
        Ok(direction)
    }

    /// Moves the parameters to `θ + scale · ρ v`, `v` the normalized sum of the directions with these weights; returns `‖ε‖` and
    /// the cosine of ε with `u_0`.
    pub(super) fn visit_mean(
        &self,
        weights: &[f64],
        directions: &[Direction],
        scale: f64,
        guard: &RestoreGuard,
    ) -> Result<(f64, f64)> {
        let along: f64 = weights.iter().zip(directions).map(|(w, u)| w * u.gradient).sum();
        let largest = self.present().map(|(_, tensor, _)| tensor.numel()).max().unwrap_or(0);
        let Some((_, like, _)) = self.present().next() else { return Ok((0.0, 1.0)) };
        let buffer = Tensor::f_empty([largest as i64], (like.kind(), like.device()))?;
        let mut square = 0.0;
        for (j, tensor, part) in self.present() {
            // The sum is formed in the parameter's memory, whose value is in the guard.
            assign(tensor, along, part)?;
            for (m, (weight, direction)) in weights.iter().zip(directions).enumerate() {
                let factor = weight * direction.noise[j];
                if factor != 0.0 {
                    let z = buffer.f_narrow(0, 0, tensor.numel() as i64)?.f_view_as(tensor)?;
                    fused::fill_normal(&z, self.noise_seed(m), j as u64)?;
                    add(tensor, factor, &z)?;
                }
            }
            square += products(tensor, part)?[0];
        }
        let length = square.sqrt();
        // Directions that cancel leave nothing to normalize: take the guided one.
        if length <= 1e-12 {
            self.visit(0, scale, guard)?;
            return self.measure(guard);
        }
        let (mut applied, mut inner) = (0.0, 0.0);
        for (j, tensor, part) in self.present() {
            let factor = scale * self.radii[j] / length;
            let [vv, vg, _] = products(tensor, part)?;
            applied += factor * factor * vv;
            inner += factor * vg;
            place(tensor, &guard.originals()[j], part, 0.0, factor)?;
        }
        let applied = applied.sqrt();
        Ok((applied, if applied > 0.0 { inner / (applied * self.norm) } else { 1.0 }))
    }

    /// `‖ε‖` and the cosine with `u_0` of the direction `m` that the parameters are on.
    pub(super) fn measure(&self, guard: &RestoreGuard) -> Result<(f64, f64)> {
        let (mut square, mut inner) = (0.0, 0.0);
        for (j, tensor, part) in self.present() {
            let moved = no_grad(|| tensor.f_sub(&guard.originals()[j]))?;
            let [mm, mg, _] = products(&moved, part)?;
            square += mm;
            inner += mg;
        }
        let length = square.sqrt();
        Ok((length, if length > 0.0 { inner / (length * self.norm) } else { 1.0 }))
    }
}

/// What the slopes `h_m` along the directions say: the new level and the probe. `None` for a direction whose probe wasn't
/// finite.
pub(super) fn judge(config: &AmdfConfig, slopes: &[Option<f64>], step: u64, memory: &mut Memory) -> Probe {
    let finite: Vec<f64> = slopes.iter().flatten().copied().collect();
    let failures = slopes.len() - finite.len();
    let n = finite.len() as f64;
    let mean = finite.iter().sum::<f64>() / n;
    let std = (finite.iter().map(|h| (h - mean).powi(2)).sum::<f64>() / n).sqrt();
    // No slope at all, or slopes so large that their spread isn't a number: the guided direction stays.
    if finite.is_empty() || !(mean + config.kappa * std).is_finite() {
        let mut weights = vec![0.0; slopes.len()];
        weights[0] = 1.0;
        let nan = f64::NAN;
        return Probe { step, scale: 1.0, weights, sharpness: nan, anisotropy: nan, failures: slopes.len() };
    }
    let sharpness = (mean + config.kappa * std).max(1e-12);
    let level = memory.level.map_or(sharpness, |level| config.ema * level + (1.0 - config.ema) * sharpness);
    memory.level = Some(level);
    let scale = (sharpness / level).powf(config.exponent).clamp(1.0 / config.clip, config.clip);
    // Softmax of the standardized slopes.
    let score = |h: f64| (h - mean) / (std + 1e-12) / config.temperature;
    let largest = finite.iter().map(|&h| score(h)).fold(f64::MIN, f64::max);
    let raw: Vec<f64> = slopes.iter().map(|h| h.map_or(0.0, |h| (score(h) - largest).exp())).collect();
    let total: f64 = raw.iter().sum();
    let weights = raw.into_iter().map(|a| a / total).collect();
    Probe { step, scale, weights, sharpness, anisotropy: std, failures }
}

/// `target ← original + a g + b target`.
fn place(target: &Tensor, original: &Tensor, g: &Tensor, a: f64, b: f64) -> Result<()> {
    let (a32, b32) = (a as f32, b as f32);
    if fused::update([&[target]], [&[original], &[g]], |_, [t], [o, g]| *t = o + (a32 * g + b32 * *t)) {
        return Ok(());
    }
    no_grad(|| {
        let moved = g.f_mul_scalar(a)?.f_add(&target.detach().f_mul_scalar(b)?)?;
        target.shallow_clone().f_copy_(&original.f_add(&moved)?)?;
        Ok(())
    })
}

/// `target ← a x`.
fn assign(target: &Tensor, a: f64, x: &Tensor) -> Result<()> {
    let a32 = a as f32;
    if fused::update([&[target]], [&[x]], |_, [t], [x]| *t = a32 * x) {
        return Ok(());
    }
    no_grad(|| {
        target.shallow_clone().f_copy_(&x.f_mul_scalar(a)?)?;
        Ok(())
    })
}

/// `target ← target + a x`.
fn add(target: &Tensor, a: f64, x: &Tensor) -> Result<()> {
    let a32 = a as f32;
    if fused::update([&[target]], [&[x]], |_, [t], [x]| *t += a32 * x) {
        return Ok(());
    }
    no_grad(|| {
        let sum = target.detach().f_add(&x.f_mul_scalar(a)?)?;
        target.shallow_clone().f_copy_(&sum)?;
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor::tch::Kind;

    fn close(got: &[f64], expected: &[f64], tolerance: f64) {
        for (g, e) in got.iter().zip(expected) {
            assert!((g - e).abs() < tolerance, "{got:?} is not {expected:?}");
        }
    }

    /// The specification's slopes along `u_0`, (1, 0) and (0, −1).
    const SLOPES: [Option<f64>; 3] = [Some(3.684548646), Some(3.302430596), Some(1.701429358)];

    #[test]
    fn slopes_give_sharpness_and_weights() {
        let mut memory = Memory::default();
        let probe = judge(&AmdfConfig::default(), &SLOPES, 0, &mut memory);
        close(&[probe.sharpness, probe.anisotropy, probe.scale], &[3.755204253, 0.859068053, 1.0], 1e-8);
        close(&probe.weights, &[0.574592494, 0.368284505, 0.057123000], 1e-8);
        assert_eq!(memory.level, Some(probe.sharpness));
    }

    #[test]
    fn the_radius_follows_the_sharpness_within_its_bounds() {
        let config = AmdfConfig::default();
        let mut memory = Memory { level: Some(1.0), ..Memory::default() };
        let probe = judge(&config, &[Some(2.0)], 1, &mut memory);
        close(&[memory.level.unwrap(), probe.scale], &[1.1, 2.0 / 1.1], 1e-12);
        for (slope, bound) in [(1e9, 2.0), (-5.0, 0.5)] {
            let mut memory = Memory { level: Some(1.0), ..Memory::default() };
            assert_eq!(judge(&config, &[Some(slope)], 1, &mut memory).scale, bound, "slope {slope}");
        }
    }

    #[test]
    fn directions_whose_probe_is_not_finite_are_dropped() {
        let mut memory = Memory::default();
        let some = judge(&AmdfConfig::default(), &[Some(1.0), None, Some(3.0)], 0, &mut memory);
        assert_eq!((some.failures, some.weights[1]), (1, 0.0));
        close(&[some.sharpness, some.weights.iter().sum()], &[3.0, 1.0], 1e-12);
        let mut memory = Memory { level: Some(7.0), ..Memory::default() };
        let none = judge(&AmdfConfig::default(), &[None, None], 0, &mut memory);
        assert_eq!((none.failures, none.weights, none.scale, memory.level), (2, vec![1.0, 0.0], 1.0, Some(7.0)));
    }

    /// Two scalar parameters with the specification's gradient.
    fn plane(kind: Kind) -> (ParamSet, ParamVec) {
        let scalar = |v: f64| Tensor::from_slice(&[v]).to_kind(kind);
        let set = ParamSet::new([("a".to_owned(), scalar(0.0)), ("b".to_owned(), scalar(0.0))]).unwrap();
        (set, ParamVec::new(vec![Some(scalar(3.128573394)), Some(scalar(-1.651429358))]))
    }

    fn at(set: &ParamSet) -> Vec<f64> {
        set.tensors().iter().map(|t| t.double_value(&[0])).collect()
    }

    #[test]
    fn the_mean_direction_leans_to_the_sharpest() {
        for (kind, tolerance) in [(Kind::Double, 1e-9), (Kind::Float, 1e-7)] {
            let (set, gradient) = plane(kind);
            let guard = set.guard().unwrap();
            let norm = gradient.norm();
            let around = Directions::new(&set, &gradient, norm, 1.0, Seed::new(1), vec![0.1, 0.1]);
            // (1, 0) and (0, −1) as multiples of the noise that the directions would draw.
            let z = |m: usize, j: u64| {
                let mut z = [0.0f32];
                Seed::new(1).index(m as u64).fill_normal(&mut z, j);
                f64::from(z[0])
            };
            let directions = [
                around.guided(),
                Direction { gradient: 0.0, noise: vec![1.0 / z(1, 0), 0.0] },
                Direction { gradient: 0.0, noise: vec![0.0, -1.0 / z(2, 1)] },
            ];
            let weights = [0.574592494, 0.368284505, 0.057123000];
            let (length, cosine) = around.visit_mean(&weights, &directions, 1.0, &guard).unwrap();
            close(&at(&set), &[0.0937488697, -0.0348015723], tolerance);
            let guided = [0.884356998, -0.466811203];
            let expected = 0.937488697 * guided[0] + 0.348015723 * -guided[1];
            close(&[length, cosine], &[0.1, expected], 1e-6);
            guard.close();
            assert_eq!(at(&set), [0.0, 0.0]);
        }
    }

    /// Many parameters in several tensors, of both paths.
    fn wide(kind: Kind) -> (ParamSet, ParamVec) {
        let tensor = |name: &str, shape: &[i64], seed: u64| {
            let values = Seed::new(seed).normal(shape.iter().product::<i64>() as usize);
            (name.to_owned(), Tensor::from_slice(&values).reshape(shape).to_kind(kind))
        };
        let shapes: [&[i64]; 3] = [&[40, 30], &[7], &[1]];
        let names = ["a", "b", "c"];
        let list =
            |from: u64| names.iter().zip(shapes).zip(from..).map(|((name, shape), seed)| tensor(name, shape, seed));
        let set = ParamSet::new(list(0)).unwrap();
        let gradient = ParamVec::new(list(10).map(|(_, t)| Some(t)).collect());
        (set, gradient)
    }

    #[test]
    fn directions_are_unit_vectors_at_the_angle_that_zeta_says_on_both_paths() {
        for kind in [Kind::Float, Kind::Double] {
            let (set, gradient) = wide(kind);
            let guard = set.guard().unwrap();
            let norm = gradient.norm();
            let around = Directions::new(&set, &gradient, norm, 1.0, Seed::new(3), vec![0.5; 3]);
            let mut cosines = Vec::new();
            for m in 1..60 {
                around.visit(m, 1.0, &guard).unwrap();
                let (length, cosine) = around.measure(&guard).unwrap();
                close(&[length], &[0.5], 1e-5);
                cosines.push(cosine);
            }
            // 59 draws in about 1,200 dimensions.
            let mean = cosines.iter().sum::<f64>() / cosines.len() as f64;
            assert!((mean - std::f64::consts::FRAC_1_SQRT_2).abs() < 0.02, "{mean}");
        }
    }

    #[test]
    fn noise_has_the_guided_directions_norm_on_each_tensor() {
        for kind in [Kind::Float, Kind::Double] {
            let (set, gradient) = wide(kind);
            // Layers of very different gradients, as in a network.
            let _ = gradient.parts()[1].as_ref().unwrap().shallow_clone().g_mul_scalar_(1e-3);
            let guard = set.guard().unwrap();
            let zeta = 0.7;
            let around = Directions::new(&set, &gradient, gradient.norm(), zeta, Seed::new(3), vec![0.5; 3]);
            let direction = around.visit(2, 1.0, &guard).unwrap();
            for (j, part) in gradient.parts().iter().enumerate() {
                let part = part.as_ref().unwrap();
                let z = part.zeros_like();
                fused::fill_normal(&z, around.noise_seed(2), j as u64).unwrap();
                let [zz, _, gg] = products(&z, part).unwrap();
                let ratio = direction.noise[j] * zz.sqrt() / (direction.gradient * gg.sqrt());
                close(&[ratio], &[zeta], 1e-6);
            }
        }
    }

    #[test]
    fn both_paths_put_the_parameters_at_the_same_point() {
        let point = |kind: Kind| {
            let (set, gradient) = wide(kind);
            let guard = set.guard().unwrap();
            let norm = gradient.norm();
            let around = Directions::new(&set, &gradient, norm, 0.7, Seed::new(3), vec![0.5, 0.2, 0.1]);
            let mut directions = vec![around.guided()];
            directions.extend((1..4).map(|m| around.visit(m, 1.3, &guard).unwrap()));
            let reported = around.visit_mean(&[0.4, 0.3, 0.2, 0.1], &directions, 1.3, &guard).unwrap();
            let measured = around.measure(&guard).unwrap().0;
            close(&[reported.0], &[measured], 1e-5);
            let flat = set.snapshot().flatten(&set).unwrap().to_kind(Kind::Double);
            drop(guard);
            flat
        };
        let difference = (point(Kind::Float) - point(Kind::Double)).abs().max().double_value(&[]);
        assert!(difference < 1e-6, "{difference}");
    }
}
