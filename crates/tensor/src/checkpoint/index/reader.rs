use std::io::{BufReader, Read, Seek, SeekFrom};

use super::IndexError;

/// Reads a header front to back and never beyond its end or the limit.
pub(super) struct HeaderReader<R> {
    inner: BufReader<R>,
    at: u64,
    file_len: u64,
    limit: u64,
}

impl<R: Read + Seek> HeaderReader<R> {
    /// At the start of the file, whose first `limit` bytes may be read.
    pub(super) fn new(mut file: R, limit: u64) -> Result<Self, IndexError> {
        let file_len = file.seek(SeekFrom::End(0))?;
        file.seek(SeekFrom::Start(0))?;
        Ok(Self { inner: BufReader::with_capacity(1 << 16, file), at: 0, file_len, limit })
    }

    pub(super) fn at(&self) -> u64 {
        self.at
    }

    pub(super) fn file_len(&self) -> u64 {
        self.file_len
    }

    /// An error unless `need` more bytes are in the file and within the limit.
    pub(super) fn require(&self, what: &str, need: u64) -> Result<(), IndexError> {
        let left = self.file_len - self.at;
        if need > left {
            return Err(IndexError::Truncated { what: what.to_owned(), at: self.at, need, left });
        }
        if need > self.limit.saturating_sub(self.at) {
            return Err(IndexError::Limit {
                what: format!("the length of the header (with {what})"),
                value: self.at + need, // no overflow: it is in the file
                limit: self.limit,
            });
        }
        Ok(())
    }

    /// An error unless `count` items of at least `size` bytes are left.
    pub(super) fn require_items(&self, what: &str, count: u64, size: u64) -> Result<(), IndexError> {
        self.require(what, count.saturating_mul(size))
    }

    /// The next `n` bytes. They are there before memory is taken.
    pub(super) fn bytes(&mut self, what: &str, n: u64) -> Result<Vec<u8>, IndexError> {
        self.require(what, n)?;
        let mut bytes = vec![0; n as usize];
        self.inner.read_exact(&mut bytes)?;
        self.at += n;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], IndexError> {
        self.require(what, N as u64)?;
        let mut bytes = [0; N];
        self.inner.read_exact(&mut bytes)?;
        self.at += N as u64;
        Ok(bytes)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, IndexError> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, IndexError> {
        self.array(what).map(u64::from_le_bytes)
    }
}
