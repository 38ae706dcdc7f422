//! IDX, the file format of the MNIST family.
//!
//! Two zero bytes, one for the type, one for the number of dimensions, then each dimension as a big-endian `u32`, then the values, big-endian,
//! the last dimension fastest. Every length is checked before memory is taken for it, so a hostile header costs nothing.

use std::io::Read;

use crate::{Error, Result};

/// An array read from an IDX file.
#[derive(Debug, Clone, PartialEq)]
pub struct Idx {
    /// The dimensions, outermost first.
    pub dims: Vec<usize>,
    /// The values, last dimension fastest.
    pub values: Values,
}

/// The values of an [`Idx`], by type.
#[derive(Debug, Clone, PartialEq)]
pub enum Values {
    /// Type byte 8.
    U8(Vec<u8>),
    /// Type byte 9.
    I8(Vec<i8>),
    /// Type byte 11.
    I16(Vec<i16>),
    /// Type byte 12.
    I32(Vec<i32>),
    /// Type byte 13.
    F32(Vec<f32>),
    /// Type byte 14.
    F64(Vec<f64>),
}

impl Idx {
    /// Reads an IDX file that lies in memory. `name` stands in error messages.
    ///
    /// # Errors
    /// [`Error::Malformed`] if the header isn't one of IDX or the length isn't what it says.
    pub fn parse(name: &str, bytes: &[u8]) -> Result<Self> {
        Self::read(name, bytes, bytes.len() as u64)
    }

    /// Reads an IDX file whose values take at most `most` bytes, and nothing may follow them.
    ///
    /// # Errors
    /// [`Error::Malformed`] as for [`parse`](Self::parse), also if the header announces more than `most` bytes or reading fails.
    pub fn read(name: &str, mut reader: impl Read, most: u64) -> Result<Self> {
        let malformed = |problem: String| Error::malformed(name, problem);
        let mut magic = [0; 4];
        reader.read_exact(&mut magic).map_err(|e| malformed(format!("the first four bytes couldn't be read ({e})")))?;
        let [0, 0, kind, rank] = magic else {
            return Err(malformed(format!(
                "an IDX file begins with two zero bytes, but {:02x} {:02x} came",
                magic[0], magic[1]
            )));
        };
        let size = match kind {
            0x08 | 0x09 => 1,
            0x0b => 2,
            0x0c | 0x0d => 4,
            0x0e => 8,
            _ => {
                return Err(malformed(format!("the type byte {kind:#04x} is none of IDX (08, 09, 0b, 0c, 0d, 0e)")));
            }
        };
        let mut dims = Vec::with_capacity(usize::from(rank)); // at most 255
        let mut length = size;
        for i in 0..rank {
            let mut dim = [0; 4];
            reader
                .read_exact(&mut dim)
                .map_err(|e| malformed(format!("dimension {i} of {rank} couldn't be read ({e})")))?;
            let dim = u32::from_be_bytes(dim);
            dims.push(dim as usize);
            length = u64::from(dim).checked_mul(length).filter(|&l| l <= most).ok_or_else(|| {
                malformed(format!("the dimensions {dims:?} announce more than the {most} bytes that may come"))
            })?;
        }
        // Grows as the bytes really come: a header can't make it take memory.
        let mut bytes = Vec::new();
        reader
            .by_ref()
            .take(length)
            .read_to_end(&mut bytes)
            .map_err(|e| malformed(format!("the values couldn't be read ({e})")))?;
        if bytes.len() as u64 != length {
            return Err(malformed(format!(
                "the dimensions {dims:?} announce {length} bytes, but {} came",
                bytes.len()
            )));
        }
        match reader.read(&mut [0]) {
            Ok(0) => {}
            Ok(_) => {
                return Err(malformed(format!(
                    "more bytes came after the {length} that the dimensions {dims:?} announce"
                )));
            }
            Err(e) => return Err(malformed(format!("the end couldn't be read ({e})"))),
        }
        let values = match kind {
            0x08 => Values::U8(bytes),
            0x09 => Values::I8(big_endian(&bytes, i8::from_be_bytes)),
            0x0b => Values::I16(big_endian(&bytes, i16::from_be_bytes)),
            0x0c => Values::I32(big_endian(&bytes, i32::from_be_bytes)),
            0x0d => Values::F32(big_endian(&bytes, f32::from_be_bytes)),
            _ => Values::F64(big_endian(&bytes, f64::from_be_bytes)),
        };
        Ok(Self { dims, values })
    }

    /// As [`read`](Self::read), through gzip. Unpacking stops at `most` bytes, whatever the file claims.
    ///
    /// # Errors
    /// As [`read`](Self::read); a damaged gzip stream is [`Error::Malformed`] too.
    pub fn read_gzip(name: &str, packed: impl Read, most: u64) -> Result<Self> {
        Self::read(name, flate2::read::GzDecoder::new(packed), most)
    }

