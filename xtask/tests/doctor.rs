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
