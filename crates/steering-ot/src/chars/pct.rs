//! Principal component thresholding: in which directions the shifts between clusters differ.
//!
//! With `A_i = a_i − ā` and `B_j = b_j − b̄` (means under the plan's marginals) `v_ij − v̄ = B_j − A_i`, so that
//! `Σ_tot = Wᵀ M W` with `W = [A; B]` and `M = [[diag p, −P], [−Pᵀ, diag q]]`, the Laplacian of the plan. Its eigenvectors come from
//! the `(K_A + K_B)²` matrix `M^½ W Wᵀ M^½`; no `D×D` and no `K_A·K_B` rows are formed.

use nalgebra::{DMatrix, SymmetricEigen};
use ndarray::{Array2, ArrayView2, Axis};

/// Eigenvalues and eigenvectors of `Σ_tot`.
#[derive(Debug, Clone, PartialEq)]
pub struct Principal {
    /// The positive eigenvalues, largest first, in squared units of the activations.
    pub values: Vec<f64>,
    /// Their eigenvectors (`[rank, D]`), orthonormal; signs are arbitrary.
    pub vectors: Array2<f64>,
}

impl Principal {
    /// Number of positive eigenvalues, at most `K_A + K_B − 2`.
    pub fn rank(&self) -> usize {
        self.values.len()
    }
}

/// Eigenvalues below this share of the largest are rounding.
const NOTHING: f64 = 1e-13;

/// The eigenvectors of `Σ_tot = Σ_ij P_ij (v_ij − v̄)(v_ij − v̄)ᵀ` for centroids `[K_A, D]`, `[K_B, D]` and a plan
/// `[K_A, K_B]` that fit together.
pub fn principal(source: ArrayView2<'_, f64>, target: ArrayView2<'_, f64>, plan: ArrayView2<'_, f64>) -> Principal {
    let (p, q) = (plan.sum_axis(Axis(1)), plan.sum_axis(Axis(0)));
    let (k_a, d) = source.dim();
    let n = k_a + target.nrows();
    let mut w = Array2::<f64>::zeros((n, d));
    w.slice_mut(ndarray::s![..k_a, ..]).assign(&(&source - &p.dot(&source)));
    w.slice_mut(ndarray::s![k_a.., ..]).assign(&(&target - &q.dot(&target)));
    let laplacian = DMatrix::from_fn(n, n, |i, j| match (i < k_a, j < k_a) {
        (true, true) => {
            if i == j {
                p[i]
            } else {
                0.0
            }
        }
        (false, false) => {
            if i == j {
                q[i - k_a]
            } else {
                0.0
            }
        }
        (true, false) => -plan[(i, j - k_a)],
        (false, true) => -plan[(j, i - k_a)],
    });
    let eigen = SymmetricEigen::new(laplacian);
    let root = &eigen.eigenvectors
        * DMatrix::from_diagonal(&eigen.eigenvalues.map(|v| v.max(0.0).sqrt()))
        * eigen.eigenvectors.transpose();
    // Y = M^½ W, so Σ_tot = YᵀY, and Y Yᵀ has the same eigenvalues.
    let root = Array2::from_shape_fn((n, n), |at| root[at]);
    let y = root.dot(&w);
    let gram = y.dot(&y.t());
    let eigen = SymmetricEigen::new(DMatrix::from_fn(n, n, |i, j| 0.5 * (gram[(i, j)] + gram[(j, i)])));
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|&i, &j| eigen.eigenvalues[j].total_cmp(&eigen.eigenvalues[i]));
    let largest = eigen.eigenvalues[order[0]];
    // The Laplacian has the constant vector in its kernel and the rows of A and of B are centred: two dimensions are lost.
    let most = n.saturating_sub(2).min(d);
    // All at once: Yᵀ e for each eigenvector e of the small matrix.
    let candidates = Array2::from_shape_fn((most, n), |(r, c)| eigen.eigenvectors[(c, order[r])]).dot(&y);
    let mut values = Vec::new();
    let mut vectors = Array2::zeros((0, d));
    for (&i, candidate) in order.iter().zip(candidates.rows()) {
        let value = eigen.eigenvalues[i];
        if !(value > NOTHING * largest && value > 0.0) {
            break;
        }
        let mut u = candidate.to_owned();
        // Small eigenvalues leave directions that lean toward the large ones; taken out twice, they don't.
        for _ in 0..2 {
            let along = vectors.dot(&u);
            u -= &vectors.t().dot(&along);
            let norm = u.dot(&u).sqrt();
            u /= norm;
        }
        if !u.iter().all(|v: &f64| v.is_finite()) || vectors.push_row(u.view()).is_err() {
            break;
        }
        values.push(value);
    }
    Principal { values, vectors }
}
