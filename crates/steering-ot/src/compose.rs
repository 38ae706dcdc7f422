//! Several maps at one site that don't undo each other \[reconstruction: ours\].

use crate::chars::check_input;
use crate::data::narrow;
use crate::steer::{Parts, Steer, from_parts};
use crate::{Error, Result};
use ndarray::{Array1, Array2, ArrayView2, Ix2};
use serde::{Deserialize, Serialize};

/// Which other maps' directions are taken out of a map's shift.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Orthogonalise {
    /// None: shifts are added as they are.
    None,
    /// Those of the maps before it, so the first map acts as alone.
    Earlier,
    /// Those of all others. What two maps share is then moved by neither.
    #[default]
    Mutual,
}

/// Settings of [`Composition`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ComposeConfig {
    /// Whose directions are taken out.
    pub orthogonalise: Orthogonalise,
    /// How many directions of each map, the strongest first: its PCT subspace.
    pub directions: usize,
    /// Whether a map's mean shift counts as one of its directions. Without it maps that move the same way add up; with it only
    /// the first ([`Orthogonalise::Earlier`]) or none ([`Orthogonalise::Mutual`]) moves that way.
    pub with_mean: bool,
    /// Strength of each map; empty for 1 each.
    pub strengths: Vec<f64>,
}

impl Default for ComposeConfig {
    fn default() -> Self {
        Self { orthogonalise: Orthogonalise::default(), directions: 3, with_mean: false, strengths: Vec::new() }
    }
}

/// `T(x) − x = Σ_k s_k (I − B_kᵀB_k) v_k(x)`: the maps' shifts at the same input, each without the part in the others' subspaces
/// (`B_k`, orthonormal rows).
#[derive(Debug)]
pub struct Composition {
    config: ComposeConfig,
    maps: Vec<Box<dyn Steer>>,
    /// What is taken out of each map's shift (`[≤ L·others, D]`).
    removed: Vec<Array2<f64>>,
}

impl Composition {
    /// Puts maps of one site together.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] without maps or for strengths that aren't finite, [`Error::DimMismatch`] for maps of
    /// different widths or strengths of another number.
    pub fn new(maps: Vec<Box<dyn Steer>>, config: ComposeConfig) -> Result<Self> {
        let Some(first) = maps.first() else {
            return Err(Error::invalid("maps", "at least one map", "none"));
        };
        let width = first.width();
        for (i, map) in maps.iter().enumerate() {
            if map.width() != width {
                return Err(Error::dim(format!("Map {i}, in width,"), width, map.width()));
            }
        }
        if !config.strengths.is_empty() && config.strengths.len() != maps.len() {
            return Err(Error::dim("strengths", maps.len(), config.strengths.len()));
        }
        if let Some(bad) = config.strengths.iter().find(|s| !s.is_finite()) {
            return Err(Error::invalid("strengths", "finite", bad));
        }
        let own: Vec<Array2<f64>> = maps.iter().map(|map| subspace(map.as_ref(), &config)).collect();
        let removed = (0..maps.len())
            .map(|k| {
                let others: Vec<_> = (0..maps.len())
                    .filter(|&j| match config.orthogonalise {
                        Orthogonalise::None => false,
                        Orthogonalise::Earlier => j < k,
                        Orthogonalise::Mutual => j != k,
                    })
                    .flat_map(|j| own[j].rows())
                    .collect();
                orthonormal(others.into_iter().map(|row| row.to_owned()), width)
            })
            .collect();
        Ok(Self { config, maps, removed })
    }

    /// The maps.
    pub fn maps(&self) -> &[Box<dyn Steer>] {
        &self.maps
    }

    /// The directions that are taken out of map `k`'s shift (`[_, D]`, orthonormal).
    pub fn removed(&self, k: usize) -> Option<&Array2<f64>> {
        self.removed.get(k)
    }

    fn strength(&self, k: usize) -> f64 {
        self.config.strengths.get(k).copied().unwrap_or(1.0)
    }

    /// Adds the maps' shifts, each given by `of`, without what is taken out of it.
    fn sum(&self, rows: usize, of: impl Fn(&dyn Steer) -> Result<Array2<f32>>) -> Result<Array2<f64>> {
        let mut sum = Array2::zeros((rows, self.width()));
        for (k, (map, removed)) in self.maps.iter().zip(&self.removed).enumerate() {
            let mut shift = of(map.as_ref())?.mapv(f64::from);
            let along = shift.dot(&removed.t());
            shift -= &along.dot(removed);
            sum.scaled_add(self.strength(k), &shift);
        }
        Ok(sum)
    }

