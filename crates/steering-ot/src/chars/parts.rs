//! What a file has to hold of a map.

use super::{CharsMap, Extra, FitReport};
use crate::config::CharsConfig;
use crate::steer::Parts;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    config: CharsConfig,
    report: FitReport,
    source_counts: Option<Vec<usize>>,
    target_counts: Option<Vec<usize>>,
}

impl CharsMap {
    /// The parts under this kind; [`of_parts`](Self::of_parts) builds the map again.
    pub(crate) fn to_parts(&self, kind: &str) -> Parts {
        let settings = Settings {
            config: self.config.clone(),
            report: self.extra.report.clone(),
            source_counts: self.extra.source_counts.clone(),
            target_counts: self.extra.target_counts.clone(),
        };
        let parts = Parts::new(kind, &settings)
            .with("source_centroids", &self.source_centroids)
            .with("target_centroids", &self.target_centroids)
            .with("plan", &self.plan);
        match &self.extra.bounds {
            Some((low, high)) => parts.with("lower_bounds", low).with("upper_bounds", high),
            None => parts,
        }
    }

    pub(crate) fn of_parts(mut parts: Parts) -> Result<Self> {
        let Settings { config, report, source_counts, target_counts } = parts.settings()?;
        let bounds = match (parts.arrays.contains_key("lower_bounds"), parts.arrays.contains_key("upper_bounds")) {
            (true, true) => Some((parts.take("lower_bounds")?, parts.take("upper_bounds")?)),
            (false, false) => None,
            _ => return Err(Error::invalid("arrays", "with both bounds or none", "one of them")),
        };
        let extra = Extra { report, bounds, source_counts, target_counts };
        let (a, b) = (parts.take("source_centroids")?, parts.take("target_centroids")?);
        Self::from_parts(config, a, b, parts.take("plan")?, extra)
    }
}
