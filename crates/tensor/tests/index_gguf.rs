//! The index of GGUF files: what is written is found, and no hostile header gets through.

use proptest::prelude::*;
use tensor::checkpoint::index::{GgmlType, GgufArray, GgufIndex, GgufValue, IndexError, Limits, parse_gguf};

/// A file as it is being written.
#[derive(Clone)]
struct Writer(Vec<u8>);

impl Writer {
    fn new(version: u32, tensors: u64, pairs: u64) -> Self {
        let mut writer = Self(b"GGUF".to_vec());
        writer.u32(version).u64(tensors).u64(pairs);
        writer
    }

    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend(bytes);
        self
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    fn string(&mut self, text: &str) -> &mut Self {
        self.u64(text.len() as u64).bytes(text.as_bytes())
    }

    /// Dimensions innermost first, as the format has them.
    fn tensor(&mut self, name: &str, dims: &[u64], kind: u32, offset: u64) -> &mut Self {
        self.string(name).u32(dims.len() as u32);
        for &dim in dims {
            self.u64(dim);
        }
        self.u32(kind).u64(offset)
    }

    fn data(&mut self, bytes: usize) -> &mut Self {
        let start = self.0.len().next_multiple_of(32);
        self.0.resize(start + bytes, 0);
        self
    }

    fn parse(&self) -> Result<GgufIndex, IndexError> {
        parse_gguf(&self.0, &Limits::default())
    }
}

#[test]
fn a_file_of_the_python_package_is_read() {
    let index = parse_gguf(include_bytes!("data/tiny.gguf"), &Limits::default()).unwrap();
    assert_eq!((index.version, index.alignment), (3, 32));
    let found: Vec<_> =
        index.entries.iter().map(|e| (e.name.as_str(), e.dtype, e.shape.clone(), e.range.clone())).collect();
    assert_eq!(
        found,
        [
            ("norm.weight", GgmlType::F32, vec![32], 800..928),
            ("blk.0.Q4_0", GgmlType::Q4_0, vec![2, 32], 928..964),
            ("blk.0.Q8_0", GgmlType::Q8_0, vec![2, 32], 992..1060),
            ("half", GgmlType::F16, vec![3, 2], 1088..1100),
        ]
    );
    let value = |key: &str| &index.metadata[key];
    assert_eq!(value("general.architecture").as_str(), Some("llama"));
    assert_eq!(value("llama.block_count").as_u64(), Some(1));
    assert_eq!(value("llama.attention.layer_norm_rms_epsilon").as_f64(), Some(f64::from(1e-5f32)));
    assert_eq!(value("tokenizer.ggml.add_bos_token").as_bool(), Some(true));
    assert_eq!(value("tokenizer.ggml.tokens").as_strings().unwrap(), ["<s>", "a", "Ġb", "é"]);
    assert_eq!(value("tokenizer.ggml.scores"), &GgufValue::Array(GgufArray::F32(vec![0.0, -1.5, 2.0, 0.25])));
    assert_eq!(value("tiny.big"), &GgufValue::U64(1 << 40));
    assert_eq!(value("tiny.pi"), &GgufValue::F64(3.25));
    assert_eq!(value("tiny.minus"), &GgufValue::I8(-3));
    assert_eq!(value("tiny.minus").as_u64(), None);
}

#[test]
fn version_two_is_read_and_others_are_refused_by_number() {
    assert_eq!(Writer::new(2, 0, 0).parse().unwrap().version, 2);
    for version in [0, 1, 4, 3u32.swap_bytes()] {
        let error = Writer::new(version, 0, 0).parse().unwrap_err();
        assert!(matches!(error, IndexError::Version { version: v } if v == version));
    }
    let error = parse_gguf(b"GGML....", &Limits::default()).unwrap_err();
    assert_eq!(error.to_string(), "This is no GGUF file: it must begin with `GGUF`, but begins with `GGML`.");
}

#[test]
fn every_shorter_file_is_refused() {
    let bytes = include_bytes!("data/tiny.gguf");
    for end in 0..1100 {
        assert!(parse_gguf(&bytes[..end], &Limits::default()).is_err(), "{end}");
    }
    assert!(parse_gguf(&bytes[..1100], &Limits::default()).is_ok());
}

#[test]
fn a_vocabulary_of_fifty_thousand_is_read() {
    let tokens: Vec<String> = (0..50_000).map(|i| format!("token{i}")).collect();
    let mut writer = Writer::new(3, 0, 1);
    writer.string("tokenizer.ggml.tokens").u32(9).u32(8).u64(50_000);
    for token in &tokens {
        writer.string(token);
    }
    let index = writer.parse().unwrap();
    assert_eq!(index.metadata["tokenizer.ggml.tokens"].as_strings().unwrap(), tokens);
}

