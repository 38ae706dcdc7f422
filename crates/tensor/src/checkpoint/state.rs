//! Named tensors with metadata, in safetensors files.

use super::index;
use crate::{Error, Result};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use tch::{Device, Kind, Tensor, no_grad};

/// Key of the JSON object in the file's metadata.
const META: &str = "tessera";

/// Tensors by name and a JSON object of everything else.
///
/// ```
/// use tensor::{StateDict, tch::Tensor};
/// let mut state = StateDict::default();
/// state.tensors.insert("momentum.0".into(), Tensor::from_slice(&[1.0f32, 2.0]));
/// state.meta.insert("step".into(), 7.into());
/// let file = std::env::temp_dir().join(format!("state-{}.safetensors", std::process::id()));
/// state.save(&file)?;
/// let back = StateDict::load(&file)?;
/// assert_eq!(back.meta["step"], 7);
/// assert_eq!(back.tensors["momentum.0"], state.tensors["momentum.0"]);
/// # std::fs::remove_file(file).ok();
/// # Ok::<(), tensor::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct StateDict {
    /// Tensors by name; loaded ones are on the CPU.
    pub tensors: BTreeMap<String, Tensor>,
    /// Scalars, configuration, versions.
    pub meta: Map<String, Value>,
}

fn dtype(name: &str, kind: Kind) -> Result<Dtype> {
    Ok(match kind {
        Kind::Float => Dtype::F32,
        Kind::Double => Dtype::F64,
        Kind::Half => Dtype::F16,
        Kind::BFloat16 => Dtype::BF16,
        Kind::Int64 => Dtype::I64,
        Kind::Int => Dtype::I32,
        Kind::Int16 => Dtype::I16,
        Kind::Int8 => Dtype::I8,
        Kind::Uint8 => Dtype::U8,
        Kind::Bool => Dtype::BOOL,
        other => {
            return Err(Error::Kind {
                what: format!("The tensor \"{name}\""),
                expected: "one that safetensors stores (f16, bf16, f32, f64, integers, bool)".into(),
                got: format!("{other:?}"),
            });
        }
    })
}

fn kind(dtype: index::SafeDtype) -> Option<Kind> {
    use index::SafeDtype as D;
    Some(match dtype {
        D::F32 => Kind::Float,
        D::F64 => Kind::Double,
        D::F16 => Kind::Half,
        D::BF16 => Kind::BFloat16,
        D::I64 => Kind::Int64,
        D::I32 => Kind::Int,
        D::I16 => Kind::Int16,
        D::I8 => Kind::Int8,
        D::U8 => Kind::Uint8,
        D::Bool => Kind::Bool,
        _ => return None,
    })
}

impl StateDict {
    /// Writes the file: beside the target first, then renamed over it.
    ///
    /// # Errors
    /// [`Error::Kind`] for element types that safetensors lacks, [`Error::Io`] when writing fails (the old
    /// file is still whole then).
    pub fn save(&self, path: &Path) -> Result<()> {
        let io = |source| Error::Io { path: path.to_owned(), source };
        let bad = |reason: String| Error::Checkpoint { path: path.to_owned(), reason };
        let mut stored = Vec::with_capacity(self.tensors.len());
        for (name, tensor) in &self.tensors {
            let local = tensor.detach().to_device(Device::Cpu).contiguous();
            let mut bytes = vec![0u8; local.numel() * local.kind().elt_size_in_bytes()];
            local.f_copy_data_u8(&mut bytes, local.numel())?;
            let shape: Vec<usize> = local.size().iter().map(|&n| n as usize).collect();
            stored.push((name, dtype(name, local.kind())?, shape, bytes));
        }
        let mut views = Vec::with_capacity(stored.len());
        for (name, dtype, shape, bytes) in &stored {
            let view = TensorView::new(*dtype, shape.clone(), bytes).map_err(|e| bad(e.to_string()))?;
            views.push((name.as_str(), view));
        }
        let meta = HashMap::from([(META.to_owned(), Value::Object(self.meta.clone()).to_string())]);
        let bytes = safetensors::serialize(views, Some(meta)).map_err(|e| bad(e.to_string()))?;
        let partial = path.with_extension(format!("partial-{}", std::process::id()));
        let written = File::create(&partial).and_then(|mut file| {
            file.write_all(&bytes)?;
            file.sync_all()
        });
        written.and_then(|()| std::fs::rename(&partial, path)).map_err(|source| {
            // What matters is the first error; a leftover partial file has its own name.
            let _ = std::fs::remove_file(&partial);
            io(source)
        })
    }

