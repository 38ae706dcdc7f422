//! Cluster cards: what each cluster is about, in the words of its own texts, and where it is moved \[reconstruction: ours\].

use crate::data::{check_pair, squared_distance_to};
use crate::{CharsMap, Error, Result};
use ndarray::{ArrayView1, ArrayView2};
use serde::Serialize;

/// A text near a centroid.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CardText {
    /// Its row in the set.
    pub row: usize,
    /// Distance of its activation from the centroid.
    pub distance: f64,
    /// The text.
    pub text: String,
}

/// A target cluster that a source cluster is matched with.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CardMatch {
    /// The target cluster.
    pub cluster: usize,
    /// The part of the source cluster's mass that goes there: `P_ij/r_i`.
    pub weight: f64,
    /// Texts nearest to its centroid.
    pub texts: Vec<CardText>,
}

/// A source cluster.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClusterCard {
    /// The source cluster.
    pub cluster: usize,
    /// Its share of the source.
    pub mass: f64,
    /// Length of its shift `m_i`.
    pub shift: f64,
    /// Cosine between its shift and the mean shift: how heterogeneous the concept is.
    pub cosine_to_mean: f64,
    /// Texts nearest to its centroid.
    pub texts: Vec<CardText>,
    /// The target clusters that get at least 1 % of it, the largest part first.
    pub matches: Vec<CardMatch>,
}

/// Parts of a cluster smaller than this aren't shown.
const SHOWN: f64 = 0.01;

/// A card for each source cluster with mass, with the `n` nearest texts of each centroid. Activations (`[N_A, D]`, `[N_B, D]`) and
/// texts are those of the fit, or any others of the same site.
///
/// # Errors
/// [`Error::EmptySet`], [`Error::NonFinite`]; [`Error::DimMismatch`] for rows of another width than the map's or texts of
/// another number than rows.
pub fn cluster_cards<S: AsRef<str>>(
    map: &CharsMap,
    source: ArrayView2<'_, f32>,
    target: ArrayView2<'_, f32>,
    source_texts: &[S],
    target_texts: &[S],
    n: usize,
) -> Result<Vec<ClusterCard>> {
    if check_pair(source, target)? != map.width() {
        return Err(Error::dim("Each row of the source set", map.width(), source.ncols()));
    }
    for (what, x, texts) in [("source_texts", source, source_texts), ("target_texts", target, target_texts)] {
        if texts.len() != x.nrows() {
            return Err(Error::dim(what, x.nrows(), texts.len()));
        }
    }
    let target_cards: Vec<Vec<CardText>> =
        map.target_centroids().rows().into_iter().map(|c| nearest(target, c, target_texts, n)).collect();
    let mean = map.mean_shift_exact();
    let length = |v: ArrayView1<'_, f64>| v.dot(&v).sqrt();
    let card = |i: usize| {
        let mut matches: Vec<CardMatch> = target_cards
            .iter()
            .enumerate()
            .map(|(j, texts)| CardMatch { cluster: j, weight: map.plan()[(i, j)] / map.p()[i], texts: texts.clone() })
            .filter(|m| m.weight >= SHOWN)
            .collect();
        matches.sort_by(|a, b| b.weight.total_cmp(&a.weight));
        let shift = map.shifts().row(i);
        let lengths = length(shift) * length(mean.view());
        ClusterCard {
            cluster: i,
            mass: map.p()[i],
            shift: length(shift),
            cosine_to_mean: if lengths > 0.0 { shift.dot(mean) / lengths } else { 0.0 },
            texts: nearest(source, map.source_centroids().row(i), source_texts, n),
            matches,
        }
    };
    Ok((0..map.p().len()).filter(|&i| map.p()[i] > 0.0).map(card).collect())
}

fn nearest<S: AsRef<str>>(
    x: ArrayView2<'_, f32>,
    centroid: ArrayView1<'_, f64>,
    texts: &[S],
    n: usize,
) -> Vec<CardText> {
    let centroid = centroid.to_vec();
    let mut order: Vec<(f64, usize)> =
        x.rows().into_iter().enumerate().map(|(row, v)| (squared_distance_to(&v.to_vec(), &centroid), row)).collect();
    order.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    order.truncate(n);
    order
        .into_iter()
        .map(|(d, row)| CardText { row, distance: d.sqrt(), text: texts[row].as_ref().to_owned() })
        .collect()
}
