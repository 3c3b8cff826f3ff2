//! What the kernel's files say about this machine. They are only read here; `findings` and `host` interpret them.

use std::path::PathBuf;

use ssdtrain_store::{GroupMemory, HostMemory};

use super::cufile::Library;
use super::pci::Device;
use super::place::Place;
use super::tree::Tree;
use crate::common::size;

/// NVIDIA's number among the vendors of PCI devices.
const NVIDIA: &str = "0x10de";
/// PCI device classes that begin like this are displays and 3D controllers.
const DISPLAY: &str = "0x03";
/// Kernels built with PCI P2PDMA have this symbol; NVIDIA's guide looks for it too.
const P2PDMA_SYMBOL: &str = "p2pdma_pgmap_ops";

/// Facts that files cannot provide: something was tried, or a library was asked.
#[derive(Debug)]
pub(super) struct Tried {
    /// Whether the kernel makes an io_uring; if not, its error.
    pub(super) io_uring: Result<(), i32>,
    pub(super) cufile: Result<Library, String>,
    /// GPUs that CUDA has.
    pub(super) gpus: usize,
}

/// Everything that is known.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) tried: Tried,
    /// Of the kernel, such as `6.8.0-90-generic`.
    pub(super) release: String,
    pub(super) gpus: Vec<Gpu>,
    pub(super) driver: Option<Driver>,
    pub(super) nvidia_fs: Option<NvidiaFs>,
    pub(super) p2pdma: P2pdma,
    pub(super) iommu: Iommu,
    pub(super) process: Process,
    pub(super) memory: Memory,
    pub(super) numa_nodes: Vec<u32>,
    pub(super) places: Vec<Place>,
}

/// An NVIDIA GPU on the bus.
#[derive(Debug)]
pub(super) struct Gpu {
    pub(super) device: Device,
    /// The model name, as given by its driver.
    pub(super) model: Option<String>,
}

/// NVIDIA's kernel driver.
#[derive(Debug)]
pub(super) struct Driver {
    /// Such as `580.95.05`.
    pub(super) version: String,
    /// Whether its modules are the open-source ones.
    pub(super) open: bool,
    /// `NVreg_RegistryDwords`, if it can be read.
    pub(super) registry: Option<String>,
}

/// The kernel module of GPUDirect Storage.
#[derive(Debug)]
pub(super) struct NvidiaFs {
    pub(super) version: Option<String>,
    /// The storage drivers that work with it, if it lists them.
    pub(super) drivers: Option<Vec<String>>,
    /// Whether its devices are in `/dev`; a container has them only if they were passed in.
    pub(super) devices: bool,
    /// The bridges on which it has found ACS.
    pub(super) acs: Vec<String>,
}

/// What cuFile needs to work without `nvidia-fs`.
#[derive(Debug)]
pub(super) struct P2pdma {
    /// Whether the kernel was built with it, if that is known.
    pub(super) kernel: Option<bool>,
    /// `use_pci_p2pdma` in `/etc/cufile.json`.
    pub(super) asked_for: Option<bool>,
    /// Of the NVMe driver.
    pub(super) multipath: bool,
}

/// The IOMMU, which translates the addresses of devices.
#[derive(Debug)]
pub(super) struct Iommu {
    /// 0 if it is off, or there is none.
    pub(super) groups: usize,
    /// The kernel options for it.
    pub(super) options: Vec<String>,
}

/// The limits of this process.
#[derive(Debug)]
pub(super) struct Process {
    /// As the kernel numbers it: 0 none, 1 strict, 2 a filter.
    pub(super) seccomp: Option<u32>,
    pub(super) no_new_privs: bool,
    /// In bytes; the error is the kernel's text instead.
    pub(super) lock_limit: Result<u64, String>,
    pub(super) locked: Option<u64>,
    /// The numbers of the NUMA nodes whose memory the process may use, such as `0-1`.
    pub(super) nodes: Option<String>,
    /// `kernel.io_uring_disabled`.
    pub(super) io_uring_disabled: Option<u32>,
}

/// The memory of the host.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) total: Option<u64>,
    /// To this process: no more than its control groups leave.
    pub(super) available: Option<u64>,
    /// The control groups with a limit that the process is in.
    pub(super) groups: Vec<GroupMemory>,
    /// The one of them that decides what is available, if any does.
    pub(super) tightest: Option<GroupMemory>,
    /// The setting of transparent huge pages.
    pub(super) transparent: Option<String>,
    /// Huge pages set aside, and their size in bytes.
    pub(super) huge_pages: Option<(u64, u64)>,
}

