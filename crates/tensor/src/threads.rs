//! One place that sets the threads of libtorch, rayon and BLAS, so that they don't fight over the cores.
//!
//! Two rules keep them apart: libtorch is never called from inside a rayon task, and every pool has the same
//! size, so that at any time one of them works and the others sleep.

use crate::{Error, Result};
use serde::Serialize;

/// What [`set`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Threads {
    /// Threads asked for.
    pub requested: usize,
    /// Threads of rayon's global pool (it can be sized once a process; later calls find it as it is).
    pub rayon: usize,
    /// Threads of libtorch's operators, 0 without the feature `torch`.
    pub libtorch: usize,
    /// Whether an OpenBLAS in the process was told.
    pub openblas: bool,
}

/// Number of cores this process may use.
pub fn available() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Gives libtorch, rayon's global pool and OpenBLAS (if loaded) `threads` threads each. Call it first thing.
///
/// # Errors
/// [`Error::InvalidArgument`] for 0 threads.
pub fn set(threads: usize) -> Result<Threads> {
    if threads == 0 {
        return Err(Error::invalid("threads", format!("at least 1 (this machine has {})", available()), threads));
    }
    // Fails only if the pool exists already; what it has is reported.
    let _ = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();
    #[cfg(feature = "torch")]
    let libtorch = {
        tch::set_num_threads(threads as i32);
        tch::get_num_threads() as usize
    };
    #[cfg(not(feature = "torch"))]
    let libtorch = 0;
    Ok(Threads { requested: threads, rayon: rayon::current_num_threads(), libtorch, openblas: openblas(threads) })
}

/// Lets libtorch use one thread until it is dropped; then as many as before.
///
/// For code that shares its work over rayon between small operators of libtorch: after each operator that ran on several threads
/// libtorch's wait for the next one by spinning, on the cores that rayon's need. The number is the process's: other threads
/// that use libtorch meanwhile are slowed down, not disturbed.
#[cfg(feature = "torch")]
#[derive(Debug)]
pub struct OneLibtorchThread {
    before: i32,
}

#[cfg(feature = "torch")]
impl OneLibtorchThread {
    /// From now on.
    #[allow(clippy::new_without_default)] // it does something
    pub fn new() -> Self {
        let before = tch::get_num_threads();
        if before != 1 {
            tch::set_num_threads(1);
        }
        Self { before }
    }
}

#[cfg(feature = "torch")]
impl Drop for OneLibtorchThread {
    fn drop(&mut self) {
        if self.before != 1 {
            tch::set_num_threads(self.before);
        }
    }
}

#[cfg(unix)]
fn openblas(threads: usize) -> bool {
    ["openblas_set_num_threads\0", "openblas_set_num_threads64_\0"]
        .iter()
        .any(|name| crate::ffi::call_with_threads(name, threads as i32))
}

#[cfg(not(unix))]
fn openblas(_threads: usize) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_threads_are_refused_and_the_number_of_cores_is_named() {
        let message = set(0).unwrap_err().to_string();
        assert!(message.contains(&available().to_string()), "{message}");
    }

    #[test]
    fn every_pool_is_told() {
        let told = set(available()).unwrap();
        assert_eq!(told.requested, available());
        assert!(told.rayon >= 1);
        #[cfg(feature = "torch")]
        assert_eq!(told.libtorch, available());
    }
}
