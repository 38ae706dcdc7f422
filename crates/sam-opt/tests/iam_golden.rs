//! IAM's worked numbers (computed in the specification in f64 NumPy) and its gradients.
#![allow(missing_docs)]

mod common;
use common::iam::{Net, cross_entropy, inputs, normed, toy_logits, toy_step};
use common::{close, leaf, values};
use sam_opt::tensor::tch::{Device, Kind, Tensor, no_grad};
use sam_opt::tensor::{ParamSet, ParamVec};
use sam_opt::{
    Iam, IamConfig, IamVariant, InconsistencyOpts, PassKind, PenaltyForm, PenaltyGradient, Sgd, audit_direction,
    fisher_top_eig, fisher_top_eigs, fisher_vector_product, local_inconsistency,
};
use std::cell::RefCell;

fn toy(inner_steps: usize) -> IamConfig {
    IamConfig { inner_steps, ..IamConfig::d(0.1, 1.0) }
}

#[test]
fn the_fisher_matrix_and_the_exact_inconsistency_at_zero() {
    let w = leaf(&[0.0, 0.0], Kind::Double);
    for (v, expected) in [([1.0, 0.0], [0.125, 0.0]), ([0.0, 1.0], [0.0, 0.5])] {
        let product =
            fisher_vector_product(&[w.shallow_clone()], || Ok(toy_logits(&w)), &[Tensor::from_slice(&v)]).unwrap();
        close(&values(&product[0]), &expected, 1e-12);
    }
    let (lambda, vector) = fisher_top_eig(&[w.shallow_clone()], || Ok(toy_logits(&w)), 200, 1e-12).unwrap();
    close(&[lambda, values(&vector[0])[1].abs()], &[0.5, 1.0], 1e-9);
    let opts = InconsistencyOpts { rho: 0.1, inner_steps: 12, noise_scale: 0.01, ..InconsistencyOpts::default() };
    let report = local_inconsistency(&[w.shallow_clone()], || Ok(toy_logits(&w)), &opts).unwrap();
    // ½ ln cosh 0.1; the quadratic value is 0.0025.
    close(&report.per_draw, &[0.002495844411; 10], 1e-12);
    close(&[report.mean, report.delta_norm], &[0.002495844411, 0.1], 1e-10);
    assert!(report.std < 1e-10 && report.degenerate == 0);
}

#[test]
fn power_steps_from_a_given_start_converge_to_the_exact_value_from_below() {
    let (delta, stats, _) = toy_step(&[0.0, 0.0], toy(1));
    close(&delta, &[0.024254133, 0.097014107], 1e-9);
    // The 1e-12 in the norm's denominator moves the last digit.
    close(&[stats.inconsistency.unwrap()], &[0.002386018162], 3e-12);
    let (delta, stats, _) = toy_step(&[0.0, 0.0], toy(2));
    close(&delta, &[0.006257160, 0.099804048], 1e-9);
    close(&[stats.inconsistency.unwrap(), stats.delta_norm], &[0.002488535831, 0.1], 1e-11);
    let s: Vec<f64> = (1..=4).map(|k| toy_step(&[0.0, 0.0], toy(k)).1.inconsistency.unwrap()).collect();
    close(&s[2..], &[0.002495382902, 0.002495815367], 1e-12);
    assert!(s.is_sorted() && s[3] < 0.002495844411, "{s:?}");
}

