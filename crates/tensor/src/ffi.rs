//! The dynamic loader.
#![allow(unsafe_code)]

/// Opens a shared library with global symbol visibility and leaves it open for the life of the process.
#[cfg(all(unix, feature = "torch"))]
pub(crate) fn open_globally(path: &std::path::Path) -> Result<(), String> {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    // SAFETY: opening runs the library's initializers. It is libtorch's own CUDA half, from the same folder
    // and so of the same version as the libtorch in use; the handle is leaked, so nothing is ever unloaded.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.map_err(|e| e.to_string())?;
    std::mem::forget(library);
    Ok(())
}

/// As above, where it isn't done.
#[cfg(all(not(unix), feature = "torch"))]
pub(crate) fn open_globally(_path: &std::path::Path) -> Result<(), String> {
    Err("libraries are loaded at run time on Unix only".into())
}

/// Calls `name(threads)` if a library of this process exports such a function; says whether one does.
#[cfg(unix)]
pub(crate) fn call_with_threads(name: &str, threads: i32) -> bool {
    use libloading::os::unix::Library;
    let process = Library::this();
    // SAFETY: the only names asked for are `openblas_set_num_threads` and its kin (module `threads`), whose
    // C signature is `void (int)` in every release.
    let function = unsafe { process.get::<unsafe extern "C" fn(i32)>(name.as_bytes()) };
    match function {
        // SAFETY: as above; the function only stores the number.
        Ok(function) => unsafe {
            function(threads);
            true
        },
        Err(_) => false,
    }
}
