//! Set-up from nothing, interrupted, damaged, with the user's own libtorch, with a Python's.

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod support;

use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use support::{Checkout, ended, says, there};

const TORCH: &str = "cache/downloads/torch-2.11.0-cp311-cp311-manylinux_2_28_x86_64.whl";

#[test]
fn from_nothing_it_makes_a_libtorch_that_links_the_cpu_library() {
    let checkout = Checkout::new();
    says(&checkout.good(&["setup"]), &["libtorch 2.11.0 is there", "OpenBLAS 0.3.21"]);
    assert_eq!(checkout.read("root/.libtorch/lib/libtorch.so"), "INPUT(libtorch_cpu.so)\n");
    assert_eq!(checkout.read("root/.libtorch/build-version"), "2.11.0\n");
    assert_eq!(checkout.read("root/.libtorch/lib/libcudart.so.13"), "runtime");
    assert!(!checkout.at("root/.libtorch/lib/libtorch_cuda.so").exists());
    checkout.nothing_half_made();
}

#[test]
fn a_second_run_fetches_nothing_and_another_checkout_only_links() {
    let checkout = Checkout::new();
    checkout.good(&["setup"]);
    let fetched = checkout.fetched();
    checkout.mode("offline");
    says(&checkout.good(&["setup"]), &["libtorch 2.11.0 is there"]);
    fs::remove_file(checkout.at("root/.libtorch")).unwrap();
    says(&checkout.good(&["setup"]), &["is in the cache"]);
    assert_eq!(checkout.fetched(), fetched);
}

#[test]
fn a_broken_fetch_keeps_what_was_finished() {
    let checkout = Checkout::new();
    checkout.mode("second-breaks");
    let text = checkout.bad(&["setup"]);
    says(&text, &["cudart 13.0 could not be fetched", "can't be reached", "goes on from there"]);
    assert!(checkout.at(TORCH).exists() && !there(&checkout.at("root/.libtorch")));
    checkout.nothing_half_made();
    checkout.mode("good");
    checkout.good(&["setup"]);
    let of_torch = checkout.fetched().iter().filter(|spec| spec.starts_with("torch")).count();
    assert_eq!(of_torch, 1);
}

#[test]
fn an_interrupt_leaves_nothing_half_made_and_the_next_run_finishes() {
    let checkout = Checkout::new();
    for signal in [Signal::INT, Signal::KILL] {
        checkout.mode("slow");
        let child = checkout.xtask(&["setup"]).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let until = Instant::now() + Duration::from_secs(20);
        while !checkout.at("started").exists() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
        }
        kill_process(Pid::from_child(&child), signal).unwrap();
        let (code, text) = ended(&child.wait_with_output().unwrap());
        if signal == Signal::INT {
            assert_eq!(code, 130, "{text}");
            says(&text, &["interrupted"]);
            checkout.nothing_half_made();
        }
        assert!(!there(&checkout.at("root/.libtorch")) && !checkout.at(TORCH).exists());
        fs::remove_file(checkout.at("started")).unwrap();
    }
    checkout.mode("good");
    checkout.good(&["setup"]);
    checkout.nothing_half_made();
}

#[test]
fn a_broken_line_is_tried_again() {
    let checkout = Checkout::new();
    checkout.mode("flaky");
    says(&checkout.good(&["setup"]), &["the line broke", "try 1 of 3 failed", "is there"]);
}

#[test]
fn a_truncated_download_never_gets_its_final_name() {
    let checkout = Checkout::new();
    checkout.mode("truncated");
    says(&checkout.bad(&["setup"]), &["truncated: 20 bytes instead of"]);
    assert!(!checkout.at(TORCH).exists());
    assert_eq!(checkout.fetched().len(), 3);
    checkout.nothing_half_made();
}

#[test]
fn a_damaged_file_in_the_cache_is_named_removed_and_fetched_once() {
    let checkout = Checkout::new();
    let right = fs::read(checkout.at("wheels/torch-2.11.0-cp311-cp311-manylinux_2_28_x86_64.whl")).unwrap();
    let mut wrong = right.clone();
    wrong[10] ^= 1;
    fs::create_dir_all(checkout.at("cache/downloads")).unwrap();
    fs::write(checkout.at(TORCH), &wrong).unwrap();
    let text = checkout.good(&["setup"]);
    says(&text, &["torch-2.11.0", "is damaged", "SHA-256", "fetched again"]);
    assert_eq!(fs::read(checkout.at(TORCH)).unwrap(), right);
    assert_eq!(checkout.fetched().len(), 2);
}

