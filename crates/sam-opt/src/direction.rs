//! Norm, direction and size of the perturbation.

use crate::group::ParamGroup;
use crate::{AsamConfig, AsamScope, Error, Result};
use tensor::tch::{Kind, Tensor, no_grad};
use tensor::{ParamSet, ParamVec, fused};

/// The parameters that are perturbed, flattened over the groups.
#[derive(Debug)]
pub(crate) struct Perturbed {
    /// The tensors.
    pub(crate) set: ParamSet,
    /// Their positions among all parameters.
    pub(crate) position: Vec<usize>,
    /// The group of each.
    pub(crate) group: Vec<usize>,
    /// `Some(η)` where ASAM's scaling applies.
    eta: Vec<Option<f64>>,
}

impl Perturbed {
    pub(crate) fn new(groups: &[ParamGroup], adaptive: Option<AsamConfig>) -> Result<Option<Self>> {
        let (mut params, mut position, mut group, mut eta) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut flat = 0;
        for (index, g) in groups.iter().enumerate() {
            let asam = match g.adaptive {
                Some(false) => None,
                Some(true) => Some(adaptive.unwrap_or_default()),
                None => adaptive,
            };
            for (name, tensor) in g.names.iter().zip(&g.params) {
                if g.perturb && tensor.requires_grad() {
                    params.push((name.clone(), tensor.shallow_clone()));
                    position.push(flat);
                    group.push(index);
                    eta.push(asam.filter(|a| a.scope == AsamScope::All || tensor.dim() > 1).map(|a| a.eta));
                }
                flat += 1;
            }
        }
        if params.is_empty() {
            return Ok(None);
        }
        Ok(Some(Self { set: ParamSet::new(params)?, position, group, eta }))
    }

    /// The parts of a vector over all parameters that are perturbed (shared memory).
    pub(crate) fn select(&self, vector: &ParamVec) -> ParamVec {
        let part = |&i: &usize| vector.parts()[i].as_ref().map(Tensor::shallow_clone);
        ParamVec::new(self.position.iter().map(part).collect())
    }

    fn adaptive(&self) -> bool {
        self.eta.iter().any(Option::is_some)
    }

    /// `(Σ (T g)², Σ (T² g)²)` for each group.
    fn squares(&self, gradient: &ParamVec, groups: usize) -> Vec<[f64; 2]> {
        (0..groups)
            .map(|group| {
                let members: Vec<usize> = (0..self.group.len())
                    .filter(|&i| self.group[i] == group && gradient.parts()[i].is_some())
                    .collect();
                let weights: Vec<&Tensor> = members.iter().map(|&i| &self.set.tensors()[i]).collect();
                let grads: Vec<&Tensor> = members.iter().filter_map(|&i| gradient.parts()[i].as_ref()).collect();
                let eta: Vec<Option<f64>> = members.iter().map(|&i| self.eta[i]).collect();
                squares_fused(&weights, &grads, &eta).unwrap_or_else(|| squares_plain(&weights, &grads, &eta))
            })
            .collect()
    }

    /// The perturbation `ε_i = factor(group) · T² g` of a gradient; `radius` gives the factor from
    /// `(group, ‖T g‖)`. `own` says that the gradient may be overwritten.
    pub(crate) fn epsilon(
        &self,
        gradient: ParamVec,
        groups: usize,
        own: bool,
        factor: impl FnOnce(f64) -> Vec<f64>,
    ) -> Result<Epsilon> {
        let squares = self.squares(&gradient, groups);
        let norm = squares.iter().map(|[tg, _]| tg).sum::<f64>().sqrt();
        if !norm.is_finite() {
            return Ok(Epsilon { norm, length: 0.0, alphas: Vec::new(), direction: gradient });
        }
        let factors = factor(norm);
        let length = squares.iter().zip(&factors).map(|([_, ttg], f)| f * f * ttg).sum::<f64>().sqrt();
        let direction = if self.adaptive() { self.scaled(gradient, own)? } else { gradient };
        let alphas = self.group.iter().map(|&g| factors[g]).collect();
        Ok(Epsilon { norm, length, alphas, direction })
    }

    /// `T² g`, in the gradient's memory where it is ours to overwrite.
    fn scaled(&self, gradient: ParamVec, own: bool) -> Result<ParamVec> {
        let direction = if own { gradient } else { gradient.copy() };
        let (mut weights, mut parts, mut eta) = (Vec::new(), Vec::new(), Vec::new());
        for ((tensor, part), &e) in self.set.tensors().iter().zip(direction.parts()).zip(&self.eta) {
            if let (Some(part), Some(e)) = (part, e) {
                weights.push(tensor);
                parts.push(part);
                eta.push(e);
            }
        }
        let eta32: Vec<f32> = eta.iter().map(|&e| e as f32).collect();
        if !fused::update([&parts], [&weights], |i, [d], [w]| {
            let t = w.abs() + eta32[i];
            *d *= t * t;
        }) {
            no_grad(|| -> Result<()> {
                for ((weight, part), e) in weights.iter().zip(&parts).zip(eta) {
                    let t = weight.detach().abs().f_add_scalar(e)?;
                    let _ = part.shallow_clone().f_mul_(&t.f_square()?)?;
                }
                Ok(())
            })?;
        }
        Ok(direction)
    }

