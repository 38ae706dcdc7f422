//! Sharpness of a trained model, measured without an optimizer.

use anyhow::Result;
use tensor::tch::{Tensor, no_grad};
use tensor::{ParamSet, ParamVec, Seed};

/// Length of the ascent step, in parameter units [specification: 0.1].
pub(super) const ASCENT: f64 = 0.1;
/// Size of the random directions relative to the weights' own rows [our choice].
pub(super) const RELATIVE: f64 = 0.25;
/// Number of random directions [specification: 20].
const DIRECTIONS: u64 = 20;

/// `L(θ + 0.1 g/‖g‖) − L(θ)`, in nats.
pub(super) fn ascent(params: &ParamSet, loss: impl Fn() -> Tensor) -> Result<f64> {
    let here = loss();
    let gradient = params.gradient(&here)?;
    let alphas = vec![ASCENT / (gradient.norm() + 1e-12); params.len()];
    let _guard = params.perturb(&alphas, &gradient, None)?;
    Ok(no_grad(&loss).double_value(&[]) - here.double_value(&[]))
}

/// Mean and maximum over random filter-normalized directions `d` of `L(θ + 0.25 d) − L(θ)`, in nats: each row
/// of a weight's direction has the norm of the same row of the weight; biases stay.
pub(super) fn random_directions(params: &ParamSet, seed: Seed, loss: impl Fn() -> Tensor) -> Result<(f64, f64)> {
    let here = no_grad(&loss).double_value(&[]);
    let mut rises = Vec::new();
    for i in 0..DIRECTIONS {
        let direction = filter_normalized(params, seed.index(i));
        let _guard = params.perturb(&vec![RELATIVE; params.len()], &direction, None)?;
        rises.push(no_grad(&loss).double_value(&[]) - here);
    }
    Ok((rises.iter().sum::<f64>() / rises.len() as f64, rises.iter().copied().fold(f64::MIN, f64::max)))
}

fn filter_normalized(params: &ParamSet, seed: Seed) -> ParamVec {
    no_grad(|| {
        let part = |(i, w): (usize, &Tensor)| {
            let mut noise = vec![0.0f32; w.numel()];
            seed.fill_normal(&mut noise, i as u64);
            let noise = Tensor::from_slice(&noise).reshape(w.size()).to_device(w.device());
            if w.dim() < 2 {
                return Some(noise * 0.0);
            }
            let norm = |t: &Tensor| t.square().sum_dim_intlist([1i64].as_slice(), true, t.kind()).sqrt();
            Some(&noise * (norm(w) / (norm(&noise) + 1e-12)))
        };
        ParamVec::new(params.tensors().iter().enumerate().map(part).collect())
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
    fn the_ascent_on_a_linear_loss_is_the_step_times_the_slope() {
        let (w, set) = params();
        let rise = ascent(&set, || (&w * 2.0).sum(Kind::Float)).unwrap();
        assert!((rise - 0.1 * 4.0).abs() < 1e-5, "{rise}");
        assert_eq!(set.norm(), 26f64.sqrt());
    }

    #[test]
    fn rows_of_a_direction_have_the_norms_of_the_weights_rows() {
        let (_, set) = params();
        let d = filter_normalized(&set, Seed::new(1));
        let rows = d.parts()[0].as_ref().unwrap().square().sum_dim_intlist([1i64].as_slice(), false, Kind::Float);
        assert!((rows.double_value(&[0]) - 25.0).abs() < 1e-4 && (rows.double_value(&[1]) - 1.0).abs() < 1e-5);
    }

    #[test]
    fn on_a_convex_loss_at_its_minimum_every_direction_rises() {
        let (w, set) = params();
        let minimum = w.detach().copy();
        let (mean, max) = random_directions(&set, Seed::new(2), || (&w - &minimum).square().sum(Kind::Float)).unwrap();
        // ‖0.25 d‖² = 0.0625 · 26 for every direction.
        assert!((mean - 1.625).abs() < 1e-4 && (max - 1.625).abs() < 1e-4, "{mean} {max}");
    }
}
