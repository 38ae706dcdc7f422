//! The index of safetensors files: what is written is found, and no hostile header gets through.

use proptest::prelude::*;
use tensor::checkpoint::index::{IndexError, Limits, SafeDtype, SafetensorsIndex, parse_safetensors};

fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

fn parse(header: &str, data: usize) -> Result<SafetensorsIndex, IndexError> {
    parse_safetensors(&file(header, data), &Limits::default())
}

/// One tensor of type `dtype`, the shape and the range as JSON lists.
fn one(dtype: &str, shape: &str, range: &str) -> String {
    format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{range}}}}}"#)
}

#[test]
fn a_file_of_the_python_package_is_read() {
    let bytes = include_bytes!("data/tiny.safetensors");
    let index = parse_safetensors(bytes, &Limits::default()).unwrap();
    let found: Vec<_> =
        index.entries.iter().map(|e| (e.name.as_str(), e.dtype, e.shape.clone(), e.range.clone())).collect();
    assert_eq!(
        found,
        [
            ("b.weight", SafeDtype::I64, vec![5], 328..368),
            ("scalar", SafeDtype::F64, vec![], 368..376),
            ("a", SafeDtype::F32, vec![2, 3], 376..400),
            ("empty", SafeDtype::F16, vec![0, 4], 400..400),
        ]
    );
    assert_eq!(index.metadata["format"], "np");
    let scalar = &index.get("scalar").unwrap().range;
    let value = &bytes[scalar.start as usize..scalar.end as usize];
    assert_eq!(value, 1.5f64.to_le_bytes());
    assert!(index.get("c").is_none());
}

#[test]
fn a_file_without_tensors_is_a_file() {
    let index = parse("{}", 0).unwrap();
    assert!(index.entries.is_empty() && index.metadata.is_empty());
}

#[test]
fn a_length_beyond_the_file_costs_nothing() {
    for length in [9, 1 << 20, 100 << 20, (128 << 20) + 1, 1 << 40, u64::MAX] {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend(b"{}");
        let error = parse_safetensors(&bytes, &Limits::default()).unwrap_err();
        let limited = length > 128 << 20;
        match error {
            IndexError::Truncated { need, left: 2, .. } => assert!(!limited && need == length),
            IndexError::Limit { value, .. } => assert!(limited && value == length),
            other => panic!("{other}"),
        }
    }
}

#[test]
fn every_shorter_file_is_refused() {
    let bytes = include_bytes!("data/tiny.safetensors");
    for end in 0..bytes.len() {
        assert!(parse_safetensors(&bytes[..end], &Limits::default()).is_err(), "{end}");
    }
}

#[test]
fn what_breaks_a_rule_is_refused_by_name() {
    type Check = fn(&IndexError) -> bool;
    let cases: [(&str, String, usize, Check); 19] = [
        ("no object", "[]".into(), 0, |e| matches!(e, IndexError::NotThisFormat { .. })),
        ("white space before", " {}".into(), 0, |e| matches!(e, IndexError::NotThisFormat { .. })),
        ("empty", String::new(), 0, |e| matches!(e, IndexError::NotThisFormat { .. })),
        ("no JSON", "{".into(), 0, |e| matches!(e, IndexError::Malformed { .. })),
        ("something after", "{}{}".into(), 0, |e| matches!(e, IndexError::Malformed { .. })),
        ("no dtype", r#"{"w":{"shape":[],"data_offsets":[0,0]}}"#.into(), 0, |e| {
            matches!(e, IndexError::Malformed { .. })
        }),
        ("negative dimension", one("U8", "[-1]", "[0,1]"), 1, |e| matches!(e, IndexError::Malformed { .. })),
        ("fraction", one("U8", "[1.5]", "[0,1]"), 1, |e| matches!(e, IndexError::Malformed { .. })),
        ("three offsets", one("U8", "[1]", "[0,1,1]"), 1, |e| matches!(e, IndexError::Malformed { .. })),
        ("backwards", one("U8", "[1]", "[1,0]"), 1, |e| matches!(e, IndexError::Malformed { .. })),
        (
            "unknown type",
            one("F7", "[1]", "[0,1]"),
            1,
            |e| matches!(e, IndexError::UnknownType { dtype, .. } if dtype == "F7"),
        ),
        ("too short", one("F32", "[2]", "[0,4]"), 4, |e| {
            matches!(e, IndexError::WrongLength { expected: 8, actual: 4, .. })
        }),
        ("overflow", one("U8", "[4294967296,4294967296]", "[0,0]"), 0, |e| matches!(e, IndexError::Overflow { .. })),
        ("overflow of bits", one("F64", "[1152921504606846976]", "[0,0]"), 0, |e| {
            matches!(e, IndexError::Overflow { .. })
        }),
        ("beyond", one("U8", "[2]", "[0,2]"), 1, |e| matches!(e, IndexError::BeyondEnd { .. })),
        ("far beyond", one("U8", "[1]", "[18446744073709551614,18446744073709551615]"), 1, |e| {
            matches!(e, IndexError::BeyondEnd { .. })
        }),
        ("half a byte", one("F4", "[3]", "[0,1]"), 1, |e| matches!(e, IndexError::PartialBlock { .. })),
        ("bytes left over", one("U8", "[1]", "[0,1]"), 2, |e| matches!(e, IndexError::Unused { .. })),
        ("a hole", one("U8", "[1]", "[1,2]"), 2, |e| matches!(e, IndexError::Unused { .. })),
    ];
    for (what, header, data, is_expected) in cases {
        let error = parse(&header, data).expect_err(what);
        assert!(is_expected(&error), "{what}: {error:?}");
        assert!(error.to_string().ends_with('.'), "{error}");
    }
}

