//! The state of CUDA on this machine.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use ssdtrain_store::HostPool;

use super::facts::Facts;
use super::page::{Check, Status};
use crate::common::gpu::{self, Gpu, Properties};
use crate::common::size;

/// How much host memory is pinned to test whether that works.
const PIN_TRIAL: u64 = 64 << 20;
/// How a machine with an NVIDIA driver gets the rest.
fn cuda_install() -> String {
    format!(
        "this machine has an NVIDIA driver: `cargo x setup` installs the full set of libtorch, or `python3 -m pip install \
         torch=={}` with LD_LIBRARY_PATH set to the lib folder of that torch",
        ssdtrain_libtorch::VERSION
    )
}

/// The number of CUDA devices; the error says why CUDA cannot be loaded.
pub(super) fn devices() -> Result<usize, String> {
    match ssdtrain_libtorch::load_cuda() {
        Ok(()) => Ok(usize::try_from(tch::Cuda::device_count()).unwrap_or(0)),
        Err(reason) => Err(reason.lines().next().unwrap_or_default().to_owned()),
    }
}

/// The state of CUDA; with a device, also what it is and whether memory can be pinned for it.
pub(super) fn cuda(devices: Result<usize, String>, facts: &Facts) -> Vec<Check> {
    let devices = match devices {
        Ok(devices) => devices,
        Err(reason) => {
            let advice = if facts.driver.is_some() {
                cuda_install()
            } else {
                "none is needed to train on the CPU".to_owned()
            };
            return vec![
                Check::ok("CUDA", format!("cannot be loaded: {reason}")).but(Status::Missing, advice),
            ];
        }
    };
    if devices == 0 {
        return vec![Check::ok("CUDA", "libtorch has it, but there is no device to use").but(
            Status::Missing,
            "none is needed to train on the CPU; `nvidia-smi -L` lists those that the driver sees, and CUDA_VISIBLE_DEVICES may hide some",
        )];
    }
    let serves = gpu::driver_serves().unwrap_or_else(|error| error.to_string());
    let driver = facts.driver.as_ref().map_or("of unknown version", |driver| &driver.version);
    let found =
        format!("{devices} device(s), driver {driver} for CUDA {serves}; `--device cuda` trains on it");
    let mut checks = vec![Check::ok("CUDA", found)];
    checks.extend((0..devices).map(device));
    checks.push(pinned_memory(facts));
    checks
}

fn device(index: usize) -> Check {
    let name = format!("cuda:{index}");
    match gpu::properties(index) {
        Ok(Properties { name: model, memory_bytes, capability: (major, minor), pci_address }) => {
            let link = pcie_link(&Path::new("/sys/bus/pci/devices").join(pci_address));
            let link = link.unwrap_or_else(|| "its PCIe link is not told here".to_owned());
            let memory = size::format(memory_bytes);
            Check::ok(name, format!("{model}, {memory}, compute capability {major}.{minor}, {link}"))
        }
        Err(error) => {
            Check::ok(name, error.to_string()).but(Status::Missing, "see what `nvidia-smi -q` says of it")
        }
    }
}

/// The current generation and width of a PCI device's link; the kernel may slow the link down while the device is
/// idle.
fn pcie_link(device: &Path) -> Option<String> {
    let read = |name: &str| Some(fs::read_to_string(device.join(name)).ok()?.trim().to_owned());
    // Such as "32.0 GT/s PCIe".
    let generation = |speed: &str| match speed.split_whitespace().next()? {
        "2.5" => Some(1),
        "5.0" | "5" => Some(2),
        "8.0" | "8" => Some(3),
        "16.0" => Some(4),
        "32.0" => Some(5),
        "64.0" => Some(6),
        _ => None,
    };
    let now = generation(&read("current_link_speed")?)?;
    let width = read("current_link_width")?;
    let most = read("max_link_speed").and_then(|speed| generation(&speed)).filter(|&most| most != now);
    let most = most.map_or_else(String::new, |most| format!(" (generation {most} under load)"));
    Some(format!("PCIe generation {now} x{width}{most}"))
}

/// Pins some memory for the first device, and says how large the host pool may become.
fn pinned_memory(facts: &Facts) -> Check {
    let name = "pinned memory";
    let limit = facts.lock_limit();
    let by_default = facts.memory.available.map_or_else(String::new, |available| {
        format!(
            "; by default the host pool grows to at most {}, half of the {} available",
            size::format(available / 2),
            size::format(available)
        )
    });
    let pin = || -> Result<Duration> {
        let gpu = Gpu::open(0)?;
        let pool = HostPool::new(PIN_TRIAL, Arc::new(gpu));
        let start = Instant::now();
        pool.grow(PIN_TRIAL)?;
        Ok(start.elapsed())
    };
    match pin() {
        Ok(time) => {
            let (trial, millis) = (size::format(PIN_TRIAL), time.as_secs_f64() * 1e3);
            Check::ok(name, format!("{trial} pinned in {millis:.1} ms with locked memory limited to {limit}{by_default}"))
        }
        Err(error) => Check::ok(name, format!("{error:#}")).but(
            Status::Missing,
            "`ulimit -l unlimited` raises the limit of locked memory, in a container `docker run --ulimit memlock=-1`; \
             `free -h` shows what memory there is",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_told_as_it_is_now_and_as_it_can_be() {
        let device = tempfile::tempdir().unwrap();
        assert_eq!(pcie_link(device.path()), None);
        let write = |name: &str, text: &str| fs::write(device.path().join(name), text).unwrap();
        write("current_link_speed", "2.5 GT/s PCIe\n");
        write("current_link_width", "16\n");
        write("max_link_speed", "32.0 GT/s PCIe\n");
        let idle = pcie_link(device.path()).unwrap();
        assert_eq!(idle, "PCIe generation 1 x16 (generation 5 under load)");
        write("current_link_speed", "32.0 GT/s PCIe\n");
        assert_eq!(pcie_link(device.path()).unwrap(), "PCIe generation 5 x16");
        write("current_link_speed", "Unknown\n");
        assert_eq!(pcie_link(device.path()), None);
    }
}
