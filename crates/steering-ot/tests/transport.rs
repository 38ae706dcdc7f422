//! Plans: checks 4 of the specification, exact plans against brute force, k-means against its plain version.

#![allow(clippy::needless_pass_by_value)] // array views

mod common;

use common::{largest_difference, noise};
use ndarray::{Array1, Array2, Axis, array};
use proptest::prelude::*;
use steering_ot::transport::{
    self, SinkhornConfig, exact, mutual_information, sinkhorn, sinkhorn_plain, sinkhorn_warm, transport_cost,
};
use steering_ot::{Error, ndarray};

const TIGHT: SinkhornConfig = SinkhornConfig { max_iterations: 200_000, tolerance: 1e-13 };

fn masses(n: usize, seed: u64) -> Array1<f64> {
    let w = noise(1, n, seed).row(0).mapv(|v| f64::from(v).exp());
    &w / w.sum()
}

fn costs(n: usize, m: usize, seed: u64) -> Array2<f64> {
    let (a, b) = (noise(n, 3, seed).mapv(f64::from), noise(m, 3, seed ^ 0x99).mapv(f64::from));
    transport::cost(a.view(), b.view()).unwrap()
}

/// Masses that are multiples of 1/8, zeros among them, so that plans are degenerate and costs tie.
fn coarse(n: usize, seed: u64) -> Array1<f64> {
    let mut w = vec![0.0; n];
    for v in noise(1, 8, seed).row(0) {
        w[(v.abs() * 1000.0) as usize % n] += 0.125;
    }
    Array1::from(w)
}

/// The least cost over all assignments of 1/8 pieces: the vertices of a transport polytope with such masses.
fn brute_force(cost: &Array2<f64>, p: &Array1<f64>, q: &Array1<f64>) -> f64 {
    fn go(piece: usize, rows: &[usize], left: &mut Vec<usize>, cost: &Array2<f64>, sum: f64, best: &mut f64) {
        if sum >= *best {
            return;
        }
        if piece == rows.len() {
            *best = sum;
            return;
        }
        for j in 0..left.len() {
            if left[j] > 0 {
                left[j] -= 1;
                go(piece + 1, rows, left, cost, sum + 0.125 * cost[(rows[piece], j)], best);
                left[j] += 1;
            }
        }
    }
    let pieces = |m: f64| (m * 8.0).round() as usize;
    let rows: Vec<usize> = p.iter().enumerate().flat_map(|(i, m)| std::iter::repeat_n(i, pieces(*m))).collect();
    let mut left: Vec<usize> = q.iter().map(|m| pieces(*m)).collect();
    let mut best = f64::INFINITY;
    go(0, &rows, &mut left, cost, 0.0, &mut best);
    best
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn exact_plans_cost_what_brute_force_finds(n in 1usize..5, m in 1usize..5, seed in 0u64..1_000_000, ties in any::<bool>()) {
        let mut cost = costs(n, m, seed);
        if ties {
            cost.mapv_inplace(|c| (c / 2.0).round());
        }
        let (p, q) = (coarse(n, seed ^ 3), coarse(m, seed ^ 4));
        let plan = exact(cost.view(), p.view(), q.view()).unwrap();
        prop_assert!((plan.cost - brute_force(&cost, &p, &q)).abs() < 1e-12);
        prop_assert!(plan.plan.iter().all(|w| *w >= 0.0));
        prop_assert!(largest_difference(&plan.plan.sum_axis(Axis(1)), &p) < 1e-14);
        prop_assert!(largest_difference(&plan.plan.sum_axis(Axis(0)), &q) < 1e-14);
    }

    #[test]
    fn exact_plans_have_the_marginals_and_are_certified_by_sinkhorn(n in 1usize..17, m in 1usize..17, seed in 0u64..1_000_000) {
        let (cost, p, q) = (costs(n, m, seed), masses(n, seed ^ 1), masses(m, seed ^ 2));
        let plan = exact(cost.view(), p.view(), q.view()).unwrap();
        prop_assert!(largest_difference(&plan.plan.sum_axis(Axis(1)), &p) < 1e-13);
        prop_assert!(largest_difference(&plan.plan.sum_axis(Axis(0)), &q) < 1e-13);
        let s = sinkhorn(cost.view(), p.view(), q.view(), 0.3, &TIGHT).unwrap();
        prop_assert!(s.converged);
        prop_assert!(plan.cost <= transport_cost(s.plan.view(), cost.view()).unwrap() + 1e-10);
        // Weak duality: potentials brought under every cost bound the least cost from below.
        let g = Array1::from_shape_fn(m, |j| (0..n).map(|i| cost[(i, j)] - s.f[i]).fold(f64::INFINITY, f64::min));
        prop_assert!(s.f.dot(&p) + g.dot(&q) <= plan.cost + 1e-9);
    }

    #[test]
    fn both_sinkhorns_agree_and_keep_the_marginals(
        n in 1usize..12, m in 1usize..12, seed in 0u64..1_000_000, eps in 0.05f64..20.0,
    ) {
        let (cost, p, q) = (costs(n, m, seed), masses(n, seed ^ 1), masses(m, seed ^ 2));
        let fast = sinkhorn(cost.view(), p.view(), q.view(), eps, &TIGHT).unwrap();
        let plain = sinkhorn_plain(cost.view(), p.view(), q.view(), eps, &TIGHT).unwrap();
        prop_assume!(fast.converged && plain.converged);
        prop_assert!(largest_difference(&fast.plan, &plain.plan) < 1e-10);
        prop_assert!(fast.plan.iter().all(|w| *w >= 0.0));
        prop_assert!(largest_difference(&fast.plan.sum_axis(Axis(1)), &p) < 1e-15);
        prop_assert!(largest_difference(&fast.plan.sum_axis(Axis(0)), &q) < 1e-12);
        // The plan is the exponential of its potentials.
        for ((i, j), w) in fast.plan.indexed_iter() {
            prop_assert!((((fast.f[i] + fast.g[j] - cost[(i, j)]) / eps).exp() - w).abs() < 1e-11);
        }
    }

    #[test]
    fn shifts_of_rows_and_columns_and_a_common_scale_leave_the_plan(seed in 0u64..1_000_000, scale in 1e-3f64..1e6) {
        let (cost, p, q) = (costs(5, 6, seed), masses(5, seed ^ 1), masses(6, seed ^ 2));
        let plan = sinkhorn(cost.view(), p.view(), q.view(), 0.5, &TIGHT).unwrap().plan;
        let s = noise(5, 1, seed ^ 5).mapv(f64::from) * 10.0;
        let t = noise(1, 6, seed ^ 6).mapv(f64::from) * 10.0;
        let shifted = &cost + &s + &t;
        let other = sinkhorn(shifted.view(), p.view(), q.view(), 0.5, &TIGHT).unwrap().plan;
        prop_assert!(largest_difference(&plan, &other) < 1e-10);
        let scaled = sinkhorn((&cost * scale).view(), p.view(), q.view(), 0.5 * scale, &TIGHT).unwrap().plan;
        prop_assert!(largest_difference(&plan, &scaled) < 1e-10);
    }

    #[test]
    fn less_regularisation_costs_less_and_tells_more(seed in 0u64..1_000_000) {
        let (cost, p, q) = (costs(6, 5, seed), masses(6, seed ^ 1), masses(5, seed ^ 2));
        let (mut spent, mut told) = (f64::INFINITY, -1.0);
        for eps in [30.0, 3.0, 1.0, 0.3] {
            let plan = sinkhorn(cost.view(), p.view(), q.view(), eps, &TIGHT).unwrap().plan;
            let (now, information) = (transport_cost(plan.view(), cost.view()).unwrap(), mutual_information(plan.view()));
            prop_assert!(now <= spent + 1e-9 && information >= told - 1e-9);
            (spent, told) = (now, information);
        }
    }
}

