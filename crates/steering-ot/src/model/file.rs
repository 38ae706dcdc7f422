//! Plans as files: one safetensors file with the maps' arrays, and everything else as JSON in its header.

use super::mask::TokenMask;
use super::plan::{Mode, SiteMap, SteeringPlan};
use crate::steer::{Parts, Steer, from_parts};
use crate::{Error, Result};
use lm::hooks::Site;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use tensor::StateDict;
use tensor::interop;

/// What the file says it is.
const FORMAT: &str = "tessera steering plan";
/// Version of the format that is written, and the only one that is read.
const VERSION: u64 = 1;

/// Everything of a plan but the arrays.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    format: String,
    version: u64,
    mode: Mode,
    alpha: f64,
    tokens: TokenMask,
    model: Option<String>,
    maps: Vec<MapHeader>,
    sites: Vec<SiteHeader>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MapHeader {
    kind: String,
    settings: serde_json::Value,
    /// Names of its arrays.
    arrays: Vec<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SiteHeader {
    /// As in `resid_post.15`.
    site: String,
    /// Which of the maps.
    map: usize,
}

impl SteeringPlan {
    /// Writes the plan: arrays in f64, so that a plan that is read again steers bit for bit as before. A map that several sites
    /// share is written once.
    ///
    /// # Errors
    /// As [`validate`](Self::validate); what writing reports.
    pub fn save(&self, path: &Path) -> Result<()> {
        self.validate()?;
        let mut shared: Vec<&Arc<dyn Steer>> = Vec::new();
        let mut sites = Vec::new();
        for one in &self.sites {
            let known = shared.iter().position(|map| Arc::ptr_eq(map, &one.map));
            let map = known.unwrap_or(shared.len());
            if known.is_none() {
                shared.push(&one.map);
            }
            sites.push(SiteHeader { site: one.site.to_string(), map });
        }
        let mut state = StateDict::default();
        let mut maps = Vec::new();
        for (number, map) in shared.into_iter().enumerate() {
            let Parts { kind, settings, arrays } = map.parts();
            maps.push(MapHeader { kind, settings, arrays: arrays.keys().cloned().collect() });
            for (name, array) in arrays {
                state.tensors.insert(format!("{number}.{name}"), interop::to_tensor(&array.view())?);
            }
        }
        let header = Header {
            format: FORMAT.to_owned(),
            version: VERSION,
            mode: self.mode,
            alpha: self.alpha,
            tokens: self.tokens.clone(),
            model: self.model.clone(),
            maps,
            sites,
        };
        let header = serde_json::to_value(&header).map_err(|error| bad(path, error.to_string()))?;
        state.meta.insert("plan".to_owned(), header);
        Ok(state.save(path)?)
    }

    /// Reads what [`save`](Self::save) wrote. Use [`check`](Self::check) before you steer a model with it.
    ///
    /// # Errors
    /// What reading reports; [`Error::File`] for a file of something else, of another version, or whose parts don't fit together.
    pub fn load(path: &Path) -> Result<Self> {
        let mut state = StateDict::load(path)?;
        let Some(header) = state.meta.remove("plan") else {
            return Err(bad(path, "it holds no steering plan".to_owned()));
        };
        if header.get("format").and_then(|f| f.as_str()) != Some(FORMAT) {
            return Err(bad(path, format!("its format is {} instead of \"{FORMAT}\"", header["format"])));
        }
        if header.get("version").and_then(serde_json::Value::as_u64) != Some(VERSION) {
            let reason = format!(
                "it has version {} of the format, and this program reads version {VERSION}: use a newer one",
                header["version"]
            );
            return Err(bad(path, reason));
        }
        let header: Header = serde_json::from_value(header).map_err(|error| bad(path, error.to_string()))?;
        let mut maps: Vec<Arc<dyn Steer>> = Vec::with_capacity(header.maps.len());
        for (number, map) in header.maps.into_iter().enumerate() {
            let mut arrays = BTreeMap::new();
            for name in map.arrays {
                let Some(tensor) = state.tensors.remove(&format!("{number}.{name}")) else {
                    return Err(bad(path, format!("the array \"{name}\" of its map {number} is missing")));
                };
                let array = interop::to_array::<f64>(&tensor)
                    .map_err(|error| bad(path, format!("the array \"{name}\" of its map {number}: {error}")))?;
                arrays.insert(name, array);
            }
            let parts = Parts { kind: map.kind, settings: map.settings, arrays };
            let map = from_parts(parts).map_err(|error| bad(path, format!("its map {number}: {error}")))?;
            maps.push(Arc::from(map));
        }
        let mut sites = Vec::with_capacity(header.sites.len());
        for one in header.sites {
            let site: Site = one.site.parse().map_err(|error: lm::Error| bad(path, error.to_string()))?;
            let Some(map) = maps.get(one.map) else {
                return Err(bad(path, format!("{site} has map {} of {}", one.map, maps.len())));
            };
            sites.push(SiteMap { site, map: Arc::clone(map) });
        }
        let mut plan = Self::new(sites);
        (plan.mode, plan.alpha, plan.tokens, plan.model) = (header.mode, header.alpha, header.tokens, header.model);
        plan.validate().map_err(|error| bad(path, error.to_string()))?;
        Ok(plan)
    }
}

pub(super) fn bad(path: &Path, reason: String) -> Error {
    // The message goes on after the reason; one that is a sentence itself has its full stop already.
    Error::File { path: path.to_owned(), reason: reason.trim_end_matches('.').to_owned() }
}
