//! The specification's worked example (check 9), computed there by an independent script in f64, and a synthetic mixture
//! whose right answer is known.

#![allow(clippy::needless_pass_by_value)] // array views

mod common;

use common::{around, mean, noise, norm};
use ndarray::{Array1, Array2, ArrayView2, Axis, array};
use steering_ot::ablate::ablate;
use steering_ot::baselines::DiM;
use steering_ot::transport::{self, SinkhornConfig};
use steering_ot::{CharsConfig, CharsMap, Coupling, Epsilon, Extra, Steer, ndarray};

fn close(got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (g, w) in got.iter().zip(want) {
        assert!((g - w).abs() <= tolerance, "{got:?} against {want:?}");
    }
}

fn flat(x: ArrayView2<'_, f64>) -> Vec<f64> {
    x.iter().copied().collect()
}

struct Example {
    a: Array2<f64>,
    b: Array2<f64>,
    p: Array1<f64>,
    q: Array1<f64>,
}

fn example() -> Example {
    Example {
        a: array![[0.0, 0.0], [4.0, 0.0], [0.0, 6.0]],
        b: array![[0.0, 1.0], [4.0, 2.0], [2.0, 6.0]],
        p: array![0.5, 0.3, 0.2],
        q: array![0.4, 0.4, 0.2],
    }
}

fn map(pct: Option<usize>) -> CharsMap {
    let Example { a, b, p, q } = example();
    let cost = transport::cost(a.view(), b.view()).unwrap();
    let s = transport::sinkhorn(cost.view(), p.view(), q.view(), 20.0, &SinkhornConfig::default()).unwrap();
    let config = CharsConfig { pct, ..CharsConfig::paper().with_clusters(3) };
    CharsMap::from_parts(config, a, b, s.plan, Extra::default()).unwrap()
}

#[test]
fn the_costs_and_their_median_are_those_of_the_worked_example() {
    let Example { a, b, .. } = example();
    let cost = transport::cost(a.view(), b.view()).unwrap();
    assert_eq!(cost, array![[1.0, 20.0, 40.0], [17.0, 4.0, 40.0], [25.0, 32.0, 4.0]]);
    assert_eq!(transport::median(cost.iter().copied()), 20.0);
}

#[test]
fn both_sinkhorns_give_the_plan_of_the_worked_example() {
    let Example { a, b, p, q } = example();
    let cost = transport::cost(a.view(), b.view()).unwrap();
    let config = SinkhornConfig { tolerance: 1e-13, ..SinkhornConfig::default() };
    for solve in [transport::sinkhorn, transport::sinkhorn_plain] {
        let s = solve(cost.view(), p.view(), q.view(), 20.0, &config).unwrap();
        assert!(s.converged);
        let want = [0.290059, 0.161645, 0.048295, 0.072625, 0.200463, 0.026912, 0.037315, 0.037892, 0.124793];
        close(&flat(s.plan.view()), &want, 6e-7);
        let spent = transport::transport_cost(s.plan.view(), cost.view()).unwrap();
        close(&[spent, transport::mutual_information(s.plan.view())], &[11.212312, 0.168297], 6e-7);
    }
}

#[test]
fn exact_transport_gives_the_plan_of_the_worked_example() {
    let Example { a, b, p, q } = example();
    let cost = transport::cost(a.view(), b.view()).unwrap();
    let exact = transport::exact(cost.view(), p.view(), q.view()).unwrap();
    close(&flat(exact.plan.view()), &[0.4, 0.1, 0.0, 0.0, 0.3, 0.0, 0.0, 0.0, 0.2], 1e-15);
    close(&[exact.cost], &[4.4], 1e-14);
}

#[test]
fn shifts_gates_and_the_moved_point_are_those_of_the_worked_example() {
    let map = map(None);
    let want = [1.486344, 1.806244, -1.147747, 2.116738, 2.005760, -1.690717];
    close(&flat(map.shifts().view()), &want, 6e-7);
    close(map.mean_shift_exact().as_slice().unwrap(), &[0.8, 1.2], 1e-9);
    let x = array![[1.0f32, 1.0]];
    let gates: Vec<f64> = map.gates(x.view()).unwrap().iter().map(|g| f64::from(*g)).collect();
    close(&gates, &[0.765764, 0.206448, 0.027787], 6e-7);
    let shift: Vec<f64> = map.shift(x.view()).unwrap().iter().map(|v| f64::from(*v)).collect();
    close(&shift, &[0.956974, 1.773173], 6e-7);
    let exact = x.mapv(f64::from);
    close(&flat(map.double_sum(exact.view()).unwrap().view()), &[0.956974, 1.773173], 6e-7);
    close(&flat(map.shift_exact(exact.view()).unwrap().view()), &[0.956974, 1.773173], 6e-7);
}

