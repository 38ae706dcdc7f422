//! Checkpoints in the cache.
#![allow(missing_docs)]

use std::path::PathBuf;

/// SmolLM2's file, if it is in the cache; says so if not. `TESSERA_REQUIRE_DATA` (names with commas between, set by
/// `cargo xtask test` for the sets that it has fetched) makes a missing set a failure.
pub(crate) fn smollm2() -> Option<PathBuf> {
    let name = datasets::smollm2::NAME;
    let path = datasets::smollm2::path_if_present().expect("the file is whole");
    let required = std::env::var("TESSERA_REQUIRE_DATA").unwrap_or_default();
    assert!(
        path.is_some() || !required.split(',').any(|r| r == name),
        "the data set `{name}` is required, but it isn't in the cache"
    );
    if path.is_none() {
        eprintln!("skipped: the data set `{name}` isn't in the cache (cargo xtask data fetch {name})");
    }
    path
}
