use std::collections::BTreeMap;
use std::fmt;
use std::io::{Cursor, Read, Seek};

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::reader::HeaderReader;
use super::{Entry, IndexError, Limits, elements, no_duplicates, no_overlaps, overflow, within};

/// The header of a safetensors file.
#[derive(Debug, Clone, PartialEq)]
pub struct SafetensorsIndex {
    /// The tensors, in the order of the header.
    pub entries: Vec<Entry<SafeDtype>>,
    /// The `__metadata__` of the file.
    pub metadata: BTreeMap<String, String>,
}

impl SafetensorsIndex {
    /// The tensor called `name`.
    pub fn get(&self, name: &str) -> Option<&Entry<SafeDtype>> {
        self.entries.iter().find(|e| e.name == name)
    }
}

macro_rules! dtypes {
    ($($name:ident $text:literal $bits:literal $what:literal;)*) => {
        /// Element types of safetensors.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        #[allow(non_camel_case_types)]
        pub enum SafeDtype {
            $(#[doc = $what] $name,)*
        }

        impl SafeDtype {
            /// The type with this name in a header.
            pub fn from_name(name: &str) -> Option<Self> {
                match name {
                    $($text => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// Its name in a header.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }

            /// Bits of an element.
            pub fn bits(self) -> u64 {
                match self {
                    $(Self::$name => $bits,)*
                }
            }

            #[cfg(test)]
            const ALL: &[Self] = &[$(Self::$name,)*];
        }
    };
}

dtypes! {
    Bool "BOOL" 8 "A byte, 0 or 1.";
    U8 "U8" 8 "Unsigned byte.";
    I8 "I8" 8 "Signed byte.";
    U16 "U16" 16 "Unsigned, 16 bits.";
    I16 "I16" 16 "Signed, 16 bits.";
    U32 "U32" 32 "Unsigned, 32 bits.";
    I32 "I32" 32 "Signed, 32 bits.";
    U64 "U64" 64 "Unsigned, 64 bits.";
    I64 "I64" 64 "Signed, 64 bits.";
    F16 "F16" 16 "IEEE half precision.";
    BF16 "BF16" 16 "The upper half of an `f32`.";
    F32 "F32" 32 "Single precision.";
    F64 "F64" 64 "Double precision.";
    C64 "C64" 64 "Complex, two `f32`.";
    F4 "F4" 4 "MXF4, two in a byte.";
    F6_E2M3 "F6_E2M3" 6 "6 bits, 2 of exponent.";
    F6_E3M2 "F6_E3M2" 6 "6 bits, 3 of exponent.";
    F8_E5M2 "F8_E5M2" 8 "8 bits, 5 of exponent.";
    F8_E4M3 "F8_E4M3" 8 "8 bits, 4 of exponent.";
    F8_E8M0 "F8_E8M0" 8 "8 bits of exponent.";
    F8_E5M2FNUZ "F8_E5M2FNUZ" 8 "8 bits, 5 of exponent, no infinities and no negative zero.";
    F8_E4M3FNUZ "F8_E4M3FNUZ" 8 "8 bits, 4 of exponent, no infinities and no negative zero.";
}

impl fmt::Display for SafeDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Reads the header of a safetensors file; the tensors stay unread.
///
/// # Errors
/// [`IndexError`], for each rule of [the module](super) that the file breaks. Beyond those, the tensors must fill the file, as the format
/// demands.
pub fn read_safetensors<R: Read + Seek>(file: &mut R, limits: &Limits) -> Result<SafetensorsIndex, IndexError> {
    let mut reader = HeaderReader::new(file, limits.header_bytes.saturating_add(8))?;
    let length = reader.u64("the length of the header")?;
    within("the length of the header", length, limits.header_bytes)?;
    let text = reader.bytes("the header", length)?;
    if text.first() != Some(&b'{') {
        let came =
            text.first().map_or_else(|| "it is empty".to_owned(), |b| format!("it begins with `{}`", b.escape_ascii()));
        return Err(IndexError::NotThisFormat {
            format: "safetensors",
            problem: format!("its header must begin with `{{`, but {came}"),
        });
    }
    let mut json = serde_json::Deserializer::from_slice(&text);
    let header = HeaderSeed(limits).deserialize(&mut json).and_then(|header| json.end().map(|()| header));
    let Header { tensors, count, metadata } = header.map_err(|e| IndexError::malformed(e.to_string()))?;
    within("the number of tensors", count, limits.tensors)?;
    within("the number of metadata keys", metadata.len() as u64, limits.metadata)?;
    no_duplicates(metadata.iter().map(|(key, _)| key.as_str()))?;
    no_duplicates(tensors.iter().map(|(name, _)| name.as_str()))?;

    let (start, file_len) = (reader.at(), reader.file_len());
    let mut entries = Vec::with_capacity(tensors.len());
    for (name, tensor) in tensors {
        entries.push(entry(name, tensor, start, file_len, limits)?);
    }
    fill(&entries, start, file_len)?;
    Ok(SafetensorsIndex { entries, metadata: metadata.into_iter().collect() })
}

/// As [`read_safetensors`], of a file that lies in memory or is mapped into it.
///
/// # Errors
/// As [`read_safetensors`].
pub fn parse_safetensors(file: &[u8], limits: &Limits) -> Result<SafetensorsIndex, IndexError> {
    read_safetensors(&mut Cursor::new(file), limits)
}

fn entry(
    name: String,
    tensor: RawTensor,
    start: u64,
    file_len: u64,
    limits: &Limits,
) -> Result<Entry<SafeDtype>, IndexError> {
    within("the length of a name", name.len() as u64, limits.name_bytes)?;
    let shape = tensor.shape.0;
    within(format!("the number of dimensions of `{name}`"), shape.len() as u64, limits.dimensions)?;
    let Some(dtype) = SafeDtype::from_name(&tensor.dtype) else {
        return Err(IndexError::UnknownType { tensor: name, dtype: tensor.dtype });
    };
    let elements = elements(&name, &shape)?;
    let bits = elements.checked_mul(dtype.bits()).ok_or_else(|| overflow(&name, &shape))?;
    if !bits.is_multiple_of(8) {
        return Err(IndexError::PartialBlock {
            tensor: name,
            dtype: dtype.to_string(),
            columns: elements,
            block: if dtype.bits() == 4 { 2 } else { 4 },
        });
    }
    let (from, to) = tensor.data_offsets;
    let Some(actual) = to.checked_sub(from) else {
        let problem = format!("the range of `{name}` begins at {from} and ends before it, at {to}");
        return Err(IndexError::malformed(problem));
    };
    // The end in the file may leave 64 bits; then it is beyond the file too.
    let end = start.saturating_add(to);
    if end > file_len {
        return Err(IndexError::BeyondEnd { tensor: name, end, file: file_len });
    }
    if actual != bits / 8 {
        return Err(IndexError::WrongLength { tensor: name, expected: bits / 8, actual });
    }
    Ok(Entry { name, dtype, shape, range: start + from..end })
}

/// The tensors must follow each other without gaps to the end of the file.
fn fill(entries: &[Entry<SafeDtype>], start: u64, file_len: u64) -> Result<(), IndexError> {
    let mut filled = start;
    for i in no_overlaps(entries)? {
        let range = &entries[i].range;
        if range.start > filled {
            return Err(IndexError::Unused { range: filled..range.start });
        }
        filled = filled.max(range.end);
    }
    if filled < file_len {
        return Err(IndexError::Unused { range: filled..file_len });
    }
    Ok(())
}

/// The header's object as pairs, so that a name that comes twice is seen.
struct Header {
    /// At most as many as the limit allows.
    tensors: Vec<(String, RawTensor)>,
    /// How many there are.
    count: u64,
    metadata: Vec<(String, String)>,
}

#[derive(serde::Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Dimensions,
    data_offsets: (u64, u64),
}

/// At most [`Dimensions::MOST`], so that a list of a million zeros isn't kept.
struct Dimensions(Vec<u64>);

impl Dimensions {
    /// Above every sensible value of [`Limits::dimensions`], which is checked afterwards.
    const MOST: usize = 64;
}

/// Reads a header and keeps no more tensors than the limit allows; the others are only counted.
struct HeaderSeed<'a>(&'a Limits);

impl<'de> DeserializeSeed<'de> for HeaderSeed<'_> {
    type Value = Header;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Header, D::Error> {
        struct HeaderVisitor {
            most: u64,
        }

        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let (mut tensors, mut count) = (Vec::new(), 0);
                let mut metadata = None;
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        let Pairs(pairs) = map.next_value()?;
                        if metadata.replace(pairs).is_some() {
                            return Err(A::Error::duplicate_field("__metadata__"));
                        }
                        continue;
                    }
                    count += 1;
                    if count <= self.most {
                        tensors.push((name, map.next_value()?));
                    } else {
                        map.next_value::<IgnoredAny>()?;
                    }
                }
                Ok(Header { tensors, count, metadata: metadata.unwrap_or_default() })
            }
        }

        deserializer.deserialize_map(HeaderVisitor { most: self.0.tensors })
    }
}

struct Pairs(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PairsVisitor;

        impl<'de> Visitor<'de> for PairsVisitor {
            type Value = Pairs;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }

        deserializer.deserialize_map(PairsVisitor)
    }
}

impl<'de> Deserialize<'de> for Dimensions {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct DimensionsVisitor;

        impl<'de> Visitor<'de> for DimensionsVisitor {
            type Value = Dimensions;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Dimensions, A::Error> {
                let mut dimensions = Vec::new();
                while let Some(dimension) = list.next_element()? {
                    if dimensions.len() == Dimensions::MOST {
                        return Err(A::Error::custom(format_args!("more than {} dimensions", Dimensions::MOST)));
                    }
                    dimensions.push(dimension);
                }
                Ok(Dimensions(dimensions))
            }
        }

        deserializer.deserialize_seq(DimensionsVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_leads_back_to_its_type() {
        for &dtype in SafeDtype::ALL {
            assert_eq!(SafeDtype::from_name(dtype.name()), Some(dtype));
        }
        assert_eq!(SafeDtype::from_name("f32"), None);
    }
}