#[test]
fn a_damaged_file_is_gone_even_when_it_cannot_be_fetched_again() {
    let checkout = Checkout::new();
    checkout.write(TORCH, "not a wheel");
    checkout.mode("offline");
    says(&checkout.bad(&["setup"]), &["is damaged", "it is removed"]);
    assert!(!checkout.at(TORCH).exists());
}

#[test]
fn without_a_network_it_says_so_and_names_the_other_ways() {
    let checkout = Checkout::new();
    checkout.mode("offline");
    says(&checkout.bad(&["setup"]), &["can't be reached", "LIBTORCH", "activate a Python", "cache/downloads"]);
    let text = checkout.bad(&["setup", "--offline"]);
    says(&text, &["`--offline` forbids", "cache/downloads"]);
    // Files that were copied there are taken.
    for wheel in fs::read_dir(checkout.at("wheels")).unwrap().flatten() {
        fs::copy(wheel.path(), checkout.at("cache/downloads").join(wheel.file_name())).unwrap();
    }
    says(&checkout.good(&["setup", "--offline"]), &["is there"]);
}

#[test]
fn without_pip_it_says_what_to_install() {
    let checkout = Checkout::new();
    fs::remove_file(checkout.at("bin/python3")).unwrap();
    says(&checkout.bad(&["setup"]), &["pip is not here", "python3-pip", "LIBTORCH"]);
}

/// A libtorch folder of that version.
fn make_libtorch(checkout: &Checkout, folder: &str, version: &str) {
    for file in ["lib/libtorch_cpu.so", "lib/libc10.so", "lib/libtorch.so"] {
        checkout.write(&format!("{folder}/{file}"), "");
    }
    checkout.write(&format!("{folder}/include/torch/csrc/api/include/torch/torch.h"), "");
    checkout.write(&format!("{folder}/build-version"), version);
}

#[test]
fn the_users_libtorch_is_used_and_nothing_is_made() {
    let checkout = Checkout::new();
    make_libtorch(&checkout, "mine", "2.11.0+cpu");
    let mut command = checkout.xtask(&["setup"]);
    command.env("LIBTORCH", checkout.at("mine"));
    let (code, text) = ended(&command.output().unwrap());
    assert_eq!(code, 0, "{text}");
    says(&text, &["LIBTORCH, which you set"]);
    assert!(!there(&checkout.at("root/.libtorch")) && checkout.fetched().is_empty());
}

#[test]
fn a_wrong_libtorch_of_the_user_is_refused_with_both_versions_and_the_way_out() {
    let checkout = Checkout::new();
    make_libtorch(&checkout, "mine", "2.4.0\n");
    let run = |arguments: &[&str]| {
        let mut command = checkout.xtask(arguments);
        command.env("LIBTORCH", checkout.at("mine"));
        ended(&command.output().unwrap())
    };
    let (code, text) = run(&["setup"]);
    assert_eq!(code, 1);
    says(&text, &["PyTorch 2.4.0", "PyTorch 2.11.0", "unset it", "/mine"]);
    checkout.write("mine/build-version", "2.11.0\n");
    let (code, text) = run(&["setup", "--cuda"]);
    assert_eq!(code, 1);
    says(&text, &["without CUDA", "setup --cuda"]);
    fs::remove_dir_all(checkout.at("mine")).unwrap();
    says(&run(&["setup"]).1, &["there is nothing"]);
}

#[test]
fn a_libtorch_of_the_user_that_cannot_be_loaded_is_refused() {
    let checkout = Checkout::new();
    make_libtorch(&checkout, "mine", "2.11.0");
    checkout.program("ldd", "#!/bin/sh\necho '  not a dynamic executable' >&2\nexit 1\n");
    let mut command = checkout.xtask(&["setup"]);
    let (code, text) = ended(&command.env("LIBTORCH", checkout.at("mine")).output().unwrap());
    assert_eq!(code, 1);
    says(&text, &["/mine", "can't be loaded", "not a dynamic executable", "unset it"]);
}

#[test]
fn a_relative_libtorch_is_refused_with_the_absolute_path() {
    let checkout = Checkout::new();
    make_libtorch(&checkout, "root/mine", "2.11.0");
    for command in ["setup", "env"] {
        let mut command = checkout.xtask(&[command]);
        let (code, text) = ended(&command.env("LIBTORCH", "./mine").output().unwrap());
        assert_eq!(code, 1, "{text}");
        says(
            &text,
            &["LIBTORCH is ./mine, a relative path", &format!("Set it to {}", checkout.at("root/mine").display())],
        );
    }
}