#[test]
fn tiny_epsilons_neither_underflow_nor_lose_mass() {
    // C/ε reaches 1e5, where exp(−C/ε) is 0 in every float type.
    let (cost, p, q) = (costs(6, 6, 1) * 1e3, masses(6, 2), masses(6, 3));
    let exact = exact(cost.view(), p.view(), q.view()).unwrap();
    for eps in [10.0, 1.0, 0.1] {
        let s = sinkhorn(cost.view(), p.view(), q.view(), eps, &SinkhornConfig::default()).unwrap();
        assert!(s.plan.iter().all(|w| w.is_finite()));
        assert!(largest_difference(&s.plan.sum_axis(Axis(1)), &p) < 1e-14);
        assert!(s.converged, "{} at {eps} after {}", s.marginal_error, s.iterations);
        assert!(largest_difference(&s.plan.sum_axis(Axis(0)), &q) < 1e-9);
        assert!((transport_cost(s.plan.view(), cost.view()).unwrap() - exact.cost).abs() < 40.0 * eps);
    }
}

#[test]
fn masses_that_creep_between_far_groups_are_carried_over() {
    // Two groups 15 ε apart: scalings alone move e⁻¹⁵ of what is missing a round.
    let cost = array![[0.0, 1.0, 15.0], [1.0, 0.5, 15.0], [14.0, 16.0, 0.0]];
    let (p, q) = (array![0.3, 0.3, 0.4], array![0.3, 0.3, 0.4]);
    let s = sinkhorn(cost.view(), p.view(), q.view(), 1.0, &SinkhornConfig { tolerance: 1e-12, ..Default::default() })
        .unwrap();
    assert!(s.converged && s.iterations < 100);
    assert!(largest_difference(&s.plan.sum_axis(Axis(0)), &q) < 1e-11);
    let plain = SinkhornConfig { tolerance: 1e-12, max_iterations: 10_000 };
    assert!(!sinkhorn_plain(cost.view(), p.view(), q.view(), 1.0, &plain).unwrap().converged);
}