#[test]
fn iam_d_keeps_both_sides_of_the_gradient() {
    let w = [0.3, -0.4];
    let (delta, stats, both) = toy_step(&w, toy(2));
    close(&delta, &[0.007813419, 0.099694285], 1e-9);
    close(&[stats.inconsistency.unwrap()], &[0.002181292597], 1e-12);
    close(&both, &[-5.6e-7, 0.001527153], 1e-9);
    let detached = IamConfig { gradient: PenaltyGradient::Detached, ..toy(2) };
    let (_, _, one) = toy_step(&w, detached);
    close(&one, &[0.000954468, 0.044178302], 1e-9);
    // Central differences of KL(f(w) ‖ f(w + δ)) with δ frozen.
    let kl = |w: &[f64]| {
        let log = |w: &[f64]| toy_logits(&Tensor::from_slice(w)).log_softmax(-1, Kind::Double);
        let (p, q) = (log(w), log(&[w[0] + delta[0], w[1] + delta[1]]));
        (p.exp() * (p - q)).sum(Kind::Double).double_value(&[]) / 2.0
    };
    let h = 1e-6;
    let slope = [kl(&[w[0] + h, w[1]]) - kl(&[w[0] - h, w[1]]), kl(&[w[0], w[1] + h]) - kl(&[w[0], w[1] - h])];
    close(&both, &slope.map(|s| s / (2.0 * h)), 1e-9);
}