    /// The values as bytes, if they are bytes and the dimensions are `dims`.
    ///
    /// # Errors
    /// [`Error::Malformed`], which names what was expected and what came.
    pub fn into_u8(self, name: &str, dims: &[usize]) -> Result<Vec<u8>> {
        match self.values {
            Values::U8(bytes) if self.dims == dims => Ok(bytes),
            _ => Err(Error::malformed(
                name,
                format!(
                    "unsigned bytes of {dims:?} were expected, but {} of {:?} came",
                    self.values.type_name(),
                    self.dims
                ),
            )),
        }
    }
}

impl Values {
    fn type_name(&self) -> &'static str {
        match self {
            Self::U8(_) => "unsigned bytes",
            Self::I8(_) => "signed bytes",
            Self::I16(_) => "16-bit integers",
            Self::I32(_) => "32-bit integers",
            Self::F32(_) => "32-bit floats",
            Self::F64(_) => "64-bit floats",
        }
    }
}

fn big_endian<const N: usize, T>(bytes: &[u8], value: fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks().0.iter().map(|&c| value(c)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Write as _;

    fn file(kind: u8, dims: &[u32], values: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0, 0, kind, dims.len() as u8];
        bytes.extend(dims.iter().flat_map(|d| d.to_be_bytes()));
        bytes.extend(values);
        bytes
    }

    fn problem(bytes: &[u8]) -> String {
        Idx::parse("toy.idx", bytes).unwrap_err().to_string()
    }

    #[test]
    fn every_type_is_read() {
        let read = |kind, values: &[u8]| Idx::parse("toy", &file(kind, &[1], values)).unwrap().values;
        assert_eq!(read(0x08, &[255]), Values::U8(vec![255]));
        assert_eq!(read(0x09, &[255]), Values::I8(vec![-1]));
        assert_eq!(read(0x0b, &[1, 2]), Values::I16(vec![258]));
        assert_eq!(read(0x0c, &[0, 0, 1, 2]), Values::I32(vec![258]));
        assert_eq!(read(0x0d, &1.5f32.to_be_bytes()), Values::F32(vec![1.5]));
        assert_eq!(read(0x0e, &(-2.5f64).to_be_bytes()), Values::F64(vec![-2.5]));
    }

    #[test]
    fn a_hostile_header_is_refused_before_memory_is_taken() {
        let huge = u32::MAX;
        for dims in [&[huge][..], &[huge; 2], &[huge; 3], &[huge; 255], &[2, 2]] {
            assert!(problem(&file(0x0e, dims, &[0; 8])).contains("announce more than"));
        }
        // A zero hides no overflow before it, and an empty array is an array.
        assert!(problem(&file(0x08, &[huge, huge, 0], &[])).contains("announce more than"));
        assert_eq!(Idx::parse("toy", &file(0x08, &[0, huge], &[])).unwrap().values, Values::U8(vec![]));
    }

    #[test]
    fn a_damaged_file_is_refused_with_the_reason() {
        assert!(problem(&[]).contains("first four bytes"));
        assert!(problem(&[0, 0, 8]).contains("first four bytes"));
        assert!(problem(&[0x1f, 0x8b, 8, 0]).contains("1f 8b"));
        assert!(problem(&file(0x0a, &[1], &[0])).contains("0x0a"));
        assert!(problem(&[0, 0, 8, 2, 0, 0, 0, 1]).contains("dimension 1 of 2"));
        assert!(problem(&file(0x08, &[3], &[0; 2])).contains("announce 3 bytes, but 2 came"));
        assert!(problem(&file(0x08, &[3], &[0; 4])).contains("more bytes came"));
    }

    #[test]
    fn a_gzip_bomb_stops_at_the_limit() {
        let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packer.write_all(&file(0x08, &[10_000_000], &vec![0; 10_000_000])).unwrap();
        let packed = packer.finish().unwrap();
        assert!(Idx::read_gzip("bomb", packed.as_slice(), 10_000_000).is_ok());
        let message = Idx::read_gzip("bomb", packed.as_slice(), 1000).unwrap_err().to_string();
        assert!(message.contains("more than the 1000 bytes"), "{message}");
        assert!(Idx::read_gzip("bomb", &packed[..packed.len() / 2], 10_000_000).is_err());
    }

    #[test]
    fn another_shape_or_type_names_both() {
        let idx = Idx::parse("toy", &file(0x0b, &[1], &[0, 1])).unwrap();
        assert_eq!(
            idx.into_u8("toy", &[1, 2]).unwrap_err().to_string(),
            "toy: unsigned bytes of [1, 2] were expected, but 16-bit integers of [1] came."
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_bytes_give_an_array_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Idx::parse("any", &bytes);
        }

        #[test]
        fn what_is_written_is_read(h in 0u32..6, w in 0u32..6, seed: u8) {
            let values: Vec<u8> = (0..h * w).map(|i| (i as u8).wrapping_mul(seed)).collect();
            let idx = Idx::parse("any", &file(0x08, &[h, w], &values)).unwrap();
            prop_assert_eq!(idx.into_u8("any", &[h as usize, w as usize]).unwrap(), values);
        }
    }
}