impl Facts {
    /// Reads all the facts. The directories must be absolute, with links resolved.
    pub(super) fn read(tree: &Tree, directories: &[PathBuf], tried: Tried) -> Facts {
        let release = tree.text("/proc/sys/kernel/osrelease").unwrap_or_else(|| "unknown".to_owned());
        Facts {
            tried,
            gpus: gpus(tree),
            driver: Driver::read(tree),
            nvidia_fs: NvidiaFs::read(tree),
            p2pdma: P2pdma::read(tree, &release),
            iommu: Iommu::read(tree),
            process: Process::read(tree),
            memory: Memory::read(tree),
            numa_nodes: numa_nodes(tree),
            places: directories.iter().map(|directory| Place::read(tree, directory)).collect(),
            release,
        }
    }

    /// Whether there is an NVIDIA GPU, even where the buses are hidden.
    pub(super) fn has_gpu(&self) -> bool {
        !self.gpus.is_empty() || self.tried.gpus > 0
    }

    /// The limit of locked memory, for people.
    pub(super) fn lock_limit(&self) -> String {
        let limit = &self.process.lock_limit;
        limit.as_ref().map_or_else(String::clone, |&bytes| size::format(bytes))
    }
}

fn gpus(tree: &Tree) -> Vec<Gpu> {
    const DEVICES: &str = "/sys/bus/pci/devices";
    let names = tree.names(DEVICES).into_iter().filter(|name| {
        let begins = |file: &str, with| {
            tree.text(&format!("{DEVICES}/{name}/{file}")).is_some_and(|text| text.starts_with(with))
        };
        begins("vendor", NVIDIA) && begins("class", DISPLAY)
    });
    names
        .filter_map(|name| {
            let device = Device::above(tree, &tree.real(&format!("{DEVICES}/{name}"))?)?;
            let model = tree.value(&format!("/proc/driver/nvidia/gpus/{name}/information"), "Model:");
            Some(Gpu { device, model })
        })
        .collect()
}

impl Driver {
    fn read(tree: &Tree) -> Option<Driver> {
        let text = tree.text("/proc/driver/nvidia/version")?;
        let line = text.lines().next().unwrap_or_default();
        let mut words = line.split_whitespace();
        let version = words.find(|word| word.starts_with(|c: char| c.is_ascii_digit()) && word.contains('.'));
        Some(Driver {
            version: version.unwrap_or("of unknown version").to_owned(),
            open: line.contains("Open Kernel Module"),
            registry: tree
                .value("/proc/driver/nvidia/params", "RegistryDwords:")
                .or_else(|| tree.text("/sys/module/nvidia/parameters/NVreg_RegistryDwords")),
        })
    }

    /// The number before the first dot.
    pub(super) fn branch(&self) -> Option<u32> {
        self.version.split('.').next()?.parse().ok()
    }
}

impl NvidiaFs {
    fn read(tree: &Tree) -> Option<NvidiaFs> {
        let modules = tree.text("/proc/modules").unwrap_or_default();
        let loaded = modules.lines().any(|line| line.starts_with("nvidia_fs "));
        if !loaded && !tree.has("/proc/driver/nvidia-fs") {
            return None;
        }
        // The statistics have the whole version, `version` only its first two numbers.
        let whole = tree.value("/proc/driver/nvidia-fs/stats", "NVFS Driver(version:");
        let whole = whole.map(|text| text.trim_end_matches(')').replace(':', "."));
        let list = |name: &str| tree.text(&format!("/proc/driver/nvidia-fs/{name}"));
        let drivers = list("modules").map(|text| {
            text.lines().filter_map(|line| Some(line.split(':').next()?.trim().to_owned())).collect()
        });
        Some(NvidiaFs {
            version: whole.or_else(|| tree.value("/proc/driver/nvidia-fs/version", "version:")),
            drivers,
            devices: tree.names("/dev").iter().any(|name| name.starts_with("nvidia-fs")),
            acs: list("bridges").unwrap_or_default().lines().map(|line| line.trim().to_owned()).collect(),
        })
    }
}

impl P2pdma {
    fn read(tree: &Tree, release: &str) -> P2pdma {
        let symbols = tree.text("/proc/kallsyms").filter(|text| !text.is_empty());
        let config = || {
            let text = tree.text(&format!("/boot/config-{release}"))?;
            Some(text.lines().any(|line| line == "CONFIG_PCI_P2PDMA=y"))
        };
        let multipath = tree.text("/sys/module/nvme_core/parameters/multipath");
        P2pdma {
            kernel: symbols.map(|text| text.contains(P2PDMA_SYMBOL)).or_else(config),
            asked_for: tree.text("/etc/cufile.json").and_then(|text| use_pci_p2pdma(&text)),
            multipath: multipath.as_deref() == Some("Y"),
        }
    }
}