    pub(crate) fn of_parts(mut parts: Parts) -> Result<Self> {
        let Settings { config, maps } = parts.settings()?;
        let count = maps.len();
        let mut built = Vec::with_capacity(count);
        for (k, Member { kind, settings }) in maps.into_iter().enumerate() {
            let prefix = format!("{k}/");
            let mine: Vec<String> = parts.arrays.keys().filter(|name| name.starts_with(&prefix)).cloned().collect();
            let arrays = mine
                .into_iter()
                .filter_map(|name| parts.arrays.remove(&name).map(|a| (name[prefix.len()..].to_owned(), a)))
                .collect();
            built.push(from_parts(Parts { kind, settings, arrays })?);
        }
        let mut composed = Self::new(built, config)?;
        // The saved directions are used, so that the shifts are the same to the last bit.
        for (k, removed) in composed.removed.iter_mut().enumerate() {
            let saved: Array2<f64> = parts.take::<Ix2>(&format!("removed/{k}"))?;
            if saved.ncols() != removed.ncols() {
                return Err(Error::dim("Each removed direction", removed.ncols(), saved.ncols()));
            }
            let gram = saved.dot(&saved.t());
            if gram.indexed_iter().any(|((i, j), v)| (v - f64::from(u8::from(i == j))).abs() > 1e-6) {
                return Err(Error::invalid(format!("arrays.removed/{k}"), "orthonormal rows", "others"));
            }
            *removed = saved;
        }
        Ok(composed)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Member {
    kind: String,
    settings: serde_json::Value,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    config: ComposeConfig,
    maps: Vec<Member>,
}

impl Steer for Composition {
    fn name(&self) -> &'static str {
        "composition"
    }

    fn width(&self) -> usize {
        self.maps[0].width() // never empty: checked in `new`
    }

    fn shift(&self, x: ArrayView2<'_, f32>) -> Result<Array2<f32>> {
        check_input(x, self.width())?;
        narrow(&self.sum(x.nrows(), |map| map.shift(x))?, "the sum of the shifts")
    }

    fn mean_shift(&self) -> Option<Array1<f32>> {
        if self.maps.iter().any(|map| map.mean_shift().is_none()) {
            return None;
        }
        let of = |map: &dyn Steer| {
            let mean = map.mean_shift().unwrap_or_else(|| Array1::zeros(map.width()));
            Ok(mean.insert_axis(ndarray::Axis(0)))
        };
        self.sum(1, of).ok().map(|mean| mean.row(0).mapv(|v| v as f32))
    }

    fn parts(&self) -> Parts {
        let members: Vec<Parts> = self.maps.iter().map(|map| map.parts()).collect();
        let settings = Settings {
            config: self.config.clone(),
            maps: members.iter().map(|m| Member { kind: m.kind.clone(), settings: m.settings.clone() }).collect(),
        };
        let mut parts = Parts::new(self.name(), &settings);
        for (k, member) in members.into_iter().enumerate() {
            parts.arrays.extend(member.arrays.into_iter().map(|(name, array)| (format!("{k}/{name}"), array)));
            parts = parts.with(&format!("removed/{k}"), &self.removed[k]);
        }
        parts
    }

    fn directions(&self, l: usize) -> Array2<f64> {
        let all: Vec<Array2<f64>> = self.maps.iter().map(|map| map.directions(l)).collect();
        let all = orthonormal(all.iter().flat_map(|d| d.rows()).map(|row| row.to_owned()), self.width());
        let l = l.min(all.nrows());
        all.slice_move(ndarray::s![..l, ..])
    }
}

/// The directions of a map that others keep out of.
fn subspace(map: &dyn Steer, config: &ComposeConfig) -> Array2<f64> {
    let mean = if config.with_mean { map.mean_shift() } else { None };
    let directions = map.directions(config.directions);
    let mean = mean.map(|v| v.mapv(f64::from));
    orthonormal(mean.into_iter().chain(directions.rows().into_iter().map(|row| row.to_owned())), map.width())
}

/// An orthonormal basis (`[_, D]`) of these directions, whatever their lengths.
fn orthonormal(directions: impl Iterator<Item = Array1<f64>>, width: usize) -> Array2<f64> {
    let mut basis = Array2::zeros((0, width));
    for direction in directions {
        let length = direction.dot(&direction).sqrt();
        if !(length > 0.0 && length.is_finite()) {
            continue;
        }
        let mut rest = direction / length;
        for _ in 0..2 {
            let along = basis.dot(&rest);
            rest -= &basis.t().dot(&along);
        }
        let left = rest.dot(&rest).sqrt();
        // What is left of a direction that the basis already spans is rounding.
        if left > 1e-8 {
            rest /= left;
            // A row of the basis's own width always fits.
            if basis.push_row(rest.view()).is_err() {
                break;
            }
        }
    }
    basis
}