#[test]
fn a_library_that_lost_bytes_is_unpacked_again() {
    let checkout = Checkout::new();
    checkout.good(&["setup"]);
    checkout.write("cache/libtorch/2.11.0-cpu/lib/libtorch_cpu.so", "c");
    let text = checkout.good(&["setup"]);
    says(&text, &["libtorch_cpu.so is damaged: 1 bytes instead of 3", "made again", "is there"]);
    assert_eq!(checkout.read("root/.libtorch/lib/libtorch_cpu.so"), "cpu");
}

#[test]
fn without_a_compiler_nothing_large_is_fetched() {
    let checkout = Checkout::new();
    fs::remove_file(checkout.at("bin/c++")).unwrap();
    says(&checkout.bad(&["setup"]), &["no C++ compiler: `c++`", "apt-get install g++", "CXX"]);
    assert!(checkout.fetched().is_empty());
    // What `cc` calls may bring options along.
    checkout.program("mycxx", "#!/bin/sh\n[ \"$1 $2\" = '-m64 --version' ] && echo mycxx\n");
    let mut command = checkout.xtask(&["setup"]);
    let (code, text) = ended(&command.env("CXX", "mycxx -m64").output().unwrap());
    assert_eq!(code, 0, "{text}");
}

/// An apt-get that logs what it was asked for; only the superuser has it called.
fn with_apt(checkout: &Checkout, more: &str) {
    fs::remove_file(checkout.at("bin/pkg-config")).unwrap();
    let log = checkout.at("apt-log");
    checkout.program("apt-get", &format!("#!/bin/sh\necho \"$*\" >> {}\n{more}", log.display()));
}

#[test]
fn openblas_is_installed_by_an_explicit_setup_or_in_continuous_integration_only() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only the superuser installs packages");
        return;
    }
    let checkout = Checkout::new();
    with_apt(&checkout, "");
    let lint = |ci: &str| {
        checkout.program(
            "cargo",
            "#!/bin/sh\n[ \"$1\" = metadata ] && echo '{\"packages\": []}'\n[ \"$1 $2\" != 'deny --version' ]\n",
        );
        ended(&checkout.xtask(&["lint"]).env("CI", ci).output().unwrap())
    };
    let (code, text) = lint("");
    assert_eq!((code, checkout.read("apt-log").as_str()), (0, ""), "{text}");
    lint("true");
    says(&checkout.read("apt-log"), &["install --yes", "libopenblas-dev"]);
    fs::remove_file(checkout.at("apt-log")).unwrap();
    checkout.good(&["setup"]);
    says(&checkout.read("apt-log"), &["install --yes"]);
}

#[test]
fn apt_is_asked_to_stop_and_waited_for() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only the superuser installs packages");
        return;
    }
    let checkout = Checkout::new();
    let here = checkout.at("");
    let here = here.to_string_lossy();
    // As apt while dpkg works: it finishes its work first, which takes longer than others are given.
    with_apt(
        &checkout,
        &format!(
            "trap '' INT TERM\n/bin/touch {here}started\nleft=80\n\
             while [ $left -gt 0 ]; do /bin/sleep 0.05; left=$((left - 1)); done\n/bin/touch {here}finished\n"
        ),
    );
    let child = checkout.xtask(&["setup"]).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    while !checkout.at("started").exists() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(ended(&child.wait_with_output().unwrap()).0, 130);
    assert!(checkout.at("finished").exists());
}

#[test]
fn a_pythons_torch_is_linked_so_that_its_libraries_find_their_neighbours() {
    let checkout = Checkout::new();
    make_libtorch(&checkout, "site/torch", "");
    checkout.write("site/torch/version.py", "__version__ = '2.11.0+cu130'\n");
    checkout.write("site/nvidia/cu13/lib/libcudart.so.13", "theirs");
    checkout.write("python-torch", &format!("{}\n2.11.0\n", checkout.at("site/torch").display()));
    says(&checkout.good(&["setup"]), &["is your Python's"]);
    assert!(checkout.fetched().is_empty());
    // What `$ORIGIN/../../nvidia/cu13/lib` means for a library in `.libtorch/lib`.
    assert_eq!(checkout.read("root/.libtorch/lib/../../nvidia/cu13/lib/libcudart.so.13"), "theirs");
    // The package is updated behind our back.
    checkout.write("site/torch/version.py", "__version__ = '2.12.0'\n");
    checkout.write("python-torch", &format!("{}\n2.12.0\n", checkout.at("site/torch").display()));
    let text = checkout.good(&["setup"]);
    says(&text, &["your Python has PyTorch 2.12.0", "needs 2.11.0", "left alone"]);
    assert_eq!(checkout.read("root/.libtorch/lib/libcudart.so.13"), "runtime");
}

