//! Transport between two weighted sets of points: costs, entropic and exact plans, and what a plan says.
//!
//! Masses are non-negative and sum to 1. Costs are squared distances, so `ε` is in squared units of the points.

mod exact;
mod sinkhorn;

pub use exact::{Exact, exact};
pub use sinkhorn::{Sinkhorn, SinkhornConfig, sinkhorn, sinkhorn_plain, sinkhorn_warm};

use crate::{Error, Result};
use ndarray::{Array2, ArrayView1, ArrayView2};

/// `C_ij = ‖a_i − b_j‖²` (`[K_A, K_B]`) by direct differences in f64; the expansion into products would cancel where norms
/// are large against distances.
///
/// # Errors
/// [`Error::DimMismatch`] for different widths.
pub fn cost(a: ArrayView2<'_, f64>, b: ArrayView2<'_, f64>) -> Result<Array2<f64>> {
    if a.ncols() != b.ncols() {
        return Err(Error::dim("Each target centroid", a.ncols(), b.ncols()));
    }
    Ok(Array2::from_shape_fn((a.nrows(), b.nrows()), |(i, j)| {
        a.row(i).iter().zip(b.row(j)).map(|(x, y)| (x - y) * (x - y)).sum()
    }))
}

/// The independent plan `p qᵀ`.
pub fn independent(p: ArrayView1<'_, f64>, q: ArrayView1<'_, f64>) -> Array2<f64> {
    Array2::from_shape_fn((p.len(), q.len()), |(i, j)| p[i] * q[j])
}

/// All of `p_i` at the cheapest `j`; of several cheapest at the first. The column sums are what comes out.
///
/// # Errors
/// [`Error::DimMismatch`] if `p` doesn't have an entry for each row, [`Error::InvalidArgument`] for a cost without columns.
pub fn nearest_neighbour(cost: ArrayView2<'_, f64>, p: ArrayView1<'_, f64>) -> Result<Array2<f64>> {
    if p.len() != cost.nrows() {
        return Err(Error::dim("p", cost.nrows(), p.len()));
    }
    if cost.ncols() == 0 {
        return Err(Error::invalid("cost", "a matrix with at least one column", "empty"));
    }
    let mut plan = Array2::zeros(cost.raw_dim());
    for (i, row) in cost.rows().into_iter().enumerate() {
        let nearest = (1..row.len()).fold(0, |best, j| if row[j] < row[best] { j } else { best });
        plan[(i, nearest)] = p[i];
    }
    Ok(plan)
}

/// Mutual information of a plan in nats: 0 for the independent plan, at most the entropy of the smaller side.
pub fn mutual_information(plan: ArrayView2<'_, f64>) -> f64 {
    let (rows, columns) = (plan.sum_axis(ndarray::Axis(1)), plan.sum_axis(ndarray::Axis(0)));
    let sum: f64 = plan
        .indexed_iter()
        .filter(|(_, w)| **w > 0.0)
        .map(|((i, j), w)| w * (w.ln() - rows[i].ln() - columns[j].ln()))
        .sum();
    sum.max(0.0)
}

/// Entropy of masses in nats.
pub fn entropy(p: ArrayView1<'_, f64>) -> f64 {
    -p.iter().filter(|v| **v > 0.0).map(|v| v * v.ln()).sum::<f64>()
}

/// `⟨P, C⟩`.
///
/// # Errors
/// [`Error::DimMismatch`] for different shapes.
pub fn transport_cost(plan: ArrayView2<'_, f64>, cost: ArrayView2<'_, f64>) -> Result<f64> {
    if plan.dim() != cost.dim() {
        return Err(Error::dim("The cost matrix", plan.len(), cost.len()));
    }
    Ok(plan.iter().zip(cost).map(|(w, c)| w * c).sum())
}

/// Median of all entries; the midpoint of the two middle ones for an even count; 0 for none.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

/// Checks costs and masses; gives the indices of the rows and columns that have mass.
fn check(
    cost: ArrayView2<'_, f64>,
    p: ArrayView1<'_, f64>,
    q: ArrayView1<'_, f64>,
) -> Result<(Vec<usize>, Vec<usize>)> {
    if p.len() != cost.nrows() {
        return Err(Error::dim("p", cost.nrows(), p.len()));
    }
    if q.len() != cost.ncols() {
        return Err(Error::dim("q", cost.ncols(), q.len()));
    }
    for (name, mass) in [("p", p), ("q", q)] {
        if let Some(bad) = mass.iter().find(|v| !(v.is_finite() && **v >= 0.0)) {
            return Err(Error::invalid(name, "finite and not negative", bad));
        }
        let total = mass.sum();
        if (total - 1.0).abs() > 1e-6 {
            return Err(Error::invalid(name, "masses that sum to 1", total));
        }
    }
    if let Some(bad) = cost.iter().find(|v| !v.is_finite()) {
        return Err(Error::invalid("cost", "finite", bad));
    }
    let massive = |mass: ArrayView1<'_, f64>| (0..mass.len()).filter(|&i| mass[i] > 0.0).collect();
    Ok((massive(p), massive(q)))
}
