//! Says in one JSON line what libtorch can do here; `cargo xtask doctor` shows it.

use tensor::device::{self, CudaLibrary};
use tensor::tch::{Cuda, Device, Kind, Tensor};

/// A small matrix product on a device, checked against its exact result.
fn kernel_works(device: Device) -> bool {
    let ones = Tensor::f_ones([64, 64], (Kind::Float, device));
    ones.and_then(|x| x.f_matmul(&x))
        .and_then(|x| x.f_sum(Kind::Float))
        .and_then(|x| x.f_double_value(&[]))
        .is_ok_and(|sum| sum == 64.0 * 64.0 * 64.0)
}

fn main() {
    let cpu = kernel_works(Device::Cpu);
    let library = device::load_cuda();
    let cuda = device::cuda_is_available();
    let line = serde_json::json!({
        "libtorch": device::libtorch_folder(),
        "cpu_kernel_ok": cpu,
        "cuda_library": match library {
            CudaLibrary::Loaded(path) => path.display().to_string(),
            CudaLibrary::Absent => "absent".to_owned(),
            CudaLibrary::Refused(reason) => format!("refused: {reason}"),
        },
        "cuda": cuda,
        "devices": if cuda { Cuda::device_count() } else { 0 },
        "kernel_ok": cuda && kernel_works(Device::Cuda(0)),
        "threads": tensor::threads::available(),
    });
    println!("{line}");
}
