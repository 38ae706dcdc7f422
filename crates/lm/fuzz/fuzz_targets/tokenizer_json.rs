//! See `checks.rs`.
#![no_main]

#[path = "../checks.rs"]
#[allow(dead_code)]
mod checks;

use std::sync::Once;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    static HOOK: Once = Once::new();
    // The fuzzer aborts on every panic; those of the tokenizers' library are caught and are errors.
    HOOK.call_once(|| {
        std::panic::set_hook(Box::new(|info| {
            let ours = info.location().is_none_or(|at| !at.file().contains("tokenizers-"));
            if ours {
                eprintln!("{info}");
                std::process::abort();
            }
        }));
    });
    checks::tokenizer_json(bytes);
});