    /// Reads a file written by [`save`](Self::save) or by any other safetensors writer (then without `meta`).
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Index`] for a malformed header (lengths beyond the file, overlapping ranges),
    /// [`Error::Checkpoint`] for element types that libtorch lacks.
    pub fn load(path: &Path) -> Result<Self> {
        let io = |source| Error::Io { path: path.to_owned(), source };
        let mut file = File::open(path).map_err(io)?;
        let header = index::read_safetensors(&mut file, &index::Limits::default())?;
        let meta = match header.metadata.get(META) {
            Some(text) => serde_json::from_str(text).map_err(|e| Error::Checkpoint {
                path: path.to_owned(),
                reason: format!("its \"{META}\" metadata isn't a JSON object: {e}"),
            })?,
            None => Map::new(),
        };
        let mut tensors = BTreeMap::new();
        for entry in &header.entries {
            let kind = kind(entry.dtype).ok_or_else(|| Error::Checkpoint {
                path: path.to_owned(),
                reason: format!(
                    "the tensor \"{}\" has the element type {:?}, which libtorch lacks",
                    entry.name, entry.dtype
                ),
            })?;
            // The index has checked the range against the file's length.
            let mut bytes = vec![0u8; (entry.range.end - entry.range.start) as usize];
            file.seek(SeekFrom::Start(entry.range.start)).map_err(io)?;
            file.read_exact(&mut bytes).map_err(io)?;
            let shape: Vec<i64> = entry.shape.iter().map(|&n| n as i64).collect();
            tensors.insert(entry.name.clone(), Tensor::f_from_data_size(&bytes, &shape, kind)?);
        }
        Ok(Self { tensors, meta })
    }

    /// Copies the tensors into the variables of a store, in place, with names translated by `names`.
    ///
    /// Nothing is written unless every shape fits.
    ///
    /// # Errors
    /// [`Error::Shape`] naming the first variable whose shape differs.
    pub fn copy_into(&self, store: &tch::nn::VarStore, names: &NameMap) -> Result<LoadReport> {
        let variables: BTreeMap<String, Tensor> = store.variables().into_iter().collect();
        let mut report = LoadReport::default();
        let mut matched = Vec::new();
        for (stored, tensor) in &self.tensors {
            let name = names.translate(stored);
            match variables.get(&name) {
                Some(variable) if variable.size() == tensor.size() => matched.push((name, variable, tensor)),
                Some(variable) => {
                    return Err(Error::Shape {
                        what: format!("The stored tensor \"{stored}\" for the variable \"{name}\""),
                        expected: variable.size(),
                        got: tensor.size(),
                    });
                }
                None => report.unexpected.push(stored.clone()),
            }
        }
        report.missing = variables.keys().filter(|name| !matched.iter().any(|(m, _, _)| m == *name)).cloned().collect();
        no_grad(|| {
            for (name, variable, tensor) in matched {
                variable.shallow_clone().f_copy_(tensor)?;
                report.loaded.push(name);
            }
            Ok(report)
        })
    }

    /// The tensors of a variable store by name (shared memory, not copies).
    pub fn of_var_store(store: &tch::nn::VarStore) -> Self {
        Self { tensors: store.variables().into_iter().collect(), meta: Map::new() }
    }
}

/// Translates the names of a file into those of a model: the first rule whose prefix fits replaces it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NameMap {
    /// `(prefix in the file, prefix in the model)`, tried in order.
    pub prefixes: Vec<(String, String)>,
}

impl NameMap {
    /// The model's name for a name of the file.
    pub fn translate(&self, name: &str) -> String {
        self.prefixes
            .iter()
            .find_map(|(from, to)| name.strip_prefix(from.as_str()).map(|rest| format!("{to}{rest}")))
            .unwrap_or_else(|| name.to_owned())
    }
}

/// Which names met when a state was copied into a model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// Variables that were overwritten.
    pub loaded: Vec<String>,
    /// Variables of the model that the file doesn't have.
    pub missing: Vec<String>,
    /// Tensors of the file that the model doesn't have.
    pub unexpected: Vec<String>,
}
