//! What the facts mean for bytes that are to move between a GPU and an SSD without host memory.
//!
//! The rules are from NVIDIA's GPUDirect Storage documentation; docs/gds.md says where to find each.

use super::facts::{Driver, Facts, Gpu};
use super::page::{Check, Status};

/// From this Linux version on, user memory may belong to a peer device (PCI P2PDMA in the block layer).
const P2PDMA_LINUX: (u32, u32) = (6, 2);
/// From this branch of NVIDIA's driver on, its open modules offer PCI P2PDMA.
const P2PDMA_DRIVER: u32 = 565;
/// The driver settings that are needed on x86.
const P2PDMA_REGISTRY: [&str; 2] = ["RMForceStaticBar1=1", "RmForceDisableIomapWC=1"];

/// How cuFile accesses a disk without host memory.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Way {
    NvidiaFs,
    P2pdma,
    /// Through PCI P2PDMA, if these conditions hold.
    Unsure(Vec<String>),
    Closed,
}

/// A requirement of PCI P2PDMA that is not met, and how to fix it.
struct Gap {
    what: String,
    remedy: String,
}

/// All checks except those of the disks.
pub(super) fn direct(facts: &Facts) -> Vec<Check> {
    if !facts.has_gpu() {
        let check = Check::ok("GPU", "no NVIDIA GPU on the PCI buses")
            .but(Status::Missing, "none is needed to train on the CPU");
        return vec![Check { reason: Some("there is no NVIDIA GPU".to_owned()), ..check }];
    }
    let mut checks: Vec<Check> = facts.gpus.iter().map(gpu).collect();
    if checks.is_empty() {
        checks.push(Check::ok("GPU", "there is one, but /sys does not show the PCI buses").unknown(
            "the PCI buses are hidden",
            "how far it is from the SSDs is not known; run doctor on the host",
        ));
    }
    checks.push(driver(facts.driver.as_ref()));
    checks.push(cufile(facts));
    let way = way(facts);
    checks.extend([nvidia_fs(facts, &way), p2pdma(facts, &way), iommu(facts)]);
    checks.extend(acs(facts));
    checks
}

fn gpu(gpu: &Gpu) -> Check {
    let model = gpu.model.as_deref().unwrap_or("NVIDIA");
    let check = Check::ok("GPU", format!("{model} at {}", gpu.device));
    if model.contains("GeForce") {
        return check.blocks(
            "a GeForce does not offer it",
            "cuFile copies through host memory: GPUDirect Storage is for data-center and RTX professional GPUs",
        );
    }
    check
}

fn driver(driver: Option<&Driver>) -> Check {
    let name = "NVIDIA driver";
    let Some(driver) = driver else {
        return Check::ok(name, "not loaded").blocks(
            "NVIDIA's driver is not loaded",
            "the GPU cannot be used; install it, with its open modules, and `sudo modprobe nvidia`",
        );
    };
    let modules = if driver.open { "open" } else { "closed" };
    Check::ok(name, format!("{}, {modules} kernel modules", driver.version))
}

fn cufile(facts: &Facts) -> Check {
    match &facts.tried.cufile {
        Ok(library) => {
            let version = library.version.as_deref().unwrap_or("of unknown version");
            Check::ok("cuFile", format!("{version}, {}", library.path.display()))
        }
        Err(error) => Check::ok("cuFile", format!("cannot be loaded: {error}")).blocks(
            "cuFile is not installed",
            "nothing can ask for a direct transfer; `python3 -m pip install nvidia-cufile` installs it beside libtorch",
        ),
    }
}

/// The path that is available.
pub(super) fn way(facts: &Facts) -> Way {
    if nvidia_fs_serves(facts) {
        return Way::NvidiaFs;
    }
    let (gaps, unknown) = p2pdma_gaps(facts);
    match (gaps.is_empty(), unknown.is_empty()) {
        (true, true) => Way::P2pdma,
        (true, false) => Way::Unsure(unknown),
        _ => Way::Closed,
    }
}

