//! Devices: parsing, and loading CUDA at run time.
//!
//! Tessera's binaries link libtorch's CPU library only, so that one binary serves machines with and without a
//! GPU. On a GPU host [`load_cuda`] opens `libtorch_cuda.so` beside the `libtorch_cpu.so` that the process
//! already uses; libtorch then registers its CUDA kernels. This must happen before libtorch is first asked
//! whether CUDA is there, because it remembers the answer: use [`parse`] and [`cuda_is_available`] rather
//! than asking `tch` directly.

use crate::{Error, Result, ffi};
use std::path::PathBuf;
use std::sync::OnceLock;
use tch::{Cuda, Device};

/// What [`load_cuda`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CudaLibrary {
    /// This library was opened, or was linked already.
    Loaded(PathBuf),
    /// No `libtorch_cuda.so` lies beside libtorch: a CPU-only installation.
    Absent,
    /// It lies there, but the loader refused it; the loader's reason.
    Refused(String),
}

/// Opens libtorch's CUDA library if it lies beside the libtorch in use. Repeated calls give the first answer.
pub fn load_cuda() -> &'static CudaLibrary {
    static LOADED: OnceLock<CudaLibrary> = OnceLock::new();
    LOADED.get_or_init(|| {
        let Some(libtorch) = libtorch_folder() else { return CudaLibrary::Absent };
        let library = libtorch.join("libtorch_cuda.so");
        if !library.exists() {
            return CudaLibrary::Absent;
        }
        match ffi::open_globally(&library) {
            Ok(()) => CudaLibrary::Loaded(library),
            Err(reason) => CudaLibrary::Refused(reason),
        }
    })
}

/// The folder of the `libtorch_cpu` library that this process has loaded (Linux), if it can be told.
pub fn libtorch_folder() -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines()
        .filter_map(|line| line.find('/').map(|at| PathBuf::from(&line[at..])))
        .find(|path| path.file_name().is_some_and(|name| name == "libtorch_cpu.so"))
        .and_then(|path| path.parent().map(PathBuf::from))
}

/// Whether libtorch can compute on a CUDA device, after trying to load its CUDA library.
pub fn cuda_is_available() -> bool {
    load_cuda();
    Cuda::is_available()
}

/// Parses `"cpu"`, `"cuda"`, `"cuda:1"` or `"auto"` (the first CUDA device if there is one, else the CPU).
///
/// ```
/// use tensor::{device, tch::Device};
/// assert_eq!(device::parse("cpu")?, Device::Cpu);
/// assert!(device::parse("gpu").unwrap_err().to_string().contains("cuda:0"));
/// # Ok::<(), tensor::Error>(())
/// ```
///
/// # Errors
/// [`Error::Device`] for a string that is none of these, and for a CUDA device that isn't there, with the
/// reason (no CUDA library, the loader's message, or the number of devices).
pub fn parse(given: &str) -> Result<Device> {
    let index = match given {
        "cpu" => return Ok(Device::Cpu),
        "auto" => return Ok(if cuda_is_available() { Device::Cuda(0) } else { Device::Cpu }),
        "cuda" => 0,
        _ => given.strip_prefix("cuda:").and_then(|index| index.parse().ok()).ok_or_else(|| Error::Device {
            given: given.into(),
            reason: "a device is \"cpu\", \"cuda\", \"cuda:0\" (a number) or \"auto\".".into(),
        })?,
    };
    if !cuda_is_available() {
        let reason = match load_cuda() {
            CudaLibrary::Absent => {
                "this libtorch has no CUDA library. Use \"cpu\", or `cargo xtask setup --cuda`.".into()
            }
            CudaLibrary::Refused(reason) => format!("its CUDA library can't be loaded: {reason}"),
            CudaLibrary::Loaded(_) => {
                "libtorch finds no usable CUDA device. `cargo xtask doctor` shows driver and devices.".into()
            }
        };
        return Err(Error::Device { given: given.into(), reason });
    }
    let devices = Cuda::device_count() as usize;
    if index >= devices {
        return Err(Error::Device {
            given: given.into(),
            reason: format!("there are {devices} CUDA devices, numbered from 0."),
        });
    }
    Ok(Device::Cuda(index))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_of_libtorch_is_found_in_the_memory_map() {
        let _ = tch::Tensor::from_slice(&[1.0f32]);
        let folder = libtorch_folder().expect("tests run with libtorch loaded");
        assert!(folder.join("libtorch_cpu.so").exists(), "{}", folder.display());
    }

    #[test]
    fn auto_is_the_cpu_where_there_is_no_cuda() {
        let expected = if cuda_is_available() { Device::Cuda(0) } else { Device::Cpu };
        assert_eq!(parse("auto").unwrap(), expected);
    }

    #[test]
    fn strings_that_are_no_devices_are_refused_with_the_ones_that_are() {
        for given in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "CPU"] {
            let message = parse(given).unwrap_err().to_string();
            assert!(message.contains(&format!("\"{given}\"")) && message.contains("auto"), "{message}");
        }
    }

    #[test]
    fn a_cuda_device_that_is_not_there_is_an_error_not_a_crash() {
        let message = parse("cuda:99").unwrap_err().to_string();
        assert!(message.contains("cuda:99"), "{message}");
    }
}
