//! What happens when a set is missing or damaged.

use datasets::{Error, brown, fashion, mfeat, mnist10k, moby_dick, smollm2, vader_sentiment};

#[test]
fn a_missing_set_names_itself_the_folder_and_the_command() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("nothing here");
    for (error, set) in [
        (mnist10k::load_from(&folder).unwrap_err(), "mnist-10k"),
        (mfeat::load_from(&folder).unwrap_err(), "mfeat"),
        (fashion::load_from(&folder).unwrap_err(), "fashion-mnist"),
        (moby_dick::load_from(&folder).unwrap_err(), "moby-dick"),
        (vader_sentiment::load_from(&folder).unwrap_err(), "vader-sentiment"),
        (brown::load_from(&folder).unwrap_err(), "brown"),
        (smollm2::path_in(&folder).unwrap_err(), "smollm2"),
    ] {
        assert!(matches!(error, Error::Missing { .. }), "{error:?}");
        let message = error.to_string();
        assert!(message.contains(&format!("The data set `{set}` is missing")), "{message}");
        assert!(message.contains(&folder.display().to_string()), "{message}");
        assert!(message.contains(&format!("`cargo xtask data fetch {set}`")), "{message}");
    }
}

#[test]
fn a_truncated_file_is_named_with_both_lengths() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("0.json"), "{\"data\": [0").unwrap();
    let message = mnist10k::load_from(dir.path()).unwrap_err().to_string();
    assert!(message.contains("0.json is 11 bytes long, but 2314420 were expected"), "{message}");
    assert!(message.contains("cargo xtask data fetch mnist-10k"), "{message}");
}

#[test]
fn a_file_of_the_right_length_and_the_wrong_content_is_named_with_both_hashes() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("0.json"), vec![b' '; 2_314_420]).unwrap();
    let error = mnist10k::load_from(dir.path()).unwrap_err();
    assert!(matches!(&error, Error::WrongHash { expected, .. } if expected.starts_with("64c965fa")));
}

#[test]
fn a_folder_in_the_place_of_a_file_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("0.json")).unwrap();
    assert!(mnist10k::load_from(dir.path()).is_err());
}