/// Whether it is loaded and accessible, and the NVMe driver works with it.
fn nvidia_fs_serves(facts: &Facts) -> bool {
    facts.nvidia_fs.as_ref().is_some_and(|module| {
        module.devices
            && module.drivers.as_ref().is_none_or(|drivers| drivers.iter().any(|driver| driver == "nvme"))
    })
}

fn nvidia_fs(facts: &Facts, way: &Way) -> Check {
    let name = "nvidia-fs";
    let (found, remedy) = match &facts.nvidia_fs {
        Some(module) => {
            let version = module.version.as_deref().unwrap_or("of unknown version");
            let drivers =
                module.drivers.as_ref().map_or_else(String::new, |drivers| match drivers.as_slice() {
                    [] => ", no storage driver works with it".to_owned(),
                    drivers => format!(", works with {}", drivers.join(", ")),
                });
            if module.devices {
                let remedy = "install an NVMe driver that works with it, such as DOCA's or MLNX_OFED's";
                (format!("{version}{drivers}"), remedy)
            } else {
                let remedy = "a container gets it by `docker run --gpus all -e NVIDIA_GDS=enabled`";
                (format!("{version}{drivers}, but there is no /dev/nvidia-fs*"), remedy)
            }
        }
        None => ("not loaded".to_owned(), "`sudo apt install nvidia-fs && sudo modprobe nvidia-fs` loads it"),
    };
    let check = Check::ok(name, found);
    match way {
        Way::NvidiaFs => check,
        Way::P2pdma => Check { found: format!("{}; not needed: PCI P2PDMA is ready", check.found), ..check },
        Way::Unsure(_) => {
            Check { found: format!("{}; not needed if PCI P2PDMA works", check.found), ..check }
        }
        Way::Closed => check.blocks(
            "neither nvidia-fs nor PCI P2PDMA is ready",
            format!(
                "cuFile copies through host memory (compatibility mode); {remedy}, or see PCI P2PDMA below"
            ),
        ),
    }
}

fn p2pdma(facts: &Facts, way: &Way) -> Check {
    let name = "PCI P2PDMA";
    let (gaps, unknown) = p2pdma_gaps(facts);
    let found = match (gaps.as_slice(), unknown.as_slice()) {
        ([], []) => "ready".to_owned(),
        ([], unknown) => format!("ready as far as is known; not told: {}", unknown.join("; ")),
        (gaps, _) => gaps.iter().map(|gap| gap.what.as_str()).collect::<Vec<_>>().join("; "),
    };
    let check = Check::ok(name, found);
    match way {
        Way::NvidiaFs if !gaps.is_empty() => {
            Check { found: format!("{}; not needed: nvidia-fs serves", check.found), ..check }
        }
        Way::NvidiaFs | Way::P2pdma => check,
        Way::Unsure(unknown) => check.unknown(
            format!("PCI P2PDMA is not sure ({})", unknown.join("; ")),
            "if it does not work, cuFile copies through host memory; `gdscheck -p` of NVIDIA's gds-tools tells",
        ),
        // `nvidia-fs` gives the reason; this is the other half of it.
        Way::Closed => {
            let remedies: Vec<_> = gaps.into_iter().map(|gap| gap.remedy).collect();
            check.but(
                Status::Blocks,
                format!("the way without nvidia-fs is closed; to open it: {}", remedies.join("; ")),
            )
        }
    }
}

