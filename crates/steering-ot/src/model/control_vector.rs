//! Control vectors in GGUF files, as llama.cpp and repeng read and write them: one constant shift a layer.
//!
//! Such a file holds f32 vectors named `direction.1`, `direction.2`, …, each added to the residual stream that leaves the layer of
//! its number, counted from 0. There is no vector for layer 0. An input-dependent map can't be written so; its mean shift can.

use super::file::bad;
use super::plan::{SiteMap, SteeringPlan};
use crate::baselines::DiM;
use crate::steer::Steer;
use crate::{Error, Result};
use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use lm::gguf::Gguf;
use lm::hooks::Site;
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;
use std::sync::Arc;

/// `general.architecture` of such files.
const ARCHITECTURE: &str = "controlvector";

impl SteeringPlan {
    /// Writes α times the mean shift of each map as a control vector. `model_hint` is the architecture that the file is for, as in
    /// `llama`. What depends on the input is lost, and so is the mask of tokens: other programs edit every token.
    ///
    /// # Errors
    /// As [`validate`](Self::validate); [`Error::InvalidArgument`] for a site other than the residual stream that leaves a layer from
    /// 1 on, for a map without a mean shift, and for a plan that ablates; [`Error::File`] if the file can't be written.
    pub fn export_gguf_control_vector(&self, path: &Path, model_hint: &str) -> Result<()> {
        self.validate()?;
        if self.mode == super::plan::Mode::Ablate {
            return Err(Error::invalid("mode", "one that adds: a control vector can't ablate", "Ablate"));
        }
        let failed = |error: candle_core::Error| bad(path, format!("it can't be written: {error}"));
        let mut directions = Vec::with_capacity(self.sites.len());
        for one in &self.sites {
            let Site::ResidPost(layer @ 1..) = one.site else {
                let expected = "`resid_post` of a layer from 1 on, which is all that the format knows";
                return Err(Error::invalid("a site of the plan", expected, one.site));
            };
            let Some(mean) = one.map.mean_shift() else {
                let got = one.map.name();
                return Err(Error::invalid(format!("the map at {}", one.site), "one with a mean shift", got));
            };
            let values: Vec<f32> = mean.iter().map(|v| (f64::from(*v) * self.alpha) as f32).collect();
            let width = values.len();
            let vector = candle_core::Tensor::from_vec(values, width, &candle_core::Device::Cpu).map_err(failed)?;
            directions
                .push((format!("direction.{layer}"), QTensor::quantize(&vector, GgmlDType::F32).map_err(failed)?));
        }
        let text = |value: &str| gguf_file::Value::String(value.to_owned());
        let metadata = [
            ("general.architecture", text(ARCHITECTURE)),
            ("controlvector.model_hint", text(model_hint)),
            ("controlvector.layer_count", gguf_file::Value::U32(directions.len() as u32)),
        ];
        let metadata: Vec<(&str, &gguf_file::Value)> = metadata.iter().map(|(name, value)| (*name, value)).collect();
        let tensors: Vec<(&str, &QTensor)> = directions.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let io = |error: std::io::Error| bad(path, format!("it can't be written: {error}"));
        let mut file = BufWriter::new(File::create(path).map_err(io)?);
        gguf_file::write(&mut file, &metadata, &tensors).map_err(failed)?;
        file.into_inner().map_err(|error| io(error.into_error()))?.sync_all().map_err(io)
    }

    /// Reads a control vector: a plan of constant shifts, with strength 1 and the usual mask of tokens. The model's architecture
    /// that the file names is returned beside it.
    ///
    /// # Errors
    /// [`Error::File`] for a file of something else, without vectors or with a name that isn't `direction.N`; what reading
    /// reports.
    pub fn import_gguf_control_vector(path: &Path) -> Result<(Self, Option<String>)> {
        let mut file = Gguf::open(path)?;
        let text = |key: &str| file.index().metadata.get(key).and_then(|value| value.as_str()).map(str::to_owned);
        let architecture = text("general.architecture");
        if architecture.as_deref() != Some(ARCHITECTURE) {
            let found = architecture.unwrap_or_else(|| "missing".to_owned());
            return Err(bad(path, format!("its architecture is {found} instead of {ARCHITECTURE}")));
        }
        let hint = text("controlvector.model_hint");
        let mut names = Vec::new();
        for entry in &file.index().entries {
            let layer = entry.name.strip_prefix("direction.").and_then(|layer| layer.parse::<usize>().ok());
            let Some(layer) = layer.filter(|&layer| layer > 0 && entry.shape.len() == 1) else {
                let reason = format!(
                    "`{}` of shape {:?} in it isn't a vector `direction.N` with N from 1",
                    entry.name, entry.shape
                );
                return Err(bad(path, reason));
            };
            names.push((layer, entry.name.clone()));
        }
        names.sort_unstable();
        let mut sites = Vec::with_capacity(names.len());
        for (layer, name) in names {
            let map: Arc<dyn Steer> =
                Arc::new(DiM::from_vector(file.floats(&name)?.into_iter().map(f64::from).collect())?);
            sites.push(SiteMap { site: Site::ResidPost(layer), map });
        }
        let plan = Self::new(sites);
        plan.validate().map_err(|error| bad(path, error.to_string()))?;
        Ok((plan, hint))
    }
}