#[test]
fn counts_beyond_the_file_cost_nothing() {
    for count in [100, 1 << 16, 1 << 20, 1 << 40, u64::MAX] {
        let error = Writer::new(3, count, 0).parse().unwrap_err();
        assert!(matches!(error, IndexError::Truncated { .. } | IndexError::Limit { .. }), "{error}");
        let error = Writer::new(3, 0, count).parse().unwrap_err();
        assert!(matches!(error, IndexError::Truncated { .. } | IndexError::Limit { .. }), "{error}");
        // A string, and an array of each type.
        let error = Writer::new(3, 0, 1).string("k").u32(8).u64(count).parse().unwrap_err();
        assert!(matches!(error, IndexError::Truncated { .. }), "{error}");
        for kind in 0..13 {
            let error = Writer::new(3, 0, 1).string("k").u32(9).u32(kind).u64(count).parse().unwrap_err();
            assert!(matches!(error, IndexError::Truncated { .. }), "{kind}: {error}");
        }
        // A key's length.
        let mut writer = Writer::new(3, 0, 1);
        let error = writer.u64(count).u64(0).parse().unwrap_err();
        assert!(matches!(error, IndexError::Truncated { .. } | IndexError::Limit { .. }), "{error}");
    }
}

#[test]
fn arrays_in_arrays_end_at_the_limit() {
    let deep = |levels: usize| {
        let mut writer = Writer::new(3, 0, 1);
        writer.string("k").u32(9);
        for _ in 1..levels {
            writer.u32(9).u64(1);
        }
        writer.u32(0).u64(1).bytes(&[7]);
        writer.parse()
    };
    let index = deep(4).unwrap();
    let mut value = match &index.metadata["k"] {
        GgufValue::Array(array) => array,
        other => panic!("{other:?}"),
    };
    while let GgufArray::Array(inner) = value {
        value = &inner[0];
    }
    assert_eq!(value, &GgufArray::U8(vec![7]));
    for levels in [5, 100, 100_000] {
        assert!(matches!(deep(levels), Err(IndexError::Malformed { .. })));
    }
}

#[test]
fn what_breaks_a_rule_is_refused_by_name() {
    let one =
        |dims: &[u64], kind, offset, data| Writer::new(3, 1, 0).tensor("w", dims, kind, offset).data(data).parse();
    assert_eq!(one(&[32, 2], 2, 0, 36).unwrap().entries[0].shape, [2, 32]);
    assert_eq!(one(&[], 0, 0, 4).unwrap().entries[0].range.end, 68);

    let unknown = one(&[32], 4, 0, 100).unwrap_err();
    assert_eq!(
        unknown.to_string(),
        "The tensor `w` has the type number 4, which isn't known: a newer Tessera may read it."
    );
    let partial = one(&[576, 1], 10, 0, 1000).unwrap_err();
    assert_eq!(partial.to_string(), "The tensor `w` has 576 columns, but Q2_K is stored in blocks of 256.");
    // A row must hold whole blocks, even if the tensor as a whole would.
    assert!(matches!(one(&[16, 2], 2, 0, 100), Err(IndexError::PartialBlock { .. })));
    assert!(matches!(one(&[32], 0, 0, 127), Err(IndexError::BeyondEnd { .. })));
    assert!(matches!(one(&[32], 0, u64::MAX - 31, 128), Err(IndexError::BeyondEnd { .. })));
    assert!(matches!(one(&[1], 0, 16, 128), Err(IndexError::Misaligned { offset: 16, alignment: 32, .. })));
    assert!(matches!(one(&[1 << 32, 1 << 32], 0, 0, 8), Err(IndexError::Overflow { .. })));
    assert!(matches!(one(&[1 << 62], 28, 0, 8), Err(IndexError::Overflow { .. })));
    assert!(matches!(one(&[u64::MAX, u64::MAX, 0], 0, 0, 8), Err(IndexError::Overflow { .. })));
    assert!(matches!(one(&[1; 9], 0, 0, 8), Err(IndexError::Limit { .. })));

    let pair = |kind: u32, bytes: &[u8]| Writer::new(3, 0, 1).string("k").u32(kind).bytes(bytes).parse();
    assert!(matches!(pair(7, &[2]), Err(IndexError::Malformed { .. })));
    assert!(matches!(pair(13, &[0; 8]), Err(IndexError::Malformed { .. })));
    assert!(matches!(pair(8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff]), Err(IndexError::Malformed { .. })));
}

