//! Writes GGUF files, right ones and wrong ones.
#![allow(dead_code, missing_docs)] // each test file uses some

use lm::tensor::checkpoint::index::GgmlType;

/// A value of the metadata.
#[derive(Debug, Clone)]
pub(crate) enum Value {
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    Ints(Vec<i32>),
}

impl From<u32> for Value {
    fn from(value: u32) -> Self {
        Self::U32(value)
    }
}

impl From<f32> for Value {
    fn from(value: f32) -> Self {
        Self::F32(value)
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Self::Text(value.to_owned())
    }
}

/// A file in the making.
#[derive(Debug, Clone, Default)]
pub(crate) struct File {
    pub(crate) metadata: Vec<(String, Value)>,
    /// Name, shape (outermost first), type, bytes.
    pub(crate) tensors: Vec<(String, Vec<u64>, GgmlType, Vec<u8>)>,
}

const ALIGNMENT: usize = 32;

impl File {
    /// Sets a key.
    pub(crate) fn set(&mut self, key: &str, value: impl Into<Value>) -> &mut Self {
        self.unset(key);
        self.metadata.push((key.to_owned(), value.into()));
        self
    }

    pub(crate) fn unset(&mut self, key: &str) -> &mut Self {
        self.metadata.retain(|(k, _)| k != key);
        self
    }

    pub(crate) fn floats(&mut self, name: &str, shape: &[i64], numbers: &[f32]) -> &mut Self {
        let bytes = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        self.tensor(name, shape, GgmlType::F32, bytes)
    }

    pub(crate) fn tensor(&mut self, name: &str, shape: &[i64], dtype: GgmlType, bytes: Vec<u8>) -> &mut Self {
        self.remove(name);
        self.tensors.push((name.to_owned(), shape.iter().map(|&n| n as u64).collect(), dtype, bytes));
        self
    }

    pub(crate) fn remove(&mut self, name: &str) -> &mut Self {
        self.tensors.retain(|(n, ..)| n != name);
        self
    }

    /// The file's bytes.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            text(&mut out, key);
            write(&mut out, value);
        }
        let mut offset = 0;
        for (name, shape, dtype, bytes) in &self.tensors {
            text(&mut out, name);
            out.extend((shape.len() as u32).to_le_bytes());
            shape.iter().rev().for_each(|n| out.extend(n.to_le_bytes()));
            out.extend(dtype.id().to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset += bytes.len().next_multiple_of(ALIGNMENT);
        }
        for (_, _, _, bytes) in &self.tensors {
            out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
            out.extend(bytes);
        }
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        out
    }
}

fn text(out: &mut Vec<u8>, value: &str) {
    out.extend((value.len() as u64).to_le_bytes());
    out.extend(value.as_bytes());
}

fn write(out: &mut Vec<u8>, value: &Value) {
    let mut kind = |number: u32| out.extend(number.to_le_bytes());
    match value {
        Value::U32(v) => {
            kind(4);
            out.extend(v.to_le_bytes());
        }
        Value::I32(v) => {
            kind(5);
            out.extend(v.to_le_bytes());
        }
        Value::F32(v) => {
            kind(6);
            out.extend(v.to_le_bytes());
        }
        Value::Bool(v) => {
            kind(7);
            out.push((*v).into());
        }
        Value::Text(v) => {
            kind(8);
            text(out, v);
        }
        Value::Texts(v) => {
            kind(9);
            kind_of_list(out, 8, v.len());
            for v in v {
                text(out, v);
            }
        }
        Value::Ints(v) => {
            kind(9);
            kind_of_list(out, 5, v.len());
            for v in v {
                out.extend(v.to_le_bytes());
            }
        }
    }
}

fn kind_of_list(out: &mut Vec<u8>, kind: u32, len: usize) {
    out.extend(kind.to_le_bytes());
    out.extend((len as u64).to_le_bytes());
}

/// The metadata of a byte-level tokenizer: the 256 bytes, `<|end|>` (256, control), and the words `he`, `hel`, `lo`, `hello`, `Ġhello`.
pub(crate) fn with_tokenizer(file: &mut File, pre: &str) {
    let mut tokens: Vec<String> = (0..=255u8).map(|byte| character_of(byte).to_string()).collect();
    let mut types = vec![1; 256];
    tokens.push("<|end|>".to_owned());
    types.push(3);
    for word in ["he", "hel", "lo", "hello", "Ġhello"] {
        tokens.push(word.to_owned());
        types.push(1);
    }
    let merges = ["h e", "he l", "l o", "hel lo", "Ġ hello"].map(str::to_owned).to_vec();
    file.set("tokenizer.ggml.model", "gpt2");
    file.set("tokenizer.ggml.pre", pre);
    file.set("tokenizer.ggml.tokens", Value::Texts(tokens));
    file.set("tokenizer.ggml.token_type", Value::Ints(types));
    file.set("tokenizer.ggml.merges", Value::Texts(merges));
    file.set("tokenizer.ggml.eos_token_id", 256);
}

/// GPT-2's alphabet of bytes.
pub(crate) fn character_of(byte: u8) -> char {
    let printable = |b: u8| matches!(b, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return char::from(byte);
    }
    let rank = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(256 + rank).unwrap()
}