#[test]
fn a_pythons_torch_that_cannot_be_loaded_is_left_alone() {
    let checkout = Checkout::new();
    make_libtorch(&checkout, "site/torch", "2.11.0");
    checkout.write("python-torch", &format!("{}\n2.11.0\n", checkout.at("site/torch").display()));
    checkout.program("ldd", "#!/bin/sh\ncase $1 in */site/*) echo 'libcupti.so.13 => not found' ;; esac\n");
    let text = checkout.good(&["setup"]);
    says(&text, &["can't be loaded (libcupti.so.13 => not found)", "libtorch 2.11.0 is there"]);
}

#[test]
fn libtorch_use_pytorch_is_obeyed_or_refused() {
    let checkout = Checkout::new();
    let run = || {
        let mut command = checkout.xtask(&["setup"]);
        ended(&command.env("LIBTORCH_USE_PYTORCH", "1").output().unwrap())
    };
    says(&run().1, &["this Python has no torch", "unset LIBTORCH_USE_PYTORCH"]);
    checkout.write("python-torch", "/x/torch\n2.4.0\n");
    let (code, text) = run();
    assert_eq!(code, 1);
    says(&text, &["PyTorch 2.4.0", "2.11.0"]);
}

#[test]
fn libtorch_use_pytorch_counts_more_than_the_libtorch_that_is_there() {
    let checkout = Checkout::new();
    checkout.good(&["setup"]);
    let run = |libtorch: &str| {
        let mut command = checkout.xtask(&["setup"]);
        command.env("LIBTORCH_USE_PYTORCH", "1");
        if !libtorch.is_empty() {
            command.env("LIBTORCH", checkout.at(libtorch));
        }
        ended(&command.output().unwrap())
    };
    says(&run("").1, &["this Python has no torch"]);
    make_libtorch(&checkout, "site/torch", "2.11.0");
    checkout.write("python-torch", &format!("{}\n2.11.0\n", checkout.at("site/torch").display()));
    says(&run("").1, &["is your Python's"]);
    // The second time it is there already.
    let (code, text) = run("");
    assert!(code == 0 && !text.contains("is your Python's"), "{text}");
    says(&run("site/torch").1, &["are both set", "Unset one"]);
}

#[test]
fn cuda_is_the_whole_wheel_in_the_layout_of_site_packages() {
    let checkout = Checkout::new();
    checkout.good(&["setup"]);
    says(&checkout.good(&["setup", "--cuda"]), &["libtorch 2.11.0 with CUDA is there"]);
    assert_eq!(checkout.read("root/.libtorch/lib/libtorch_cuda.so"), "cuda");
    assert_eq!(checkout.read("root/.libtorch/lib/libtorch.so"), "the whole");
    assert_eq!(checkout.read("root/.libtorch/lib/../../nvidia/cu13/lib/libcudart.so.13"), "runtime");
    assert!(!checkout.at("cache/libtorch/2.11.0-cuda/nvidia/cu13/include").exists());
    // From then on plain set-up is content with it.
    says(&checkout.good(&["setup"]), &["with CUDA is there"]);
}

#[test]
fn a_folder_of_the_user_in_our_place_is_not_removed() {
    let checkout = Checkout::new();
    checkout.write("root/.libtorch/precious", "x");
    says(&checkout.bad(&["setup"]), &["did not make", "Move it away"]);
    assert_eq!(checkout.read("root/.libtorch/precious"), "x");
}

#[test]
fn env_prints_exports_only_when_there_is_something_to_export() {
    let checkout = Checkout::new();
    let run = || checkout.xtask(&["env"]).output().unwrap();
    let before = run();
    assert!(before.stdout.is_empty() && !before.status.success());
    says(&ended(&before).1, &["cargo xtask setup"]);
    checkout.good(&["setup"]);
    let text = String::from_utf8(run().stdout).unwrap();
    assert!(text.lines().all(|line| line.starts_with("export ")), "{text}");
    says(&text, &["export LIBTORCH='", "/root/.libtorch'/lib"]);
}