#[test]
fn two_tensors_must_not_share_bytes_or_names() {
    let two = |first: &str, second: &str, name: &str| {
        let tensor = |range| format!(r#"{{"dtype":"U8","shape":[2],"data_offsets":{range}}}"#);
        parse(&format!(r#"{{"v":{},"{name}":{}}}"#, tensor(first), tensor(second)), 4)
    };
    assert!(two("[0,2]", "[2,4]", "w").is_ok());
    assert!(two("[2,4]", "[0,2]", "w").is_ok());
    let overlap = two("[0,2]", "[1,3]", "w").unwrap_err();
    assert!(matches!(&overlap, IndexError::Overlap { first, second, .. } if first == "v" && second == "w"));
    assert!(matches!(two("[0,2]", "[0,2]", "w"), Err(IndexError::Overlap { .. })));
    let duplicate = two("[0,2]", "[2,4]", "v").unwrap_err();
    assert_eq!(duplicate.to_string(), "The name `v` comes twice in the header.");
    assert!(parse(r#"{"__metadata__":{"a":"1","a":"2"}}"#, 0).is_err());
    assert!(parse(r#"{"__metadata__":{},"__metadata__":{}}"#, 0).is_err());
    assert!(parse(r#"{"__metadata__":{"a":1}}"#, 0).is_err());
}

#[test]
fn limits_are_kept_to() {
    let bytes = include_bytes!("data/tiny.safetensors");
    let base = Limits::default();
    for (limits, what) in [
        (Limits { header_bytes: 319, ..base }, "the length of the header"),
        (Limits { tensors: 3, ..base }, "the number of tensors"),
        (Limits { metadata: 1, ..base }, "the number of metadata keys"),
        (Limits { name_bytes: 7, ..base }, "the length of a name"),
        (Limits { dimensions: 1, ..base }, "the number of dimensions of `a`"),
    ] {
        match parse_safetensors(bytes, &limits) {
            Err(IndexError::Limit { what: found, .. }) => assert_eq!(found, what),
            other => panic!("{what}: {other:?}"),
        }
    }
    let many = format!("[{}]", vec!["0"; 100_000].join(","));
    assert!(parse(&one("U8", &many, "[0,0]"), 0).is_err());
}

const DTYPES: [SafeDtype; 6] =
    [SafeDtype::U8, SafeDtype::BF16, SafeDtype::F32, SafeDtype::F64, SafeDtype::F8_E4M3, SafeDtype::Bool];

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_written_is_found(
        tensors in prop::collection::vec((0usize..6, prop::collection::vec(0u64..5, 0..4)), 0..8),
        notes in prop::collection::btree_map("[a-z]{1,5}", "\\PC{0,10}", 0..4),
    ) {
        let mut object = serde_json::Map::new();
        object.insert("__metadata__".into(), serde_json::to_value(&notes).unwrap());
        let mut end = 0;
        for (i, (dtype, shape)) in tensors.iter().enumerate() {
            let bytes = shape.iter().product::<u64>() * DTYPES[*dtype].bits() / 8;
            object.insert(format!("t{i}"), serde_json::json!({
                "dtype": DTYPES[*dtype].name(), "shape": shape, "data_offsets": [end, end + bytes]
            }));
            end += bytes;
        }
        let header = serde_json::Value::Object(object).to_string();
        let index = parse(&header, end as usize).unwrap();
        prop_assert_eq!(index.metadata, notes);
        prop_assert_eq!(index.entries.len(), tensors.len());
        for (i, (dtype, shape)) in tensors.iter().enumerate() {
            let entry = index.entries.iter().find(|e| e.name == format!("t{i}")).unwrap();
            prop_assert_eq!((entry.dtype, &entry.shape), (DTYPES[*dtype], shape));
        }
    }

    #[test]
    fn a_changed_byte_gives_an_index_or_an_error(at in 0usize..400, value: u8) {
        let mut bytes = include_bytes!("data/tiny.safetensors").to_vec();
        bytes[at] = value;
        if let Ok(index) = parse_safetensors(&bytes, &Limits::default()) {
            for entry in index.entries {
                prop_assert!(entry.range.start <= entry.range.end && entry.range.end <= 400);
            }
        }
    }
}
