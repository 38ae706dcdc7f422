//! `unsafe` stands only in modules named `kernel`, `ffi` or `backend`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::places::Places;

const ROOMS: [&str; 3] = ["kernel", "ffi", "backend"];

/// An error that lists every line with the keyword outside of those modules.
pub(crate) fn check(places: &Places) -> Result<()> {
    let mut faults = Vec::new();
    for part in ["crates", "benches", "xtask"] {
        for file in rust_files(&places.root.join(part)) {
            let name = file.strip_prefix(&places.root).unwrap_or(&file);
            if in_a_room(name) {
                continue;
            }
            let text = fs::read_to_string(&file).with_context(|| format!("{} can't be read", file.display()))?;
            for line in unsafe_lines(&text) {
                faults.push(format!("{}:{line}", name.display()));
            }
        }
    }
    if faults.is_empty() {
        return Ok(());
    }
    bail!("`unsafe` outside of a module named {}:\n  {}", ROOMS.join(", "), faults.join("\n  "))
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut files = Vec::new();
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() {
            if entry.file_name() != "target" {
                files.extend(rust_files(&path));
            }
        } else if path.extension().is_some_and(|end| end == "rs") {
            files.push(path);
        }
    }
    files.sort();
    files
}

/// `src/kernel.rs`, `src/kernel/avx2.rs`, …
fn in_a_room(path: &Path) -> bool {
    path.with_extension("").components().any(|part| ROOMS.iter().any(|room| part.as_os_str() == *room))
}

/// The numbers of the lines that use the keyword `unsafe`, not counting comments, strings and longer words.
fn unsafe_lines(text: &str) -> Vec<usize> {
    let code = without_comments_and_strings(text);
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let keyword = |line: &str| {
        line.match_indices("unsafe").any(|(start, found)| {
            let bytes = line.as_bytes();
            let end = start + found.len();
            (start == 0 || !word(bytes[start - 1])) && bytes.get(end).is_none_or(|b| !word(*b))
        })
    };
    code.lines().enumerate().filter(|(_, line)| keyword(line)).map(|(index, _)| index + 1).collect()
}

/// The same text with comments and the content of literals blanked; line breaks stay.
fn without_comments_and_strings(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut code = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let end = match &bytes[at..] {
            [b'/', b'/', ..] => find(bytes, at, b"\n").unwrap_or(bytes.len()),
            [b'/', b'*', ..] => block_comment(bytes, at),
            [b'r', b'"' | b'#', ..] if at == 0 || !is_word(bytes[at - 1]) => raw_string(bytes, at),
            [b'b', b'r', b'"' | b'#', ..] if at == 0 || !is_word(bytes[at - 1]) => raw_string(bytes, at + 1),
            [b'"', ..] => string(bytes, at),
            [b'\'', b'\\', ..] => find(bytes, at + 3, b"'").map_or(bytes.len(), |end| end + 1),
            [b'\'', _, b'\'', ..] => at + 3,
            _ => at,
        };
        if end == at {
            code.push(bytes[at]);
            at += 1;
        } else {
            code.extend(bytes[at..end].iter().map(|byte| if *byte == b'\n' { b'\n' } else { b' ' }));
            at = end;
        }
    }
    String::from_utf8_lossy(&code).into_owned()
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

fn find(bytes: &[u8], from: usize, what: &[u8]) -> Option<usize> {
    let rest = bytes.get(from..)?;
    rest.windows(what.len()).position(|window| window == what).map(|offset| from + offset)
}

/// Block comments nest.
fn block_comment(bytes: &[u8], start: usize) -> usize {
    let mut depth = 0;
    let mut at = start;
    while at < bytes.len() {
        match &bytes[at..] {
            [b'/', b'*', ..] => {
                depth += 1;
                at += 2;
            }
            [b'*', b'/', ..] => {
                depth -= 1;
                at += 2;
                if depth == 0 {
                    return at;
                }
            }
            _ => at += 1,
        }
    }
    at
}

fn string(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// From the `r` of `r#"…"#`; a raw name such as `r#type` is no string.
fn raw_string(bytes: &[u8], start: usize) -> usize {
    let hashes = bytes[start + 1..].iter().take_while(|byte| **byte == b'#').count();
    if bytes.get(start + 1 + hashes) != Some(&b'"') {
        return start;
    }
    let close = [b"\"".as_slice(), &b"#".repeat(hashes)].concat();
    find(bytes, start + 2 + hashes, &close).map_or(bytes.len(), |end| end + close.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keyword_is_found_where_it_is_code() {
        let keyword = ["un", "safe"].concat();
        let code = format!(
            "fn a() {{\n    {keyword} {{ b() }}\n}}\n{keyword} impl Send for A {{}}\n#![deny({keyword}_code)]\n"
        );
        assert_eq!(unsafe_lines(&code), [2, 4]);
    }

    #[test]
    fn comments_strings_and_characters_are_not_code() {
        let text = r##"
// unsafe
/* unsafe /* unsafe */ unsafe */
let a = "unsafe \" unsafe";
let b = r#"unsafe " unsafe"#;
let c = ['"', '\'', '\\', '\u{1F600}'];
fn d<'a>(x: &'a str) {}
let e = "plain"; // unsafe
let r#type = 1;
"##;
        assert_eq!(unsafe_lines(text), Vec::<usize>::new());
        let then = format!("{text}unsafe fn f() {{}}\n");
        assert_eq!(unsafe_lines(&then), [text.lines().count() + 1]);
    }

    #[test]
    fn rooms_are_modules_by_file_or_folder() {
        for room in ["crates/a/src/kernel.rs", "crates/a/src/ffi/cuda.rs", "crates/a/src/x/backend/y.rs"] {
            assert!(in_a_room(Path::new(room)), "{room}");
        }
        for outside in ["crates/a/src/lib.rs", "crates/a/src/kernels.rs"] {
            assert!(!in_a_room(Path::new(outside)), "{outside}");
        }
    }
}
