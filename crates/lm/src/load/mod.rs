//! Checkpoints on disk.

pub mod gguf;
mod hugging_face;

pub(crate) use hugging_face::read_json;

use crate::config::ModelConfig;
use crate::language_model::{Lm, LoadOptions};
use crate::model::Model;
use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use gguf::Gguf;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A `.gguf` file, or a folder of Hugging Face's, or a folder with one `.gguf` file.
pub(crate) fn checkpoint(path: &Path, options: &LoadOptions) -> Result<Lm> {
    if path.is_file() {
        return from_gguf(path, options);
    }
    if path.join("config.json").exists() {
        return from_folder(path, options);
    }
    from_gguf(&only_gguf(path)?, options)
}

fn from_gguf(path: &Path, options: &LoadOptions) -> Result<Lm> {
    let mut file = Gguf::open(path)?;
    let tokenizer = file.tokenizer()?;
    let model = Model::from_gguf(&mut file, options.weights, options.kind, options.device)?;
    let template = file.template(&tokenizer)?;
    let stop = stop_tokens(&model.config().eos, template.as_ref(), &tokenizer);
    Ok(Lm { model, tokenizer, template, stop })
}

fn from_folder(folder: &Path, options: &LoadOptions) -> Result<Lm> {
    let tokenizer = Tokenizer::from_hugging_face(folder)?;
    let template = ChatTemplate::from_hugging_face(folder)?;
    let model = Model::from_hugging_face(folder, options.kind, options.device)?;
    let generation = folder.join("generation_config.json");
    let more = if generation.exists() { ModelConfig::eos_tokens(&read_json(&generation)?)? } else { Vec::new() };
    let eos: Vec<u32> = model.config().eos.iter().copied().chain(more).collect();
    let stop = stop_tokens(&eos, template.as_ref(), &tokenizer);
    Ok(Lm { model, tokenizer, template, stop })
}

/// The tokens that end a text by the configuration, by the tokenizer and by the chat template.
fn stop_tokens(eos: &[u32], template: Option<&ChatTemplate>, tokenizer: &Tokenizer) -> Vec<u32> {
    let end = template.and_then(|t| t.end_token(tokenizer));
    let all: BTreeSet<u32> = eos.iter().copied().chain(tokenizer.eos()).chain(end).collect();
    all.into_iter().collect()
}

fn only_gguf(folder: &Path) -> Result<PathBuf> {
    let io = |source| Error::Io { path: folder.to_owned(), source };
    let entries = folder.read_dir().map_err(io)?.collect::<std::io::Result<Vec<_>>>().map_err(io)?;
    let paths = entries.into_iter().map(|entry| entry.path());
    let mut files: Vec<PathBuf> = paths.filter(|p| p.extension().is_some_and(|e| e == "gguf")).collect();
    match files.len() {
        1 => Ok(files.remove(0)),
        n => {
            let reason = format!("it has no `config.json`, and {n} `.gguf` files instead of one: name the file");
            Err(Error::Checkpoint { path: folder.to_owned(), reason })
        }
    }
}
