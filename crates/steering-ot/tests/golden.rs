//! The specification's worked example (check 9), computed there by an independent script in f64, and a synthetic mixture
//! whose right answer is known.

use ndarray::{Array1, Array2, ArrayView2, array};
use steering_ot::transport::{self, SinkhornConfig};
use steering_ot::{CharsConfig, CharsMap, Extra, ndarray};

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
