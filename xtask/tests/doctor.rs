//! The doctor's picture as a machine reads it.

#![cfg(target_os = "linux")]

mod support;

use serde_json::Value;
use support::Checkout;

fn picture(checkout: &Checkout) -> (bool, Value) {
    let output = checkout.xtask(&["doctor", "--json"]).output().unwrap();
    (output.status.success(), serde_json::from_slice(&output.stdout).unwrap())
}

fn row<'a>(picture: &'a Value, what: &str) -> &'a Value {
    let rows = picture["rows"].as_array().unwrap();
    rows.iter().find(|row| row["what"].as_str().unwrap().starts_with(what)).unwrap()
}

#[test]
fn what_is_needed_and_missing_makes_the_doctor_fail_with_a_remedy() {
    let checkout = Checkout::new();
    let (good, seen) = picture(&checkout);
    assert!(!good);
    assert_eq!(seen["ok"], false);
    let libtorch = row(&seen, "libtorch");
    assert_eq!((&libtorch["right"], &libtorch["needed"]), (&false.into(), &true.into()));
    assert_eq!(libtorch["mend"], "cargo xtask setup");
    // Optional things are shown and don't fail it.
    assert_eq!(row(&seen, "npm")["needed"], false);
}

#[test]
fn with_everything_needed_the_doctor_is_content() {
    let checkout = Checkout::new();
    checkout.program("rustc", "#!/bin/sh\necho 'rustc 1.95.0 (x)'\n");
    checkout.program("c++", "#!/bin/sh\necho 'c++ 12'\n");
    checkout.write("root/rust-toolchain.toml", "[toolchain]\nchannel = \"1.95.0\"\n");
    checkout.program(
        "python3",
        "#!/bin/sh\n[ \"$1\" = --version ] && { echo Python 3.11; exit; }\n[ \"$3\" = --version ] && echo 'pip 23.2 from x (python 3.11)'\n",
    );
    for file in
        ["lib/libtorch_cpu.so", "lib/libc10.so", "lib/libtorch.so", "include/torch/csrc/api/include/torch/torch.h"]
    {
        checkout.write(&format!("root/.libtorch/{file}"), "");
    }
    checkout.write("root/.libtorch/build-version", "2.11.0\n");
    let (good, seen) = picture(&checkout);
    assert!(good, "{seen:#}");
    assert_eq!(row(&seen, "Rust")["found"], "1.95.0");

    checkout.write("root/.libtorch/build-version", "2.4.0\n");
    let (good, seen) = picture(&checkout);
    assert!(!good);
    let found = row(&seen, "libtorch 2.11.0")["found"].as_str().unwrap();
    assert!(found.contains("PyTorch 2.4.0"), "{found}");

    checkout.program("rustc", "#!/bin/sh\necho 'rustc 1.80.0 (x)'\n");
    let (_, seen) = picture(&checkout);
    assert_eq!(row(&seen, "Rust")["mend"], "rustup toolchain install 1.95.0");
}

#[test]
fn pip_is_needed_only_to_fetch_a_libtorch_that_is_not_there() {
    let checkout = Checkout::new();
    assert_eq!(row(&picture(&checkout).1, "pip")["needed"], true);
    checkout.good(&["setup"]);
    assert_eq!(row(&picture(&checkout).1, "pip")["needed"], false);
}

#[test]
fn the_compiler_is_the_one_that_cargo_will_call() {
    let checkout = Checkout::new();
    assert_eq!(row(&picture(&checkout).1, "C++")["found"], "c++ 12");
    // Another name than the build will call is no compiler.
    std::fs::rename(checkout.at("bin/c++"), checkout.at("bin/g++")).unwrap();
    assert_eq!(row(&picture(&checkout).1, "C++")["right"], false);
}

#[test]
fn a_data_file_that_cannot_be_read_is_one_row() {
    let checkout = Checkout::new();
    checkout.write(
        "root/crates/datasets/data.toml",
        "[[set]]\nname = \"letters\"\ntitle = \"Letters\"\nsource = \"npm\"\nlicence = \"MIT\"\npackage = \"letters\"\nversion = \"1\"\narchive = \"l.tgz\"\nbytes = 1\nsha256 = \"0\"\n[[set.file]]\nfrom = \"l\"\nto = \"l\"\nbytes = @BYTES@\nsha256 = \"0\"\n",
    );
    // A folder in the place of a file can be opened, not read.
    std::fs::create_dir_all(checkout.at("cache/data/letters/l")).unwrap();
    let length = std::fs::metadata(checkout.at("cache/data/letters/l")).unwrap().len();
    let text = checkout.read("root/crates/datasets/data.toml").replace("@BYTES@", &length.to_string());
    checkout.write("root/crates/datasets/data.toml", &text);
    let (_, seen) = picture(&checkout);
    let letters = row(&seen, "data: letters");
    assert_eq!((&letters["right"], &letters["mend"]), (&false.into(), &"cargo xtask data fetch letters".into()));
    assert!(letters["found"].as_str().unwrap().contains("can't be read"), "{letters}");
}