#[test]
fn principal_components_and_thresholding_are_those_of_the_worked_example() {
    let principal = map(None).principal();
    close(&principal.values, &[4.877455, 4.254857], 6e-7);
    let u = &principal.vectors;
    let total = u.t().dot(&Array2::from_diag(&Array1::from(principal.values.clone()))).dot(u);
    close(&flat(total.view()), &[4.514592, -0.306999, -0.306999, 4.617720], 6e-7);
    let map = map(Some(1));
    let x = array![[1.0f64, 1.0]];
    for shift in [map.shift_exact(x.view()).unwrap(), map.double_sum(x.view()).unwrap()] {
        close(&flat(shift.view()), &[0.582859, 1.456654], 6e-7);
    }
}

#[test]
fn directional_ablation_is_that_of_the_worked_example() {
    let x = array![[1.0f32, 1.0]];
    let left = ablate(map(None).shift(x.view()).unwrap().view(), x.view()).unwrap();
    close(&left.iter().map(|v| f64::from(*v)).collect::<Vec<_>>(), &[0.356474, -0.192387], 6e-7);
}

#[test]
fn each_cluster_of_a_mixture_reaches_its_target_and_one_vector_misses_by_the_closed_form() {
    let (d, sigma) = (16, 0.5f32);
    let centres = Array2::from_shape_fn((3, d), |(i, j)| if j == i { 10.0f32 } else { 0.0 });
    // Shifts along three directions that have nothing to do with each other.
    let shifts = Array2::from_shape_fn((3, d), |(i, j)| if j == 4 + 3 * i { 3.0f32 } else { 0.0 });
    let source = around(&centres, 2400, sigma, 21);
    let target = around(&(&centres + &shifts), 2400, sigma, 22);
    let config = CharsConfig { epsilon: Epsilon::Exact, bandwidth: 0.1, ..CharsConfig::default().with_clusters(3) };
    let map = CharsMap::fit(source.view(), target.view(), &config).unwrap();
    let one = DiM::fit(source.view(), target.view()).unwrap();
    let test = around(&centres, 90, sigma, 23);
    let (ours, vector) = (map.transport(test.view(), 1.0).unwrap(), one.transport(test.view(), 1.0).unwrap());
    let limit = 0.1 * f64::from(sigma) * (d as f64).sqrt();
    let mean_of_shifts = shifts.mean_axis(Axis(0)).unwrap();
    for i in 0..3 {
        let rows: Vec<usize> = (i..90).step_by(3).collect();
        let goal = (&centres.row(i) + &shifts.row(i)).mapv(f64::from);
        let miss = |moved: &Array2<f32>| norm(&(mean(moved.select(Axis(0), &rows).view()) - &goal));
        // The mean of 30 test rows is itself off by σ√(D/30).
        let sampling = f64::from(sigma) * (d as f64 / 30.0).sqrt();
        let exact_start = map.transport(centres.slice(ndarray::s![i..=i, ..]), 1.0).unwrap();
        let miss_of_mean = norm(&(mean(exact_start.view()) - &goal));
        assert!(miss_of_mean < limit, "{miss_of_mean} against {limit}");
        assert!(miss(&ours) < limit + sampling);
        let known = norm(&(&mean_of_shifts - &shifts.row(i)).mapv(f64::from));
        assert!(known > 10.0 * limit);
        assert!((miss(&vector) - known).abs() < 2.0 * sampling);
    }
    let report = map.diagnostics();
    assert!(report.effective_clusters < 1.05 && (report.plan_mutual_information - 3f64.ln()).abs() < 1e-9);
    assert!(report.warnings.is_empty(), "{:?}", report.warnings);
}

#[test]
fn the_papers_constants_collapse_where_the_default_does_not() {
    let centres = noise(8, 24, 31) * 2.0;
    let source = around(&centres, 320, 1.0, 32);
    let target = around(&(&centres + &(noise(8, 24, 33) * 1.0)), 320, 1.0, 34);
    let of = |config: &CharsConfig| CharsMap::fit(source.view(), target.view(), config).unwrap().diagnostics().clone();
    let (paper, ours) = (of(&CharsConfig::paper().with_clusters(8)), of(&CharsConfig::default()));
    let exact = of(&CharsConfig { epsilon: Epsilon::Exact, ..CharsConfig::default() });
    assert!(paper.plan_mutual_information < 0.5 * ours.plan_mutual_information);
    assert!(ours.plan_mutual_information > 0.8 * exact.plan_mutual_information);
    assert!(paper.effective_clusters > 2.0 * ours.effective_clusters);
}

#[test]
fn nearest_neighbours_and_the_uniform_plan_are_what_their_names_say() {
    let (source, target) = common::sets(60, 7, 40);
    let of = |coupling| {
        let config = CharsConfig { coupling, ..CharsConfig::default().with_clusters(4) };
        CharsMap::fit(source.view(), target.view(), &config).unwrap()
    };
    let nearest = of(Coupling::NearestNeighbour);
    let cost = transport::cost(nearest.source_centroids().view(), nearest.target_centroids().view()).unwrap();
    for (row, costs) in nearest.plan().rows().into_iter().zip(cost.rows()) {
        let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
        assert_eq!(row.iter().filter(|w| **w > 0.0).count(), 1);
        assert!(row.iter().zip(costs).all(|(w, c)| *w == 0.0 || *c == least));
    }
    let uniform = of(Coupling::Uniform);
    assert!(uniform.diagnostics().plan_mutual_information < 1e-12);
}
