//! Where things lie: the checkout, the user's cache, and the environment that child programs get.

use std::env;
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The checkout and the cache that a command works with.
#[derive(Debug, Clone)]
pub(crate) struct Places {
    /// The workspace's root folder.
    pub root: PathBuf,
    /// The user's cache: `$TESSERA_CACHE`, `$XDG_CACHE_HOME/tessera` or `$HOME/.cache/tessera`.
    pub cache: PathBuf,
}

impl Places {
    /// Reads both from the environment.
    pub(crate) fn from_environment() -> Result<Self> {
        // Cargo says at run time which checkout it runs in; a target folder may be shared by several.
        let package =
            env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        let root =
            package.parent().with_context(|| format!("{} has no parent folder", package.display()))?.to_path_buf();
        let cache = cache_folder(|name| env::var_os(name), &root).context(
            "there is no place for downloads: neither TESSERA_CACHE nor XDG_CACHE_HOME nor HOME is set. \
                 Set TESSERA_CACHE to a folder with about 2 GB of space",
        )?;
        Ok(Self { root, cache })
    }

    /// `.libtorch` in the checkout: what `.cargo/config.toml` calls LIBTORCH.
    pub(crate) fn link(&self) -> PathBuf {
        self.root.join(".libtorch")
    }

    /// Verified archives.
    pub(crate) fn downloads(&self) -> PathBuf {
        self.cache.join("downloads")
    }

    /// The folder of one unpacked data set.
    pub(crate) fn data(&self, set: &str) -> PathBuf {
        self.cache.join("data").join(set)
    }

    /// The target folder of the workspace, which is shared with plain cargo.
    pub(crate) fn target(&self) -> PathBuf {
        match env::var_os("CARGO_TARGET_DIR") {
            Some(folder) => self.root.join(folder),
            None => self.root.join("target"),
        }
    }

    /// Where benchmark runs lie, one folder each.
    pub(crate) fn runs(&self) -> PathBuf {
        self.root.join("target").join("bench")
    }

    /// The LIBTORCH that the user set, as opposed to the one that cargo sets from `.cargo/config.toml`.
    pub(crate) fn user_libtorch(&self) -> Option<PathBuf> {
        user_libtorch(env::var_os("LIBTORCH"), &self.root)
    }

    /// An error when LIBTORCH is a relative path: torch-sys's build runs in a folder of its own and looks for it there.
    pub(crate) fn refuse_relative_libtorch(&self) -> Result<()> {
        let Some(value) = env::var_os("LIBTORCH").map(PathBuf::from) else {
            return Ok(());
        };
        if value.as_os_str().is_empty() || value.is_absolute() {
            return Ok(());
        }
        let meant = plain(&env::current_dir().unwrap_or_else(|_| self.root.clone()).join(&value));
        bail!(
            "LIBTORCH is {}, a relative path, which every program would look for in another folder. \
             Set it to {}, or unset it",
            value.display(),
            meant.display()
        )
    }

    /// A child program with the environment of the user's own shell: cargo's LIBTORCH and the loader path of
    /// `.cargo/with-libtorch` are taken out again, so that a nested cargo sees what a plain one sees. The cache goes with
    /// it, because a relative TESSERA_CACHE would mean another folder there.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.root).env("TESSERA_CACHE", &self.cache);
        if self.user_libtorch().is_none() {
            command.env_remove("LIBTORCH");
        }
        match self.loader_path() {
            Some(path) => command.env("LD_LIBRARY_PATH", path),
            None => command.env_remove("LD_LIBRARY_PATH"),
        };
        command
    }

    /// Cargo, as [`Places::command`].
    pub(crate) fn cargo(&self) -> Command {
        self.command(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
    }

    /// LD_LIBRARY_PATH without the folders that running xtask itself added.
    pub(crate) fn loader_path(&self) -> Option<OsString> {
        let ours = self.link();
        let kept: Vec<PathBuf> = env::split_paths(&env::var_os("LD_LIBRARY_PATH")?)
            .filter(|folder| !folder.as_os_str().is_empty() && !plain(folder).starts_with(&ours))
            .collect();
        (!kept.is_empty()).then(|| env::join_paths(kept).ok())?
    }
}

/// The rule of the crate `datasets`, except that a relative TESSERA_CACHE begins at the workspace's root, wherever the
/// command was typed. The XDG specification wants a relative XDG_CACHE_HOME ignored.
fn cache_folder(variable: impl Fn(&str) -> Option<OsString>, root: &Path) -> Option<PathBuf> {
    let path = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    path("TESSERA_CACHE")
        .map(|folder| root.join(folder))
        .or_else(|| path("XDG_CACHE_HOME").filter(|home| home.is_absolute()).map(|home| home.join("tessera")))
        .or_else(|| path("HOME").map(|home| home.join(".cache/tessera")))
}

/// The value of LIBTORCH when it is the user's: set, not empty, and not the checkout's own `.libtorch`.
fn user_libtorch(value: Option<OsString>, root: &Path) -> Option<PathBuf> {
    let value = PathBuf::from(value.filter(|value| !value.is_empty())?);
    let path = if value.is_absolute() { value } else { root.join(value) };
    (plain(&path) != plain(&root.join(".libtorch"))).then_some(path)
}

/// The path without `.` and `..`, by its letters only: `.libtorch` is a link and must not be followed here.
pub(crate) fn plain(path: &Path) -> PathBuf {
    let mut result = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                result.pop();
            }
            other => result.push(other),
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargos_own_libtorch_is_not_the_users() {
        let root = Path::new("/checkout");
        for own in [
            "/checkout/.libtorch",
            "/checkout/.libtorch/",
            "/checkout/./.libtorch",
            "/checkout/.cargo/../.libtorch",
            ".libtorch",
            "",
        ] {
            assert_eq!(user_libtorch(Some(own.into()), root), None, "{own}");
        }
        assert_eq!(user_libtorch(None, root), None);
        for theirs in ["/opt/libtorch", "/checkout/.libtorch2", "/other/.libtorch"] {
            assert_eq!(user_libtorch(Some(theirs.into()), root), Some(PathBuf::from(theirs)));
        }
    }

    #[test]
    fn the_cache_follows_the_three_variables_in_order() {
        let with = |set: &'static [(&str, &str)]| {
            let variable = |name: &str| set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).into());
            cache_folder(variable, Path::new("/checkout"))
        };
        assert_eq!(with(&[("TESSERA_CACHE", "/t"), ("HOME", "/h")]), Some("/t".into()));
        assert_eq!(with(&[("XDG_CACHE_HOME", "/x"), ("HOME", "/h")]), Some("/x/tessera".into()));
        assert_eq!(with(&[("HOME", "/h")]), Some("/h/.cache/tessera".into()));
        assert_eq!(with(&[]), None);
        // Relative ones: ours begins at the root, XDG's does not count; empty ones are as good as unset.
        assert_eq!(with(&[("TESSERA_CACHE", "./c"), ("HOME", "/h")]), Some("/checkout/c".into()));
        assert_eq!(with(&[("XDG_CACHE_HOME", "x"), ("HOME", "/h")]), Some("/h/.cache/tessera".into()));
        assert_eq!(with(&[("TESSERA_CACHE", ""), ("HOME", "/h")]), Some("/h/.cache/tessera".into()));
    }
}
