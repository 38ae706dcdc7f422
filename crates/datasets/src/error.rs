use std::io;
use std::path::PathBuf;

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong when data are loaded or cut into parts.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The set, or one file of it, isn't in the folder.
    #[error(
        "The data set `{set}` is missing: there is no `{file}` in {}. Fetch it with `cargo xtask data fetch {set}`.",
        folder.display()
    )]
    Missing {
        /// Name of the set.
        set: String,
        /// The first file that wasn't there.
        file: String,
        /// The folder that was looked in.
        folder: PathBuf,
    },

    /// No set has this name.
    #[error("There is no data set `{name}`. The known sets are: {known}.")]
    UnknownSet {
        /// The name asked for.
        name: String,
        /// The names in the catalog, separated by commas.
        known: String,
    },

    /// The environment doesn't say where the cache is.
    #[error(
        "No place for the cache: neither TESSERA_CACHE nor XDG_CACHE_HOME nor HOME names a folder. Set TESSERA_CACHE to one."
    )]
    NoCacheFolder,

    /// A file has another length than the catalog says.
    #[error(
        "{} is {actual} bytes long, but {expected} were expected: the file is damaged or cut off. Delete it and run `cargo xtask data fetch {set}`.",
        path.display()
    )]
    WrongLength {
        /// Name of the set.
        set: String,
        /// The file.
        path: PathBuf,
        /// Bytes according to the catalog.
        expected: u64,
        /// Bytes on the disk.
        actual: u64,
    },

    /// A file's SHA-256 isn't the catalog's.
    #[error(
        "{} has the SHA-256 {actual}, but {expected} was expected: the file is damaged. Delete it and run `cargo xtask data fetch {set}`.",
        path.display()
    )]
    WrongHash {
        /// Name of the set.
        set: String,
        /// The file.
        path: PathBuf,
        /// Hash according to the catalog, in lower-case hexadecimal.
        expected: String,
        /// Hash of the file, in lower-case hexadecimal.
        actual: String,
    },

    /// A file's content doesn't follow its format.
    #[error("{file}: {problem}.")]
    Malformed {
        /// The file, or a name for the bytes.
        file: String,
        /// What was expected and what came, without the full stop.
        problem: String,
    },

    /// A file couldn't be read.
    #[error("{} couldn't be read: {source}.", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },

    /// An argument can't be used.
    #[error("`{argument}`: {problem}.")]
    BadArgument {
        /// Name of the argument.
        argument: &'static str,
        /// What was expected and what came, without the full stop.
        problem: String,
    },
}

impl Error {
    pub(crate) fn malformed(file: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Malformed { file: file.into(), problem: problem.into() }
    }

    pub(crate) fn argument(argument: &'static str, problem: impl Into<String>) -> Self {
        Self::BadArgument { argument, problem: problem.into() }
    }
}