#[test]
fn two_tensors_must_not_share_bytes_or_names() {
    let two = |name: &str, offset| {
        Writer::new(3, 2, 0).tensor("v", &[16], 0, 0).tensor(name, &[8], 0, offset).data(128).parse()
    };
    assert!(two("w", 64).is_ok());
    assert!(matches!(two("w", 32), Err(IndexError::Overlap { .. })));
    assert!(matches!(two("w", 0), Err(IndexError::Overlap { .. })));
    assert!(matches!(two("v", 64), Err(IndexError::Duplicate { .. })));
    let mut keys = Writer::new(3, 0, 2);
    keys.string("k").u32(0).bytes(&[1]).string("k").u32(0).bytes(&[1]);
    assert!(matches!(keys.parse(), Err(IndexError::Duplicate { name }) if name == "k"));
}

#[test]
fn the_alignment_is_the_files_own_and_sensible() {
    let with = |alignment: u32, offset| {
        let mut writer = Writer::new(3, 1, 1);
        writer.string("general.alignment").u32(4).u32(alignment).tensor("w", &[1], 0, offset);
        let start = writer.0.len().next_multiple_of(alignment.max(1) as usize);
        writer.0.resize(start + 1000, 0);
        (start as u64, writer.parse())
    };
    let (start, index) = with(8, 8);
    assert_eq!(index.unwrap().entries[0].range, start + 8..start + 12);
    assert!(with(64, 8).1.is_err());
    for alignment in [0, 3, 48, 1 << 21] {
        assert!(matches!(with(alignment, 0).1, Err(IndexError::Malformed { .. })), "{alignment}");
    }
}

#[test]
fn limits_are_kept_to() {
    let bytes = include_bytes!("data/tiny.gguf");
    let base = Limits::default();
    for limits in [
        Limits { header_bytes: 700, ..base },
        Limits { tensors: 3, ..base },
        Limits { metadata: 5, ..base },
        Limits { name_bytes: 10, ..base },
        Limits { dimensions: 1, ..base },
    ] {
        assert!(matches!(parse_gguf(bytes, &limits), Err(IndexError::Limit { .. })), "{limits:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_written_is_found(
        tensors in prop::collection::vec((0..GgmlType::ALL.len(), 0u64..3, prop::collection::vec(0u64..4, 0..3)), 0..6),
        numbers in prop::collection::vec(any::<i32>(), 0..20),
        text in "\\PC{0,20}",
    ) {
        let mut writer = Writer::new(3, tensors.len() as u64, 2);
        writer.string("numbers").u32(9).u32(5).u64(numbers.len() as u64);
        for number in &numbers {
            writer.bytes(&number.to_le_bytes());
        }
        writer.string("text").u32(8).string(&text);
        let (mut expected, mut end) = (Vec::new(), 0);
        for (i, (kind, blocks, outer)) in tensors.iter().enumerate() {
            let kind = GgmlType::ALL[*kind];
            let dims: Vec<u64> = [blocks * kind.block()].into_iter().chain(outer.iter().copied()).collect();
            let bytes = blocks * outer.iter().product::<u64>() * kind.block_bytes();
            writer.tensor(&format!("t{i}"), &dims, kind.id(), end);
            expected.push((kind, dims.into_iter().rev().collect::<Vec<_>>(), end, bytes));
            end = (end + bytes).next_multiple_of(32);
        }
        let start = writer.0.len().next_multiple_of(32) as u64;
        writer.data(end as usize);
        let index = writer.parse().unwrap();
        prop_assert_eq!(&index.metadata["numbers"], &GgufValue::Array(GgufArray::I32(numbers)));
        prop_assert_eq!(index.metadata["text"].as_str(), Some(text.as_str()));
        for (i, (kind, shape, offset, bytes)) in expected.into_iter().enumerate() {
            let entry = index.get(&format!("t{i}")).unwrap();
            prop_assert_eq!((entry.dtype, &entry.shape), (kind, &shape));
            prop_assert_eq!(&entry.range, &(start + offset..start + offset + bytes));
        }
    }

    #[test]
    fn a_changed_byte_gives_an_index_or_an_error(at in 0usize..1120, value: u8) {
        let mut bytes = include_bytes!("data/tiny.gguf").to_vec();
        bytes[at] = value;
        if let Ok(index) = parse_gguf(&bytes, &Limits::default()) {
            for entry in index.entries {
                prop_assert!(entry.range.start <= entry.range.end && entry.range.end <= 1120);
            }
        }
    }
}