/// The requirements of PCI P2PDMA that are not met, and those that are unknown.
fn p2pdma_gaps(facts: &Facts) -> (Vec<Gap>, Vec<String>) {
    let (mut gaps, mut unknown) = (Vec::new(), Vec::new());
    let mut gap = |what: String, remedy: &str| gaps.push(Gap { what, remedy: remedy.to_owned() });
    let old = linux(&facts.release).is_some_and(|version| version < P2PDMA_LINUX);
    if old || facts.p2pdma.kernel == Some(false) {
        gap(
            format!("Linux {} was built without it", facts.release),
            "boot a Linux from 6.2 on with CONFIG_PCI_P2PDMA=y",
        );
    } else if facts.p2pdma.kernel.is_none() {
        unknown.push("whether the kernel has CONFIG_PCI_P2PDMA".to_owned());
    }
    match &facts.driver {
        None => gap("NVIDIA's driver is not loaded".to_owned(), "`sudo modprobe nvidia`"),
        Some(driver) => {
            if !driver.open || driver.branch().is_some_and(|branch| branch < P2PDMA_DRIVER) {
                gap(
                    format!("the driver is not the open one from {P2PDMA_DRIVER} on"),
                    "`sudo apt install nvidia-open`",
                );
            }
            if cfg!(target_arch = "x86_64") {
                match &driver.registry {
                    Some(set) if P2PDMA_REGISTRY.iter().all(|entry| set.contains(entry)) => {}
                    Some(_) => gap(
                        "the driver's registry does not allow it".to_owned(),
                        "put `options nvidia NVreg_RegistryDwords=\"RMForceStaticBar1=1;RmForceDisableIomapWC=1;\"` \
                         into /etc/modprobe.d/nvidia-p2pdma.conf and start anew",
                    ),
                    None => unknown.push("the driver's registry".to_owned()),
                }
            }
        }
    }
    if facts.p2pdma.multipath {
        gap(
            "NVMe multipath is on".to_owned(),
            "put `options nvme_core multipath=N` into /etc/modprobe.d/nvme.conf and start anew",
        );
    }
    if let Some(stacked) = facts.places.iter().find_map(|place| place.stacked.as_ref()) {
        gap(
            format!("{stacked} is a RAID or volume"),
            "name one directory per SSD: `--spill-dir A --spill-dir B`",
        );
    }
    match facts.p2pdma.asked_for {
        Some(true) => {}
        Some(false) => gap(
            "/etc/cufile.json forbids it".to_owned(),
            "set `\"use_pci_p2pdma\": true` under properties in /etc/cufile.json",
        ),
        None => unknown.push("use_pci_p2pdma in /etc/cufile.json".to_owned()),
    }
    (gaps, unknown)
}

/// The first two numbers of a kernel's release.
fn linux(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn iommu(facts: &Facts) -> Check {
    let name = "IOMMU";
    let iommu = &facts.iommu;
    let told = match iommu.options.as_slice() {
        [] => String::new(),
        options => format!(" ({})", options.join(" ")),
    };
    if iommu.groups == 0 {
        return Check::ok(name, format!("off, or there is none{told}"));
    }
    // On NVIDIA's own Arm platforms direct transfers need it.
    if cfg!(target_arch = "aarch64") {
        return Check::ok(name, format!("on{told}, {} groups", iommu.groups));
    }
    const OFF: &str = "add `intel_iommu=off` or `amd_iommu=off` to the kernel's command line and start anew";
    if iommu.passes_through() {
        Check::ok(name, format!("on, addresses pass through{told}, {} groups", iommu.groups)).but(
            Status::Warn,
            format!("direct transfers may go through the CPU's root ports, and be slower; {OFF}"),
        )
    } else {
        Check::ok(name, format!("on, addresses are translated{told}, {} groups", iommu.groups)).but(
            Status::Warn,
            format!("NVIDIA does not promise that direct transfers work so, and they are slower; {OFF}, or `iommu=pt`"),
        )
    }
}

/// Access control (ACS) that sends transfers between neighbouring devices up to the CPU, where `nvidia-fs` has found
/// it.
fn acs(facts: &Facts) -> Option<Check> {
    let bridges = &facts.nvidia_fs.as_ref()?.acs;
    let Some(first) = bridges.first() else { return Some(Check::ok("ACS", "off on all PCIe bridges")) };
    Some(Check::ok("ACS", format!("on at {}", bridges.join(", "))).but(
        Status::Warn,
        format!(
            "transfers behind these bridges go up to the CPU and down again; turn it off in the firmware, or for this boot: \
             `sudo setpci -s {first} ECAP_ACS+6.w=0`"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_compared_by_their_first_two_numbers() {
        assert_eq!(linux("6.8.0-90-generic"), Some((6, 8)));
        assert!(linux("5.15.0").unwrap() < P2PDMA_LINUX && linux("6.10-rc1").unwrap() > P2PDMA_LINUX);
        assert_eq!(linux("unknown"), None);
    }
}
