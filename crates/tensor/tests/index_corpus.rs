//! The fuzzers' corpus, replayed: every file gives an index whose ranges lie in the file, or an error.
#![allow(missing_docs)]

use std::fs;
use std::ops::Range;
use std::path::PathBuf;
use tensor::checkpoint::index::{Limits, parse_gguf, parse_safetensors};

fn corpus(format: &str) -> Vec<Vec<u8>> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(format);
    let files: Vec<Vec<u8>> =
        fs::read_dir(&folder).unwrap().map(|entry| fs::read(entry.unwrap().path()).unwrap()).collect();
    assert!(files.len() > 50, "{} holds {} files", folder.display(), files.len());
    files
}

/// Checks the ranges of one file.
fn inside(ranges: &[Range<u64>], file: &[u8]) {
    let mut ranges: Vec<_> = ranges.iter().filter(|r| !r.is_empty()).collect();
    ranges.sort_by_key(|r| r.start);
    assert!(ranges.iter().all(|r| r.end <= file.len() as u64));
    assert!(ranges.windows(2).all(|w| w[0].end <= w[1].start));
}

#[test]
fn every_corpus_file_is_parsed_or_refused_without_a_panic() {
    let (mut parsed, mut refused) = (0, 0);
    for file in corpus("gguf") {
        match parse_gguf(&file, &Limits::default()) {
            Ok(index) => {
                inside(&index.entries.iter().map(|e| e.range.clone()).collect::<Vec<_>>(), &file);
                parsed += 1;
            }
            Err(error) => refused += usize::from(!error.to_string().is_empty()),
        }
    }
    for file in corpus("safetensors") {
        match parse_safetensors(&file, &Limits::default()) {
            Ok(index) => {
                inside(&index.entries.iter().map(|e| e.range.clone()).collect::<Vec<_>>(), &file);
                parsed += 1;
            }
            Err(error) => refused += usize::from(!error.to_string().is_empty()),
        }
    }
    assert!(parsed > 0 && refused > 0, "{parsed} parsed, {refused} refused");
}