    /// Refuses half-precision parameters that ε can't move: `|ε_i|` below the spacing of numbers at `w_i` for
    /// 90 % of the scalars.
    pub(crate) fn check_precision(&self, epsilon: &Epsilon) -> Result<()> {
        if epsilon.length == 0.0 {
            return Ok(());
        }
        let (mut lost, mut total, mut first) = (0.0, 0.0, None);
        for (i, (name, tensor)) in self.set.iter().enumerate() {
            // Bits of the mantissa, smallest normal number.
            let (bits, smallest) = match tensor.kind() {
                Kind::Half => (10.0, 6.104e-5),
                Kind::BFloat16 => (7.0, 1.175e-38),
                _ => continue,
            };
            let Some(part) = &epsilon.direction.parts()[i] else { continue };
            let below = no_grad(|| -> Result<f64> {
                let w = tensor.to_kind(Kind::Float).abs().f_clamp_min(smallest)?;
                let spacing = w.log2().floor().f_sub_scalar(bits)?.exp2();
                let moved = part.to_kind(Kind::Float).f_mul_scalar(epsilon.alphas[i])?.abs();
                Ok(moved.f_lt_tensor(&spacing)?.sum(Kind::Double).double_value(&[]))
            })?;
            lost += below;
            total += tensor.numel() as f64;
            first.get_or_insert((name, tensor.kind()));
        }
        match first {
            Some((name, kind)) if lost >= 0.9 * total => Err(Error::LowPrecisionParams {
                name: name.into(),
                kind: format!("{kind:?}"),
                percent: 100.0 * lost / total,
            }),
            _ => Ok(()),
        }
    }
}

/// A perturbation, not yet applied.
#[derive(Debug)]
pub(crate) struct Epsilon {
    /// `‖T g‖`.
    pub(crate) norm: f64,
    /// `‖ε‖₂`.
    pub(crate) length: f64,
    /// `ε_i = alphas[i] · direction_i`.
    pub(crate) alphas: Vec<f64>,
    pub(crate) direction: ParamVec,
}

/// `[Σ x², Σ x y, Σ y²]` of two tensors of one shape, in f64.
pub(crate) fn products(x: &Tensor, y: &Tensor) -> Result<[f64; 3]> {
    let fast = fused::reduce([&[x], &[y]], |_, [x, y]| {
        let (x, y) = (f64::from(x), f64::from(y));
        [x * x, x * y, y * y]
    });
    if let Some(sums) = fast {
        return Ok(sums);
    }
    no_grad(|| {
        let (x, y) = (x.f_to_kind(Kind::Double)?, y.f_to_kind(Kind::Double)?);
        let sum = |t: Tensor| -> Result<f64> { Ok(t.f_sum(Kind::Double)?.f_double_value(&[])?) };
        Ok([sum(x.f_square()?)?, sum(x.f_mul(&y)?)?, sum(y.f_square()?)?])
    })
}

fn squares_fused(weights: &[&Tensor], grads: &[&Tensor], eta: &[Option<f64>]) -> Option<[f64; 2]> {
    if eta.iter().all(Option::is_none) {
        return fused::reduce([grads], |_, [g]| [f64::from(g) * f64::from(g)]).map(|[s]| [s, s]);
    }
    let eta: Vec<Option<f32>> = eta.iter().map(|e| e.map(|e| e as f32)).collect();
    fused::reduce([weights, grads], |i, [w, g]| {
        let t = f64::from(eta[i].map_or(1.0, |e| w.abs() + e));
        let tg = t * f64::from(g);
        [tg * tg, t * t * tg * tg]
    })
}

/// The same by libtorch operations, in f64, for every device and kind.
fn squares_plain(weights: &[&Tensor], grads: &[&Tensor], eta: &[Option<f64>]) -> [f64; 2] {
    no_grad(|| {
        let mut sums = [0.0; 2];
        for ((w, g), e) in weights.iter().zip(grads).zip(eta) {
            let g = g.to_kind(Kind::Double);
            let (tg, ttg) = match e {
                Some(e) => {
                    let t = w.to_kind(Kind::Double).abs() + *e;
                    (&t * &g, &t * &t * &g)
                }
                None => (g.shallow_clone(), g),
            };
            sums[0] += tg.square().sum(Kind::Double).double_value(&[]);
            sums[1] += ttg.square().sum(Kind::Double).double_value(&[]);
        }
        sums
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor::Seed;

    #[test]
    fn the_fused_sums_equal_the_plain_sums() {
        let mut values = vec![0.0f32; 5000];
        Seed::new(3).fill_normal(&mut values, 0);
        let g = Tensor::from_slice(&values).reshape([50, 100]);
        let w = (&g * 0.7 + 0.1).flip([0]).contiguous();
        let b = Tensor::from_slice(&[0.5f32, -2.0]);
        for eta in [[None, None], [Some(0.01), None], [Some(0.0), Some(0.5)]] {
            let fast = squares_fused(&[&w, &b], &[&g, &b], &eta).unwrap();
            let plain = squares_plain(&[&w, &b], &[&g, &b], &eta);
            for (f, p) in fast.iter().zip(plain) {
                // |w| + η is formed in f32 on the fast path.
                assert!((f - p).abs() < 1e-6 * p, "{f} against {p}");
            }
        }
    }
}