#[test]
fn rows_and_columns_without_mass_are_left_out() {
    let cost = costs(4, 3, 7);
    let (p, q) = (array![0.5, 0.0, 0.25, 0.25], array![0.0, 0.75, 0.25]);
    let s = sinkhorn(cost.view(), p.view(), q.view(), 1.0, &TIGHT).unwrap();
    let rows = cost.select(Axis(0), &[0, 2, 3]).select(Axis(1), &[1, 2]);
    let small = sinkhorn(rows.view(), array![0.5, 0.25, 0.25].view(), array![0.75, 0.25].view(), 1.0, &TIGHT).unwrap();
    let kept = s.plan.select(Axis(0), &[0, 2, 3]).select(Axis(1), &[1, 2]);
    assert!(largest_difference(&kept, &small.plan) < 1e-14);
    assert_eq!(s.plan.row(1).sum() + s.plan.column(0).sum(), 0.0);
    assert_eq!(exact(cost.view(), p.view(), q.view()).unwrap().plan.row(1).sum(), 0.0);
}

#[test]
fn a_warm_start_saves_iterations_and_gives_the_same_plan() {
    let (cost, p, q) = (costs(8, 8, 9), masses(8, 10), masses(8, 11));
    let config = SinkhornConfig { tolerance: 1e-6, max_iterations: 1000 };
    let cold = sinkhorn(cost.view(), p.view(), q.view(), 0.5, &config).unwrap();
    let near = cost.mapv(|c| c * 1.0001);
    let warm = sinkhorn_warm(near.view(), p.view(), q.view(), 0.5, &config, Some(cold.g.view())).unwrap();
    let again = sinkhorn(near.view(), p.view(), q.view(), 0.5, &config).unwrap();
    assert!(warm.iterations < again.iterations);
    assert!(largest_difference(&warm.plan, &again.plan) < 1e-5);
}

#[test]
fn an_iteration_that_stops_early_says_so() {
    let (cost, p, q) = (costs(8, 8, 12), masses(8, 13), masses(8, 14));
    let config = SinkhornConfig { max_iterations: 3, tolerance: 1e-12 };
    for s in [
        sinkhorn(cost.view(), p.view(), q.view(), 0.05, &config),
        sinkhorn_plain(cost.view(), p.view(), q.view(), 0.05, &config),
    ] {
        let s = s.unwrap();
        assert!(!s.converged && s.iterations == 3 && s.marginal_error > 1e-12);
        assert!(largest_difference(&s.plan.sum_axis(Axis(1)), &p) < 1e-15);
    }
}

#[test]
fn nearest_neighbours_break_ties_toward_the_first() {
    let cost = array![[2.0, 1.0, 1.0], [0.0, 0.0, 5.0]];
    let plan = transport::nearest_neighbour(cost.view(), array![0.6, 0.4].view()).unwrap();
    assert_eq!(plan, array![[0.0, 0.6, 0.0], [0.4, 0.0, 0.0]]);
}

#[test]
fn bad_problems_are_named() {
    let cost = costs(2, 2, 1);
    let half = array![0.5, 0.5];
    let solve = |p: &Array1<f64>, q: &Array1<f64>, eps| sinkhorn(cost.view(), p.view(), q.view(), eps, &TIGHT);
    for eps in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(matches!(solve(&half, &half, eps), Err(Error::BadEpsilon { .. })));
    }
    assert!(matches!(solve(&array![1.0], &half, 1.0), Err(Error::DimMismatch { expected: 2, got: 1, .. })));
    for bad in [array![0.5, 0.6], array![-0.5, 1.5], array![f64::NAN, 1.0]] {
        assert!(matches!(solve(&bad, &half, 1.0), Err(Error::InvalidArgument { .. })));
        assert!(matches!(exact(cost.view(), half.view(), bad.view()), Err(Error::InvalidArgument { .. })));
    }
    let infinite = array![[1.0, f64::INFINITY], [0.0, 1.0]];
    assert!(exact(infinite.view(), half.view(), half.view()).is_err());
    assert!(sinkhorn((cost.clone() * 1e300).view(), half.view(), half.view(), 1e-20, &TIGHT).is_err());
    assert!(transport::cost(noise(2, 3, 1).mapv(f64::from).view(), noise(2, 4, 1).mapv(f64::from).view()).is_err());
    assert!(SinkhornConfig { max_iterations: 0, ..TIGHT }.validate().is_err());
    assert!(SinkhornConfig { tolerance: 0.0, ..TIGHT }.validate().is_err());
}
