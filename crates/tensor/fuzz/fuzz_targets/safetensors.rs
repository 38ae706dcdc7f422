//! Any bytes give an index whose ranges lie in the file and don't overlap, or an error; never a panic and never much memory.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tensor::checkpoint::index::{Limits, parse_safetensors};

fuzz_target!(|file: &[u8]| {
    let Ok(index) = parse_safetensors(file, &Limits::default()) else {
        return;
    };
    let mut ranges: Vec<_> = index.entries.iter().map(|e| e.range.clone()).collect();
    for (entry, range) in index.entries.iter().zip(&ranges) {
        let elements: u64 = entry.shape.iter().product();
        assert_eq!(elements * entry.dtype.bits(), (range.end - range.start) * 8);
        assert!(file.get(range.start as usize..range.end as usize).is_some());
    }
    ranges.retain(|r| !r.is_empty());
    ranges.sort_by_key(|r| r.start);
    assert!(ranges.windows(2).all(|w| w[0].end == w[1].start));
});
