//! GGUF files: configuration, tokenizer, chat template and tensors in one file.
//!
//! ```no_run
//! use lm::gguf::{Gguf, Weights};
//! use lm::model::Model;
//! use lm::tensor::tch::{Device, Kind};
//! use std::path::Path;
//!
//! let mut file = Gguf::open(Path::new("model.gguf"))?;
//! let tokenizer = file.tokenizer()?;
//! let model = Model::from_gguf(&mut file, Weights::Dense, Kind::Float, Device::Cpu)?;
//! tokenizer.check_model(model.config().vocab)?;
//! # Ok::<(), lm::Error>(())
//! ```
//!
//! The header is read by [`tensor::checkpoint::index`], blocks are unpacked by candle-core. Tensors are read one after the other, in pieces,
//! into memory of their own: a file that shrinks meanwhile gives an error, and beside the model only one piece is in memory.

mod config;
pub(crate) mod dequantize;
mod metadata;
mod names;
mod source;

pub(crate) use metadata::Metadata;
pub use source::Weights;

use crate::config::ModelConfig;
use crate::model::Model;
use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use source::GgufSource;
use std::fmt;
use std::fs::File;
use std::io::{Cursor, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use tensor::checkpoint::index::{Entry, GgmlType, GgufIndex, Limits, read_gguf};
use tensor::tch::{Device, Kind};

/// What a file is read from.
trait Bytes: Read + Seek + Send {}
impl<T: Read + Seek + Send> Bytes for T {}

/// A GGUF file whose header has been read.
pub struct Gguf {
    path: PathBuf,
    index: GgufIndex,
    bytes: Box<dyn Bytes>,
}

impl fmt::Debug for Gguf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gguf")
            .field("path", &self.path)
            .field("tensors", &self.index.entries.len())
            .finish_non_exhaustive()
    }
}

impl Gguf {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Index`] for a header that breaks a rule of the format.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|source| Error::Io { path: path.to_owned(), source })?;
        Self::read(path, Box::new(file))
    }

    /// A file that lies in memory.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self> {
        Self::read(Path::new("(in memory)"), Box::new(Cursor::new(bytes)))
    }

    fn read(path: &Path, mut bytes: Box<dyn Bytes>) -> Result<Self> {
        let index = read_gguf(&mut bytes, &Limits::default())?;
        Ok(Self { path: path.to_owned(), index, bytes })
    }

    /// The file's header: metadata, and each tensor's name, type, shape and place.
    pub fn index(&self) -> &GgufIndex {
        &self.index
    }

    /// What the model is made of. Architectures `llama` (also with a mixture of experts), `qwen2` and `gpt2`.
    ///
    /// # Errors
    /// [`Error::Config`] for a missing or malformed key, or something that isn't built; [`Error::RopeScaling`];
    /// [`Error::Io`] if the frequencies' divisors can't be read.
    pub fn config(&mut self) -> Result<ModelConfig> {
        config::read(self)
    }

    /// The tokenizer (`tokenizer.ggml.model` = `gpt2`).
    ///
    /// # Errors
    /// [`Error::PreTokenizer`] for one whose rules aren't known; [`Error::Config`] for a missing or malformed key.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        Tokenizer::from_metadata(self.metadata())
    }

    /// The chat template, if the file has one.
    ///
    /// # Errors
    /// [`Error::Template`] if it can't be parsed; [`Error::Config`] if it isn't text.
    pub fn template(&self, tokenizer: &Tokenizer) -> Result<Option<ChatTemplate>> {
        const KEY: &str = "tokenizer.chat_template";
        if !self.metadata().has(KEY) {
            return Ok(None);
        }
        let mark = |id: Option<u32>| id.and_then(|id| tokenizer.token(id)).unwrap_or_default();
        ChatTemplate::new(self.metadata().text(KEY)?, mark(tokenizer.bos()), mark(tokenizer.eos())).map(Some)
    }

    /// The elements of a tensor by its name in the file, unpacked, in the order in which they are stored.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no such tensor; [`Error::TensorType`]; [`Error::Io`].
    pub fn floats(&mut self, name: &str) -> Result<Vec<f32>> {
        let entry = self.index.get(name).cloned();
        let entry = entry.ok_or_else(|| Error::invalid("name", "a tensor of the file", format!("`{name}`")))?;
        let kind = dequantize::known(&entry)?;
        let bytes = self.read_range(entry.range.start, entry.range.end - entry.range.start)?;
        dequantize::floats(kind, &bytes)
    }

    pub(crate) fn metadata(&self) -> Metadata<'_> {
        Metadata::new(&self.index)
    }

    fn entry(&self, name: &str) -> Option<&Entry<GgmlType>> {
        self.index.get(name)
    }

    /// Bytes of the file. The index has checked that ranges lie in it, so memory is taken only for what was there.
    fn read_range(&mut self, start: u64, len: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len as usize];
        self.read_into(start, &mut bytes)?;
        Ok(bytes)
    }

    fn read_into(&mut self, start: u64, bytes: &mut [u8]) -> Result<()> {
        let read = self.bytes.seek(SeekFrom::Start(start)).and_then(|_| self.bytes.read_exact(bytes));
        read.map_err(|source| Error::Io { path: self.path.clone(), source })
    }
}

impl Model {
    /// Builds the model of a GGUF file on `device`, with activations, and what isn't packed, as `kind`.
    ///
    /// # Errors
    /// As [`Gguf::config`]; [`Error::Tensors`] listing every missing and unexpected tensor, before one is read;
    /// [`Error::TensorShape`], [`Error::TensorType`], [`Error::Io`].
    pub fn from_gguf(file: &mut Gguf, weights: Weights, kind: Kind, device: Device) -> Result<Self> {
        if weights == Weights::Packed && device != Device::Cpu {
            let expected = "dense on another device than the CPU, where packed weights are multiplied";
            return Err(Error::invalid("weights", expected, "packed"));
        }
        let config = file.config()?;
        let mut source = GgufSource::new(file, &config, weights, kind, device)?;
        Self::build(&config, &mut source, kind, device)
    }
}
