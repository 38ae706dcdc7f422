//! Why a client failed, in plain words.

use super::{Archive, Source};

/// A client that failed: worth another try unless it said why it never will.
pub(super) struct Failure {
    /// What it said, and what that means.
    pub(super) message: String,
    /// No further try can help.
    pub(super) lasting: bool,
    /// There was no way to the registry.
    pub(super) unreachable: bool,
}

/// What clients say when there is no way to their registry, and what that means.
const UNREACHABLE: [(&[&str], &str); 4] = [
    (
        &[
            "name resolution",
            "NameResolution",
            "Name or service not known",
            "Temporary failure resolving",
            "Could not resolve",
            "ENOTFOUND",
            "EAI_AGAIN",
        ],
        "its name can't be looked up, so there is no network or no name server",
    ),
    (&["ProxyError", "407 Proxy"], "the proxy doesn't let it through"),
    (&["timed out", "ETIMEDOUT", "Network is unreachable", "ENETUNREACH"], "there was no answer in time"),
    (
        &[
            "connection broken",
            "Connection refused",
            "Connection reset",
            "ECONNREFUSED",
            "ECONNRESET",
            "Could not connect",
        ],
        "the connection was refused or broke",
    ),
];

/// Why a client failed, in plain words and with its own last one.
pub(super) fn explain(archive: &Archive, lines: &[String]) -> Failure {
    let all = lines.join("\n");
    let last = lines
        .iter()
        .rev()
        .find(|line| {
            let lower = line.to_lowercase();
            ["error", "e:", "err!"].iter().any(|mark| lower.contains(mark))
        })
        .or_else(|| lines.iter().rev().find(|line| !line.is_empty()))
        .map_or("it said nothing", String::as_str)
        .trim();
    let any = |marks: &[&str]| marks.iter().any(|mark| all.contains(mark));
    let unreachable = UNREACHABLE.iter().find(|(marks, _)| any(marks)).map(|(_, reason)| *reason);
    let full = any(&["No space left", "ENOSPC", "Disk quota exceeded"]);
    let (message, lasting) = if full {
        ("the disk is full. Free some space, or set TESSERA_CACHE to a folder on another disk".to_owned(), true)
    } else if let Some(reason) = unreachable {
        (format!("the registry of {} can't be reached: {reason} ({last})", archive.source), false)
    } else if archive.source == Source::Apt && any(&["was not found", "Can't find a source"]) {
        (
            format!(
                "the Debian mirror no longer has version {} of {} ({last}). `apt-cache policy {}` shows what it has",
                archive.version, archive.package, archive.package
            ),
            true,
        )
    } else if archive.source == Source::Apt && any(&["Unable to locate package"]) {
        (
            format!(
                "apt doesn't know the package {}. Run `apt-get update` (with sudo unless you are root) and try again",
                archive.package
            ),
            true,
        )
    } else {
        (format!("{} said: {last}", archive.source), false)
    };
    Failure { message, lasting, unreachable: !full && unreachable.is_some() }
}
#[cfg(test)]
mod tests {
    use super::*;

    fn explained(source: Source, lines: &[&str]) -> Failure {
        let archive = Archive {
            source,
            package: "thing".into(),
            version: "1.0".into(),
            file: "thing-1.0.whl".into(),
            bytes: 1,
            sha256: String::new(),
        };
        let lines: Vec<String> = lines.iter().map(|line| (*line).to_owned()).collect();
        explain(&archive, &lines)
    }

    #[test]
    fn failures_of_clients_are_said_in_plain_words() {
        let offline = explained(
            Source::Pip,
            &[
                "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError'",
                "ERROR: No matching distribution found for thing==1.0",
            ],
        );
        assert!(!offline.lasting && offline.unreachable);
        assert!(offline.message.contains("can't be reached"), "{}", offline.message);

        let gone = explained(Source::Apt, &["E: Version '1.0' for 'thing' was not found"]);
        assert!(gone.lasting);
        assert!(gone.message.contains("no longer has version 1.0"), "{}", gone.message);

        let unknown = explained(Source::Apt, &["E: Unable to locate package thing"]);
        assert!(unknown.message.contains("apt-get update"), "{}", unknown.message);

        let full = explained(Source::Pip, &["ERROR: [Errno 28] No space left on device"]);
        assert!(full.lasting && !full.unreachable && full.message.contains("TESSERA_CACHE"));

        let other = explained(Source::Npm, &["npm ERR! code E404", ""]);
        assert!(other.message.contains("npm said: npm ERR! code E404"), "{}", other.message);
    }
}
