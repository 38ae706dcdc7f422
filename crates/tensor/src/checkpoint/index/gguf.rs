use std::collections::BTreeMap;
use std::collections::btree_map;
use std::io::{Cursor, Read, Seek};

use super::reader::HeaderReader;
use super::{Entry, GgmlType, IndexError, Limits, elements, no_duplicates, no_overlaps, overflow, within};

/// The header of a GGUF file.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufIndex {
    /// Version of the format, 2 or 3.
    pub version: u32,
    /// Each tensor begins on a multiple of this many bytes.
    pub alignment: u64,
    /// Keys and values of the file.
    pub metadata: BTreeMap<String, GgufValue>,
    /// The tensors, in the order of the header, with their shapes outermost first.
    pub entries: Vec<Entry<GgmlType>>,
}

impl GgufIndex {
    /// The tensor called `name`.
    pub fn get(&self, name: &str) -> Option<&Entry<GgmlType>> {
        self.entries.iter().find(|e| e.name == name)
    }
}

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum GgufValue {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(GgufArray),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// Values of one type.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum GgufArray {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Vec<String>),
    Array(Vec<GgufArray>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

impl GgufValue {
    /// The value, if it is a whole number from 0, of whatever width.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(v) => Some(v.into()),
            Self::U16(v) => Some(v.into()),
            Self::U32(v) => Some(v.into()),
            Self::U64(v) => Some(v),
            Self::I8(v) => v.try_into().ok(),
            Self::I16(v) => v.try_into().ok(),
            Self::I32(v) => v.try_into().ok(),
            Self::I64(v) => v.try_into().ok(),
            _ => None,
        }
    }

    /// The value, if it is a floating-point number.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Self::F32(v) => Some(v.into()),
            Self::F64(v) => Some(v),
            _ => None,
        }
    }

    /// The value, if it is a truth value.
    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Self::Bool(v) => Some(v),
            _ => None,
        }
    }

    /// The value, if it is a string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(v) => Some(v),
            _ => None,
        }
    }

    /// The value, if it is an array of strings, such as a tokenizer's vocabulary.
    pub fn as_strings(&self) -> Option<&[String]> {
        match self {
            Self::Array(GgufArray::String(v)) => Some(v),
            _ => None,
        }
    }
}

