//! Data sets through fake clients: fetched, verified, unpacked, repaired, skipped.

mod support;

use std::fs;
use std::process::Stdio;
use std::time::Duration;

use support::{Checkout, ended, pins, says, sha256};

const NPM: &str = r#"#!/bin/sh
[ "$1" = pack ] || exit 1
[ -e @ROOT@/npm-down ] && { echo "npm ERR! network request failed ENOTFOUND" >&2; exit 1; }
echo "$2" >> @ROOT@/packed
/bin/cp @ROOT@/wheels/letters-1.0.0.tgz .
"#;

/// A checkout with a set from pip (`digits`), one from npm (`letters`) and one in the repository.
fn checkout() -> Checkout {
    let checkout = Checkout::new();
    let digits =
        checkout.wheel("digits-1.0.0-py3-none-any.whl", &[("digits/data/a.csv", "1,2\n"), ("digits/code.py", "")]);
    let tar = checkout.at("wheels/letters-1.0.0.tgz");
    let file = flate2::write::GzEncoder::new(fs::File::create(&tar).unwrap(), flate2::Compression::fast());
    let mut builder = tar::Builder::new(file);
    let mut header = tar::Header::new_gnu();
    header.set_size(3);
    header.set_mode(0o644);
    builder.append_data(&mut header, "package/l.json", &b"[7]"[..]).unwrap();
    builder.into_inner().unwrap().finish().unwrap();
    let letters = pins("letters-1.0.0.tgz", &fs::read(tar).unwrap());
    let file = |from: &str, to: &str, text: &[u8]| {
        format!(
            "[[set.file]]\nfrom = \"{from}\"\nto = \"{to}\"\nbytes = {}\nsha256 = \"{}\"\n",
            text.len(),
            sha256(text)
        )
    };
    let set = |name: &str, source: &str, rest: &str| {
        format!("[[set]]\nname = \"{name}\"\ntitle = \"{name}\"\nsource = \"{source}\"\nlicence = \"MIT\"\n{rest}\n")
    };
    let text = [
        set("built-in", "repository", ""),
        set("digits", "pip", &format!("package = \"digits\"\nversion = \"1.0.0\"\n{digits}")),
        file("digits/data/a.csv", "a.csv", b"1,2\n"),
        set("letters", "npm", &format!("package = \"letters\"\nversion = \"1.0.0\"\n{letters}")),
        file("package/l.json", "l.json", b"[7]"),
    ];
    checkout.write("root/crates/datasets/data.toml", &text.concat());
    checkout
}

fn with_npm(checkout: &Checkout) {
    let root = checkout.at("");
    checkout.program("npm", &NPM.replace("@ROOT@/", &format!("{}/", root.display())));
}

#[test]
fn all_sets_are_fetched_unpacked_and_verified() {
    let checkout = checkout();
    with_npm(&checkout);
    checkout.good(&["data", "fetch", "--all"]);
    assert_eq!(checkout.read("cache/data/digits/a.csv"), "1,2\n");
    assert_eq!(checkout.read("cache/data/letters/l.json"), "[7]");
    assert!(!checkout.at("cache/data/digits/code.py").exists());
    checkout.nothing_half_made();
    checkout.good(&["data", "verify"]);
    let fetched = checkout.fetched();
    says(&checkout.good(&["data", "fetch", "--all"]), &["digits: there", "letters: there"]);
    assert_eq!(checkout.fetched(), fetched);
}

#[test]
fn a_missing_client_skips_its_sets_unless_they_were_named() {
    let checkout = checkout();
    says(&checkout.good(&["data", "fetch", "--all"]), &["letters: skipped: npm is not here", "digits: fetched"]);
    says(&checkout.bad(&["data", "fetch", "letters"]), &["not fetched: letters"]);
}

#[test]
fn a_registry_that_is_down_fails_the_command_but_not_the_other_sets() {
    let checkout = checkout();
    with_npm(&checkout);
    checkout.write("npm-down", "");
    let text = checkout.bad(&["data", "fetch", "--all"]);
    says(&text, &["registry of npm can't be reached", "digits: fetched", "not fetched: letters"]);
}

#[test]
fn a_damaged_file_is_found_and_repaired_from_the_cached_archive() {
    let checkout = checkout();
    checkout.good(&["data", "fetch", "digits"]);
    checkout.write("cache/data/digits/a.csv", "1,3\n");
    says(&checkout.bad(&["data", "verify"]), &["damaged: digits", "data fetch digits"]);
    checkout.mode("offline");
    says(&checkout.good(&["data", "fetch", "digits"]), &["made again"]);
    assert_eq!(checkout.read("cache/data/digits/a.csv"), "1,2\n");
}

#[test]
fn an_archive_whose_files_are_not_the_pinned_ones_is_refused() {
    let checkout = checkout();
    let text = checkout.read("root/crates/datasets/data.toml");
    checkout.write("root/crates/datasets/data.toml", &text.replace(&sha256(b"1,2\n"), &sha256(b"other")));
    says(&checkout.bad(&["data", "fetch", "digits"]), &["is not what data.toml says", "SHA-256"]);
    assert!(!checkout.at("cache/data/digits").exists());
    checkout.nothing_half_made();
}

#[test]
fn an_unknown_set_is_answered_with_the_known_ones() {
    let checkout = checkout();
    says(&checkout.bad(&["data", "fetch", "digit"]), &["no data set named digit", "built-in, digits, letters"]);
}

#[test]
fn the_list_shows_what_is_there_and_how_to_get_the_rest() {
    let checkout = checkout();
    checkout.good(&["data", "fetch", "digits"]);
    let output = checkout.xtask(&["data"]).output().unwrap();
    assert_eq!(ended(&output).0, 0);
    let text = String::from_utf8(output.stdout).unwrap();
    says(&text, &["in the crate", "there", "letters"]);
}

#[test]
fn a_registry_that_cannot_be_reached_is_asked_once_except_in_continuous_integration() {
    let checkout = checkout();
    let text = checkout.read("root/crates/datasets/data.toml");
    let again =
        text[text.find("[[set]]\nname = \"digits\"").unwrap()..].split("[[set]]\nname = \"letters\"").next().unwrap();
    let again = again.replace("\"digits\"", "\"digits-2\"").replace("package = \"digits-2\"", "package = \"digits\"");
    checkout.write("root/crates/datasets/data.toml", &format!("{text}{again}"));
    checkout.mode("offline");
    let text = checkout.bad(&["data", "fetch", "--all"]);
    says(
        &text,
        &["digits-2: not tried, because the registry of pip can't be reached", "not fetched: digits, digits-2"],
    );
    assert_eq!(checkout.fetched().len(), 3);
    let mut command = checkout.xtask(&["data", "fetch", "--all"]);
    assert_eq!(ended(&command.env("CI", "true").output().unwrap()).0, 1);
    assert_eq!(checkout.fetched().len(), 9);
}

#[test]
fn a_set_that_another_process_made_meanwhile_is_not_made_again() {
    let checkout = checkout();
    fs::create_dir_all(checkout.at("cache")).unwrap();
    let lock = fs::File::create(checkout.at("cache/.lock")).unwrap();
    lock.lock().unwrap();
    let child =
        checkout.xtask(&["data", "fetch", "digits"]).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    checkout.write("cache/data/digits/a.csv", "1,2\n");
    drop(lock);
    let (code, text) = ended(&child.wait_with_output().unwrap());
    assert_eq!(code, 0, "{text}");
    says(&text, &["waiting for it", "digits: there"]);
    assert!(checkout.fetched().is_empty());
}