/// The penalty's gradient from a step of rate 1 with a main loss, and the δ that it used.
fn step_of(
    params: &ParamSet,
    store: &sam_opt::tensor::tch::nn::VarStore,
    config: IamConfig,
    logits: impl Fn(&sam_opt::Pass<'_>) -> Tensor,
    y: &Tensor,
) -> (Vec<f64>, ParamVec) {
    let before = params.snapshot();
    let delta = RefCell::new(None);
    let mut iam = Iam::for_store(store, Sgd::new(1.0), config).unwrap();
    iam.step(
        |pass| {
            if matches!(pass.kind, PassKind::Perturbed(_)) {
                let moved = params.snapshot();
                moved.axpy(-1.0, &before).unwrap();
                *delta.borrow_mut() = Some(moved);
            }
            Ok(logits(pass))
        },
        |z| Ok(cross_entropy(z, y)),
    )
    .unwrap();
    let after = params.snapshot();
    after.axpy(-1.0, &before).unwrap();
    after.scale(-1.0).unwrap();
    params.assign(&before).unwrap();
    (values(&after.flatten(params).unwrap()), delta.into_inner().unwrap())
}

/// `L(θ) + β KL(f(θ) ‖ f(θ + δ))` with δ frozen, through ordinary differentiation.
fn penalized(params: &ParamSet, delta: &ParamVec, beta: f64, logits: &dyn Fn() -> Tensor, y: &Tensor) -> Tensor {
    let z = logits();
    // By hand: shift, forward, put back. The graph of this side isn't needed: its share comes from the other test.
    let guard = params.perturb(&vec![1.0; params.len()], delta, None).unwrap();
    let q = no_grad(logits).log_softmax(-1, Kind::Double);
    drop(guard);
    let p = z.log_softmax(-1, Kind::Double);
    cross_entropy(&z, y) + (p.exp() * (p - q)).sum(Kind::Double) * (beta / y.size()[0] as f64)
}

#[test]
fn the_gradient_of_the_penalized_loss_equals_central_differences() {
    // Two classes, five classes, and batch normalization.
    let check = |store: &sam_opt::tensor::tch::nn::VarStore, logits: &dyn Fn() -> Tensor, y: &Tensor| {
        let params = ParamSet::from_var_store(store).unwrap();
        let config = IamConfig { seed: 3, ..IamConfig::d(0.3, 2.0) };
        let (gradient, delta) = step_of(&params, store, config, |_| logits(), y);
        let (h, mut index, mut worst) = (1e-5, 0, 0.0f64);
        for tensor in params.tensors() {
            let flat = no_grad(|| tensor.detach().view([-1]));
            for i in 0..tensor.numel() as i64 {
                let at = |shift: f64| {
                    let _ = no_grad(|| flat.get(i).g_add_scalar_(shift));
                    let value = no_grad(|| penalized(&params, &delta, 2.0, logits, y)).double_value(&[]);
                    let _ = no_grad(|| flat.get(i).g_add_scalar_(-shift));
                    value
                };
                let slope = (at(h) - at(-h)) / (2.0 * h);
                worst = worst.max((slope - gradient[index]).abs());
                index += 1;
            }
        }
        let scale = gradient.iter().map(|g| g * g).sum::<f64>().sqrt();
        assert!(worst < 1e-6 * scale, "off by {worst} of {scale}");
    };
    for classes in [2, 5] {
        let (x, y) = inputs(8, classes, Kind::Double);
        let net = Net::new(&[4, 5, classes], Kind::Double);
        check(&net.store, &|| net.logits(None, &x), &y);
    }
    let (x, y) = inputs(8, 3, Kind::Double);
    let (store, net) = normed(3, Kind::Double);
    check(&store, &|| net.forward_with(&x, true, true), &y);
}

#[test]
fn the_split_and_the_functional_form_agree() {
    let (x, y) = inputs(8, 5, Kind::Double);
    let net = Net::new(&[4, 5, 5], Kind::Double);
    let params = ParamSet::from_var_store(&net.store).unwrap();
    for (variant, gradient, inner_steps) in [
        (IamVariant::D, PenaltyGradient::BothSides, 1),
        (IamVariant::D, PenaltyGradient::BothSides, 3),
        (IamVariant::D, PenaltyGradient::Detached, 1),
        (IamVariant::De, PenaltyGradient::BothSides, 1),
    ] {
        let run = |form| {
            let config = IamConfig { variant, gradient, form, inner_steps, ..IamConfig::d(0.3, 2.0) };
            let mut iam = Iam::for_store(&net.store, Sgd::new(0.1), config).unwrap();
            let start = params.snapshot();
            // Three steps, so that DE's δ has moved.
            let passes: Vec<_> = (0..3)
                .map(|_| {
                    let stats = iam.step(|pass| Ok(net.logits(Some(pass), &x)), |z| Ok(cross_entropy(z, &y))).unwrap();
                    (stats.forwards, stats.backwards)
                })
                .collect();
            let end = values(&params.snapshot().flatten(&params).unwrap());
            params.assign(&start).unwrap();
            (end, passes[2])
        };
        let ((split, cost), (functional, less)) = (run(PenaltyForm::Split), run(PenaltyForm::Functional));
        close(&split, &functional, 1e-12);
        let k = inner_steps as u32;
        let expected = match variant {
            IamVariant::De => ((3, 2), (2, 1)),
            _ => ((3 + k, 2 + k), (2 + k, 1 + k)),
        };
        assert_eq!((cost, less), expected);
    }
}

#[test]
fn the_search_finds_the_top_eigenvector_of_a_dense_fisher_matrix() {
    let (x, _) = inputs(6, 3, Kind::Double);
    let net = Net::new(&[4, 5, 3], Kind::Double);
    let params = ParamSet::from_var_store(&net.store).unwrap();
    let m = params.numel() as i64;
    assert!(m < 200);
    let list: Vec<Tensor> = params.tensors().iter().map(Tensor::shallow_clone).collect();
    let logits = || net.logits(None, &x);
    // F = (1/b) Σ Jᵀ (diag f − f fᵀ) J from per-sample Jacobians.
    let mut dense = Tensor::zeros([m, m], (Kind::Double, Device::Cpu));
    let z = logits();
    for i in 0..6 {
        let rows: Vec<Tensor> = (0..3)
            .map(|c| {
                let g = Tensor::run_backward(&[z.get(i).get(c)], params.tensors(), true, false);
                Tensor::cat(&g.iter().map(|g| g.reshape([-1])).collect::<Vec<_>>(), 0)
            })
            .collect();
        let j = Tensor::stack(&rows, 0); // [3, m]
        let f = z.get(i).detach().softmax(-1, Kind::Double);
        let middle = f.diag(0) - f.outer(&f);
        dense += j.tr().matmul(&middle).matmul(&j) / 6.0;
    }
    let (eigenvalues, vectors) = dense.linalg_eigh("L");
    let (lambda, top) = (eigenvalues.double_value(&[m - 1]), vectors.select(1, m - 1));
    let mut top_five: Vec<f64> = Vec::try_from(&eigenvalues.narrow(0, m - 5, 5)).unwrap();
    top_five.reverse();
    close(&fisher_top_eigs(&list, || Ok(logits()), 5, 30).unwrap(), &top_five, 1e-9);
    assert!(fisher_top_eigs(&list, || Ok(logits()), 5, 4).is_err());
    let (found, vector) = fisher_top_eig(&list, || Ok(logits()), 500, 1e-10).unwrap();
    let flat = Tensor::cat(&vector.iter().map(|v| v.reshape([-1])).collect::<Vec<_>>(), 0);
    close(&[found, flat.dot(&top).double_value(&[]).abs()], &[lambda, 1.0], 1e-8);
    let probe = Tensor::arange(m, (Kind::Double, Device::Cpu)).sin();
    let parts: Vec<Tensor> =
        params.unflatten(&probe).unwrap().parts().iter().flatten().map(Tensor::shallow_clone).collect();
    let product = fisher_vector_product(&list, || Ok(logits()), &parts).unwrap();
    let product = Tensor::cat(&product.iter().map(|v| v.reshape([-1])).collect::<Vec<_>>(), 0);
    close(&values(&product), &values(&dense.mv(&probe)), 1e-12);

    let many = InconsistencyOpts { rho: 1e-2, noise_scale: 1e-3, inner_steps: 40, draws: 3, seed: 1 };
    let audit = audit_direction(&list, || Ok(logits()), &many, 500, 1e-10).unwrap();
    assert!(audit.cosines.iter().all(|&c| c > 0.999), "{audit:?}");
    assert!(audit.shares.iter().all(|&s| (s - 1.0).abs() < 0.01), "{audit:?}");
    let few = InconsistencyOpts { inner_steps: 1, ..many };
    let first = audit_direction(&list, || Ok(logits()), &few, 500, 1e-10).unwrap();
    assert!(first.cosines.iter().all(|&c| c > 0.1 && c < 0.99) && first.shares.iter().all(|&s| s < 0.99), "{first:?}");
}

#[test]
fn a_small_radius_gives_the_quadratic_value() {
    let (x, _) = inputs(6, 3, Kind::Double);
    let net = Net::new(&[4, 5, 3], Kind::Double);
    let params = ParamSet::from_var_store(&net.store).unwrap();
    let list = params.tensors();
    for rho in [1e-2, 1e-3] {
        let opts = InconsistencyOpts { rho, noise_scale: 1e-4, inner_steps: 1, draws: 1, seed: 4 };
        // The δ of the last pass, where S is taken.
        let before = params.snapshot();
        let last = RefCell::new(None);
        let logits = || {
            let moved = params.snapshot();
            moved.axpy(-1.0, &before).unwrap();
            *last.borrow_mut() = Some(moved);
            Ok(net.logits(None, &x))
        };
        let s = local_inconsistency(list, logits, &opts).unwrap().mean;
        let delta = last.into_inner().unwrap();
        close(&[delta.norm()], &[rho], 1e-9);
        let parts: Vec<Tensor> = delta.present().iter().map(|t| t.copy()).collect();
        let product = fisher_vector_product(list, || Ok(net.logits(None, &x)), &parts).unwrap();
        let product = ParamVec::new(product.into_iter().map(Some).collect());
        let quadratic = 0.5 * delta.dot(&product).unwrap();
        assert!((s / quadratic - 1.0).abs() < 0.01, "ρ {rho}: {s} is not {quadratic}");
    }
    let nothing = InconsistencyOpts { rho: 0.0, ..InconsistencyOpts::default() };
    assert_eq!(local_inconsistency(list, || Ok(net.logits(None, &x)), &nothing).unwrap().mean, 0.0);
}