/// The setting in cuFile's configuration, which is JSON with comments to the end of the line.
fn use_pci_p2pdma(text: &str) -> Option<bool> {
    text.lines().filter_map(|line| line.split("//").next()).find_map(|line| {
        let value = line.split_once("\"use_pci_p2pdma\"")?.1.trim_start().strip_prefix(':')?.trim_start();
        match (value.starts_with("true"), value.starts_with("false")) {
            (true, _) => Some(true),
            (_, true) => Some(false),
            _ => None,
        }
    })
}

impl Iommu {
    fn read(tree: &Tree) -> Iommu {
        let command = tree.text("/proc/cmdline").unwrap_or_default();
        let options = command.split_whitespace().filter(|word| {
            word.split_once('=')
                .is_some_and(|(name, _)| matches!(name, "iommu" | "intel_iommu" | "amd_iommu"))
                || word.starts_with("iommu.passthrough=")
        });
        Iommu {
            groups: tree.names("/sys/kernel/iommu_groups").len(),
            options: options.map(str::to_owned).collect(),
        }
    }

    /// Whether addresses pass through it unchanged.
    pub(super) fn passes_through(&self) -> bool {
        self.options.iter().any(|option| matches!(option.as_str(), "iommu=pt" | "iommu.passthrough=1"))
    }
}

impl Process {
    fn read(tree: &Tree) -> Process {
        const STATUS: &str = "/proc/self/status";
        let limit = tree.value("/proc/self/limits", "Max locked memory");
        let limit = limit.and_then(|text| text.split_whitespace().next().map(str::to_owned));
        let limit = limit.unwrap_or_else(|| "unknown".to_owned());
        Process {
            seccomp: tree.value(STATUS, "Seccomp:").and_then(|mode| mode.parse().ok()),
            no_new_privs: tree.value(STATUS, "NoNewPrivs:").is_some_and(|text| text == "1"),
            lock_limit: limit.parse().map_err(|_| limit),
            locked: tree.value(STATUS, "VmLck:").and_then(|text| kibibytes(&text)),
            nodes: tree.value(STATUS, "Mems_allowed_list:"),
            io_uring_disabled: tree
                .text("/proc/sys/kernel/io_uring_disabled")
                .and_then(|text| text.parse().ok()),
        }
    }
}

impl Memory {
    fn read(tree: &Tree) -> Memory {
        let value = |name: &str| tree.value("/proc/meminfo", name);
        let bytes = |name: &str| kibibytes(&value(name)?);
        let host = HostMemory::below(tree.root());
        let setting = tree.text("/sys/kernel/mm/transparent_hugepage/enabled");
        let pages = value("HugePages_Total:").and_then(|text| text.parse().ok());
        Memory {
            total: bytes("MemTotal:"),
            available: host.available(),
            tightest: host.tightest().copied(),
            groups: host.groups,
            // The chosen setting is in brackets.
            transparent: setting.and_then(|text| text.split(['[', ']']).nth(1).map(str::to_owned)),
            huge_pages: pages.zip(bytes("Hugepagesize:")),
        }
    }
}

/// The bytes of a text such as `8 kB`.
fn kibibytes(text: &str) -> Option<u64> {
    Some(text.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

fn numa_nodes(tree: &Tree) -> Vec<u32> {
    let names = tree.names("/sys/devices/system/node");
    let mut nodes: Vec<u32> =
        names.iter().filter_map(|name| name.strip_prefix("node")?.parse().ok()).collect();
    nodes.sort_unstable();
    nodes
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_driver_is_found_in_what_its_module_says() {
        let root = tempfile::tempdir().unwrap();
        let tree = Tree::new(root.path());
        assert!(Driver::read(&tree).is_none());
        let say = |text: &str| {
            fs::create_dir_all(root.path().join("proc/driver/nvidia")).unwrap();
            fs::write(root.path().join("proc/driver/nvidia/version"), text).unwrap();
            Driver::read(&tree).unwrap()
        };
        let closed = say(
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\nGCC version: gcc 12.2.0",
        );
        assert_eq!((closed.version.as_str(), closed.open, closed.branch()), ("535.104.05", false, Some(535)));
        let open = say("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build");
        assert_eq!((open.version.as_str(), open.open, open.branch()), ("580.95.05", true, Some(580)));
        assert_eq!(say("").version, "of unknown version");
    }

    #[test]
    fn the_setting_is_read_past_comments() {
        assert_eq!(use_pci_p2pdma("{ \"properties\": { \"use_pci_p2pdma\": true } }"), Some(true));
        assert_eq!(use_pci_p2pdma("// \"use_pci_p2pdma\" : true\n\"use_pci_p2pdma\" :false"), Some(false));
        assert_eq!(use_pci_p2pdma("{}"), None);
    }
}
