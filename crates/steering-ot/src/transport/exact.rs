//! Exact transport by successive shortest paths with potentials (dense Dijkstra): for tens of points a side, where a general
//! solver of linear programs would be mostly overhead. Ties and degenerate masses need no care.

use super::{check, transport_cost};
use crate::{Error, Result};
use ndarray::{Array2, ArrayView1, ArrayView2};

/// An optimal plan of the transport problem.
#[derive(Debug, Clone, PartialEq)]
pub struct Exact {
    /// `P` (`[K_A, K_B]`), a vertex or a mixture of optimal vertices when several are optimal.
    pub plan: Array2<f64>,
    /// `⟨P, C⟩`.
    pub cost: f64,
}

/// Mass below which a row or column counts as served; totals of p and q differ by rounding.
const NOTHING: f64 = 1e-15;

/// A plan of least cost between `p` and `q`.
///
/// # Errors
/// [`Error::DimMismatch`] and [`Error::InvalidArgument`] for masses and costs that don't fit.
pub fn exact(cost: ArrayView2<'_, f64>, p: ArrayView1<'_, f64>, q: ArrayView1<'_, f64>) -> Result<Exact> {
    let (rows, columns) = check(cost, p, q)?;
    let flow = Flow::solve(cost, p, q, &rows, &columns)?;
    let mut plan = Array2::zeros(cost.raw_dim());
    for (a, &i) in rows.iter().enumerate() {
        let row = &flow.plan[a * columns.len()..(a + 1) * columns.len()];
        let sum: f64 = row.iter().sum();
        if sum > 0.0 {
            columns.iter().zip(row).for_each(|(&j, w)| plan[(i, j)] = w * (p[i] / sum));
        } else if let Some(&j) = columns.iter().min_by(|&&a, &&b| cost[(i, a)].total_cmp(&cost[(i, b)])) {
            // A row of less mass than rounding leaves.
            plan[(i, j)] = p[i];
        }
    }
    let cost = transport_cost(plan.view(), cost)?;
    Ok(Exact { plan, cost })
}

/// The potential of each of these columns in the exact problem: where an entropic plan with little regularisation is near.
pub(super) fn column_potentials(
    cost: ArrayView2<'_, f64>,
    p: ArrayView1<'_, f64>,
    q: ArrayView1<'_, f64>,
    rows: &[usize],
    columns: &[usize],
) -> Result<Vec<f64>> {
    Ok(Flow::solve(cost, p, q, rows, columns)?.g)
}

struct Flow {
    n: usize,
    m: usize,
    cost: Vec<f64>,
    plan: Vec<f64>,
    supply: Vec<f64>,
    demand: Vec<f64>,
    /// Potentials of rows and columns: reduced costs `C + f − g` are never negative, and 0 where mass flows.
    f: Vec<f64>,
    g: Vec<f64>,
}

impl Flow {
    fn solve(
        cost: ArrayView2<'_, f64>,
        p: ArrayView1<'_, f64>,
        q: ArrayView1<'_, f64>,
        rows: &[usize],
        columns: &[usize],
    ) -> Result<Self> {
        let mut flow = Self::new(cost, p, q, rows, columns);
        // Each path serves a row, a column, or empties a cell; the cap is far above what real masses need and only guards
        // against rounding that would never end.
        let cap = 100 * (rows.len() + 1) * (columns.len() + 1) + 1000;
        for _ in 0..cap {
            if !flow.augment() {
                return Ok(flow);
            }
        }
        Err(Error::invalid("cost", "a problem that ends within the cap on augmenting paths", format!("{cap} paths")))
    }

    fn new(
        cost: ArrayView2<'_, f64>,
        p: ArrayView1<'_, f64>,
        q: ArrayView1<'_, f64>,
        rows: &[usize],
        columns: &[usize],
    ) -> Self {
        let (n, m) = (rows.len(), columns.len());
        let costs: Vec<f64> =
            rows.iter().flat_map(|&i| columns.iter().map(move |&j| (i, j))).map(|at| cost[at]).collect();
        // Costs may be negative: start from the least cost of each column.
        let g = (0..m).map(|j| (0..n).map(|i| costs[i * m + j]).fold(f64::INFINITY, f64::min)).collect();
        Self {
            n,
            m,
            plan: vec![0.0; n * m],
            supply: rows.iter().map(|&i| p[i]).collect(),
            // Totals that differ in the seventh digit are still masses; here they must agree.
            demand: columns.iter().map(|&j| q[j] * (p.sum() / q.sum())).collect(),
            f: vec![0.0; n],
            g,
            cost: costs,
        }
    }

    fn reduced(&self, i: usize, j: usize) -> f64 {
        // Rounding may leave −1e-16; a path length must not fall.
        (self.cost[i * self.m + j] + self.f[i] - self.g[j]).max(0.0)
    }

    /// Sends mass along one shortest path from a row with supply to a column with demand; false when all is served.
    fn augment(&mut self) -> bool {
        let (n, m) = (self.n, self.m);
        let served = |v: &[f64]| v.iter().all(|s| *s <= NOTHING);
        if served(&self.supply) || served(&self.demand) {
            return false;
        }
        // Dijkstra over rows 0..n and columns n..n+m, from all rows with supply at once.
        let mut distance: Vec<f64> = vec![f64::INFINITY; n + m];
        let mut before = vec![usize::MAX; n + m];
        let mut done = vec![false; n + m];
        for (distance, supply) in distance.iter_mut().zip(&self.supply) {
            if *supply > NOTHING {
                *distance = 0.0;
            }
        }
        let end = loop {
            let next = (0..n + m).filter(|&v| !done[v]).min_by(|&a, &b| distance[a].total_cmp(&distance[b]));
            let Some(v) = next.filter(|&v| distance[v].is_finite()) else { return false };
            done[v] = true;
            if v >= n {
                let j = v - n;
                if self.demand[j] > NOTHING {
                    break v;
                }
                for i in 0..n {
                    // Back along mass that flows: its reduced cost is 0.
                    if !done[i] && self.plan[i * m + j] > 0.0 && distance[v] < distance[i] {
                        distance[i] = distance[v];
                        before[i] = v;
                    }
                }
            } else {
                for j in 0..m {
                    let through = distance[v] + self.reduced(v, j);
                    if !done[n + j] && through < distance[n + j] {
                        distance[n + j] = through;
                        before[n + j] = v;
                    }
                }
            }
        };
        let length = distance[end];
        for (potential, d) in self.f.iter_mut().chain(&mut self.g).zip(&distance) {
            *potential += d.min(length);
        }
        let mut path = vec![end];
        while before[path[path.len() - 1]] != usize::MAX {
            path.push(before[path[path.len() - 1]]);
        }
        let start = path[path.len() - 1];
        // Steps of the path from its end: (row → column) adds mass, (column → row) takes it back.
        let mut amount = self.supply[start].min(self.demand[end - n]);
        for step in path.windows(2) {
            if step[0] < n {
                amount = amount.min(self.plan[step[0] * m + step[1] - n]);
            }
        }
        for step in path.windows(2) {
            if step[0] < n {
                self.plan[step[0] * m + step[1] - n] -= amount;
            } else {
                self.plan[step[1] * m + step[0] - n] += amount;
            }
        }
        self.supply[start] -= amount;
        self.demand[end - n] -= amount;
        true
    }
}