impl GgufArray {
    /// Number of values.
    pub fn len(&self) -> usize {
        match self {
            Self::U8(v) => v.len(),
            Self::I8(v) => v.len(),
            Self::U16(v) => v.len(),
            Self::I16(v) => v.len(),
            Self::U32(v) => v.len(),
            Self::I32(v) => v.len(),
            Self::F32(v) => v.len(),
            Self::Bool(v) => v.len(),
            Self::String(v) => v.len(),
            Self::Array(v) => v.len(),
            Self::U64(v) => v.len(),
            Self::I64(v) => v.len(),
            Self::F64(v) => v.len(),
        }
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

const ALIGNMENT_KEY: &str = "general.alignment";
const DEFAULT_ALIGNMENT: u64 = 32;
/// Far above any page; keeps the padding out of overflow's reach.
const MOST_ALIGNMENT: u64 = 1 << 20;
/// Length of the key, type, and one byte of value.
const LEAST_PAIR: u64 = 8 + 4 + 1;
/// Length of the name, number of dimensions, type, offset.
const LEAST_TENSOR: u64 = 8 + 4 + 4 + 8;

/// Reads the header of a GGUF file of version 2 or 3, little-endian; the tensors stay unread.
///
/// # Errors
/// [`IndexError`], for each rule of [the module](super) that the file breaks; also for a type that isn't known and for a tensor that doesn't
/// begin on a multiple of the alignment.
pub fn read_gguf<R: Read + Seek>(file: &mut R, limits: &Limits) -> Result<GgufIndex, IndexError> {
    let mut reader = HeaderReader::new(file, limits.header_bytes)?;
    let magic = reader.bytes("the magic number", 4)?;
    if magic != b"GGUF" {
        return Err(IndexError::NotThisFormat {
            format: "GGUF",
            problem: format!("it must begin with `GGUF`, but begins with `{}`", magic.escape_ascii()),
        });
    }
    let version = reader.u32("the version")?;
    if !(2..=3).contains(&version) {
        return Err(IndexError::Version { version });
    }
    let tensors = reader.u64("the number of tensors")?;
    within("the number of tensors", tensors, limits.tensors)?;
    let pairs = reader.u64("the number of metadata keys")?;
    within("the number of metadata keys", pairs, limits.metadata)?;

    let metadata = read_metadata(&mut reader, pairs, limits)?;
    let alignment = alignment(&metadata)?;
    reader.require_items("the list of tensors", tensors, LEAST_TENSOR)?;
    let raw = (0..tensors).map(|_| read_tensor(&mut reader, limits)).collect::<Result<Vec<_>, _>>()?;
    no_duplicates(raw.iter().map(|t| t.name.as_str()))?;

    // No overflow: the position is in the file, and the alignment is small.
    let start = reader.at().next_multiple_of(alignment);
    let entries = raw
        .into_iter()
        .map(|tensor| entry(tensor, start, alignment, reader.file_len()))
        .collect::<Result<Vec<_>, _>>()?;
    no_overlaps(&entries)?;
    Ok(GgufIndex { version, alignment, metadata, entries })
}

/// As [`read_gguf`], of a file that lies in memory or is mapped into it.
///
/// # Errors
/// As [`read_gguf`].
pub fn parse_gguf(file: &[u8], limits: &Limits) -> Result<GgufIndex, IndexError> {
    read_gguf(&mut Cursor::new(file), limits)
}

fn read_metadata<R: Read + Seek>(
    reader: &mut HeaderReader<R>,
    pairs: u64,
    limits: &Limits,
) -> Result<BTreeMap<String, GgufValue>, IndexError> {
    reader.require_items("the metadata", pairs, LEAST_PAIR)?;
    let mut metadata = BTreeMap::new();
    for _ in 0..pairs {
        let key = read_name(reader, "a key of the metadata", limits)?;
        let kind = reader.u32("the type of a value")?;
        let value = read_value(reader, &key, kind, limits)?;
        match metadata.entry(key) {
            btree_map::Entry::Vacant(slot) => slot.insert(value),
            btree_map::Entry::Occupied(slot) => {
                return Err(IndexError::Duplicate { name: slot.key().clone() });
            }
        };
    }
    Ok(metadata)
}

fn alignment(metadata: &BTreeMap<String, GgufValue>) -> Result<u64, IndexError> {
    let Some(value) = metadata.get(ALIGNMENT_KEY) else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    match value.as_u64() {
        Some(alignment) if alignment.is_power_of_two() && alignment <= MOST_ALIGNMENT => Ok(alignment),
        _ => Err(IndexError::malformed(format!(
            "`{ALIGNMENT_KEY}` must be a power of two up to {MOST_ALIGNMENT}, but it is {value:?}"
        ))),
    }
}

struct RawTensor {
    name: String,
    /// Outermost first.
    shape: Vec<u64>,
    kind: u32,
    offset: u64,
}

fn read_tensor<R: Read + Seek>(reader: &mut HeaderReader<R>, limits: &Limits) -> Result<RawTensor, IndexError> {
    let name = read_name(reader, "the name of a tensor", limits)?;
    let dimensions = u64::from(reader.u32("a number of dimensions")?);
    within(format!("the number of dimensions of `{name}`"), dimensions, limits.dimensions)?;
    reader.require_items("a shape", dimensions, 8)?;
    let mut shape = (0..dimensions).map(|_| reader.u64("a dimension")).collect::<Result<Vec<_>, _>>()?;
    shape.reverse();
    Ok(RawTensor {
        name,
        shape,
        kind: reader.u32("the type of a tensor")?,
        offset: reader.u64("the offset of a tensor")?,
    })
}

fn entry(tensor: RawTensor, start: u64, alignment: u64, file_len: u64) -> Result<Entry<GgmlType>, IndexError> {
    let RawTensor { name, shape, kind, offset } = tensor;
    let Some(dtype) = GgmlType::from_id(kind) else {
        return Err(IndexError::UnknownType { tensor: name, dtype: format!("number {kind}") });
    };
    let elements = elements(&name, &shape)?;
    // Blocks never cross a row, so the innermost dimension must hold whole ones.
    let columns = shape.last().copied().unwrap_or(1);
    if !columns.is_multiple_of(dtype.block()) {
        return Err(IndexError::PartialBlock { tensor: name, dtype: dtype.to_string(), columns, block: dtype.block() });
    }
    let bytes = (elements / dtype.block()).checked_mul(dtype.block_bytes()).ok_or_else(|| overflow(&name, &shape))?;
    if !offset.is_multiple_of(alignment) {
        return Err(IndexError::Misaligned { tensor: name, offset, alignment });
    }
    // Sums beyond 64 bits are beyond the file too.
    let from = start.saturating_add(offset);
    let end = from.saturating_add(bytes);
    if end > file_len {
        return Err(IndexError::BeyondEnd { tensor: name, end, file: file_len });
    }
    Ok(Entry { name, dtype, shape, range: from..end })
}

fn read_name<R: Read + Seek>(reader: &mut HeaderReader<R>, what: &str, limits: &Limits) -> Result<String, IndexError> {
    let length = reader.u64(what)?;
    within(format!("the length of {what}"), length, limits.name_bytes)?;
    utf8(what, reader.bytes(what, length)?)
}

fn read_string<R: Read + Seek>(reader: &mut HeaderReader<R>, what: &str) -> Result<String, IndexError> {
    let length = reader.u64(what)?;
    utf8(what, reader.bytes(what, length)?)
}

fn utf8(what: &str, bytes: Vec<u8>) -> Result<String, IndexError> {
    String::from_utf8(bytes).map_err(|e| {
        IndexError::malformed(format!(
            "{what} must be UTF-8, but `{}` came",
            e.as_bytes()[..e.as_bytes().len().min(40)].escape_ascii()
        ))
    })
}

const STRING: u32 = 8;
const ARRAY: u32 = 9;

fn read_value<R: Read + Seek>(
    reader: &mut HeaderReader<R>,
    key: &str,
    kind: u32,
    limits: &Limits,
) -> Result<GgufValue, IndexError> {
    let what = format!("the value of `{key}`");
    if kind == STRING {
        return read_string(reader, &what).map(GgufValue::String);
    }
    if kind == ARRAY {
        return read_array(reader, &what, limits.nesting).map(GgufValue::Array);
    }
    // Any other value is an array of one without its head.
    Ok(match read_items(reader, &what, kind, 1, 0)? {
        GgufArray::U8(v) => GgufValue::U8(v[0]),
        GgufArray::I8(v) => GgufValue::I8(v[0]),
        GgufArray::U16(v) => GgufValue::U16(v[0]),
        GgufArray::I16(v) => GgufValue::I16(v[0]),
        GgufArray::U32(v) => GgufValue::U32(v[0]),
        GgufArray::I32(v) => GgufValue::I32(v[0]),
        GgufArray::F32(v) => GgufValue::F32(v[0]),
        GgufArray::Bool(v) => GgufValue::Bool(v[0]),
        GgufArray::U64(v) => GgufValue::U64(v[0]),
        GgufArray::I64(v) => GgufValue::I64(v[0]),
        GgufArray::F64(v) => GgufValue::F64(v[0]),
        nested @ (GgufArray::String(_) | GgufArray::Array(_)) => GgufValue::Array(nested),
    })
}

/// An array with its head, at most `nesting` levels deep.
fn read_array<R: Read + Seek>(reader: &mut HeaderReader<R>, what: &str, nesting: u32) -> Result<GgufArray, IndexError> {
    if nesting == 0 {
        return Err(IndexError::malformed(format!("{what} holds arrays in arrays, deeper than is read")));
    }
    let kind = reader.u32(what)?;
    let count = reader.u64(what)?;
    read_items(reader, what, kind, count, nesting - 1)
}

/// `count` values of the type `kind`.
fn read_items<R: Read + Seek>(
    reader: &mut HeaderReader<R>,
    what: &str,
    kind: u32,
    count: u64,
    nesting: u32,
) -> Result<GgufArray, IndexError> {
    Ok(match kind {
        0 => GgufArray::U8(reader.bytes(what, count)?),
        1 => GgufArray::I8(numbers(reader, what, count, i8::from_le_bytes)?),
        2 => GgufArray::U16(numbers(reader, what, count, u16::from_le_bytes)?),
        3 => GgufArray::I16(numbers(reader, what, count, i16::from_le_bytes)?),
        4 => GgufArray::U32(numbers(reader, what, count, u32::from_le_bytes)?),
        5 => GgufArray::I32(numbers(reader, what, count, i32::from_le_bytes)?),
        6 => GgufArray::F32(numbers(reader, what, count, f32::from_le_bytes)?),
        7 => {
            let bytes = reader.bytes(what, count)?;
            if let Some(byte) = bytes.iter().find(|b| **b > 1) {
                let problem = format!("{what} must hold 0 or 1, but {byte} came");
                return Err(IndexError::malformed(problem));
            }
            GgufArray::Bool(bytes.into_iter().map(|b| b == 1).collect())
        }
        STRING => {
            reader.require_items(what, count, 8)?;
            let strings = (0..count).map(|_| read_string(reader, what));
            GgufArray::String(strings.collect::<Result<_, _>>()?)
        }
        ARRAY => {
            reader.require_items(what, count, 4 + 8)?;
            let arrays = (0..count).map(|_| read_array(reader, what, nesting));
            GgufArray::Array(arrays.collect::<Result<_, _>>()?)
        }
        10 => GgufArray::U64(numbers(reader, what, count, u64::from_le_bytes)?),
        11 => GgufArray::I64(numbers(reader, what, count, i64::from_le_bytes)?),
        12 => GgufArray::F64(numbers(reader, what, count, f64::from_le_bytes)?),
        _ => {
            let problem = format!("{what} has the type number {kind}, but only 0 to 12 exist");
            return Err(IndexError::malformed(problem));
        }
    })
}

fn numbers<R: Read + Seek, const N: usize, T>(
    reader: &mut HeaderReader<R>,
    what: &str,
    count: u64,
    number: fn([u8; N]) -> T,
) -> Result<Vec<T>, IndexError> {
    reader.require_items(what, count, N as u64)?;
    let bytes = reader.bytes(what, count * N as u64)?; // no overflow: they are in the file
    Ok(bytes.as_chunks().0.iter().map(|&c| number(c)).collect())
}
