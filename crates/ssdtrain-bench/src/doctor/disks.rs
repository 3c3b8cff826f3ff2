//! What the facts mean for a spill directory: its file system, udev's entry, its disks and their distance from the
//! GPUs.

use super::facts::Facts;
use super::page::{Check, Status};
use super::pci::Distance;
use super::place::{Disk, DiskKind, Journal, Mount, Place, Udev};

/// At most this many pairs of disk and GPU are named.
const PAIRS: usize = 4;

/// All checks for a directory.
pub(super) fn disks(facts: &Facts, place: &Place) -> Vec<Check> {
    let mut checks = vec![mount(place)];
    checks.extend(udev(place));
    checks.extend(place.disks.iter().map(ssd));
    checks.extend(distance(facts, place));
    if !facts.has_gpu() {
        // Nothing could be moved directly in any case, so whatever else prevents that costs nothing.
        checks.retain(|check| matches!(check.name.as_str(), "mount" | "SSD"));
        for check in &mut checks {
            if matches!(check.status, Status::Blocks | Status::Unknown) {
                *check = Check::ok(check.name.clone(), check.found.clone());
            }
        }
    }
    checks
}

fn mount(place: &Place) -> Check {
    let name = "mount";
    let directory = place.directory.display();
    let Some(mount) = &place.mount else {
        return Check::ok(name, format!("{directory}: not in the mount table")).unknown(
            format!("the file system of {directory} is not known"),
            "cuFile takes ext4 and xfs; `findmnt --target DIR` tells",
        );
    };
    let Mount { kind, source, point, options, .. } = mount;
    let stacked = match &place.stacked {
        Some(stacked) if place.device.as_ref() != Some(stacked) => format!(" through {stacked}"),
        _ => String::new(),
    };
    let options = options.join(",");
    let check = Check::ok(name, format!("{kind} on {source}{stacked} at {} ({options})", point.display()));
    let again = || format!("`sudo umount {0} && sudo mount -o data=ordered {source} {0}`", point.display());
    match (kind.as_str(), &mount.journal) {
        ("xfs", _) => check,
        ("ext4", Journal::Shown(mode)) if mode == "ordered" => check,
        ("ext4", Journal::Shown(mode) | Journal::Hidden(mode)) if mode != "ordered" => check.blocks(
            format!("{directory} is mounted with data={mode}"),
            format!("cuFile takes ext4 with data=ordered only; {}", again()),
        ),
        ("ext4", Journal::None) => check.unknown(
            format!("ext4 at {} has no journal", point.display()),
            format!(
                "cuFile looks for data=ordered in the mount table and finds nothing; with a journal \
                 (`sudo tune2fs -O has_journal {source}`, unmounted) and `-o data=ordered` it is shown"
            ),
        ),
        ("ext4", _) => check.unknown(
            format!("the mount table does not show data=ordered for {}", point.display()),
            format!("ordered is the default, but cuFile looks for it there; {}", again()),
        ),
        ("nfs" | "nfs4" | "lustre" | "wekafs" | "beegfs" | "gpfs", _) => check.unknown(
            format!("{directory} is on {kind}"),
            "cuFile can go there directly over RDMA only, which is not looked at here; \
             `gdscheck -p` of NVIDIA's gds-tools tells",
        ),
        ("overlay", _) => check.blocks(
            format!("{directory} is on the container's overlay"),
            "cuFile takes ext4 and xfs; give the container a directory of a local SSD: `docker run -v /mnt/nvme:/mnt/nvme`",
        ),
        _ => check.blocks(
            format!("{directory} is on {kind}"),
            "cuFile takes ext4 and xfs on local disks; name a directory there: `--spill-dir DIR`",
        ),
    }
}

/// The udev entry without which cuFile refuses a file on a local disk (error 5027, unless it may copy).
fn udev(place: &Place) -> Option<Check> {
    let mount = place.mount.as_ref().filter(|mount| matches!(mount.kind.as_str(), "ext4" | "xfs"))?;
    let (number, device) = (place.number()?, place.device.as_deref().unwrap_or(&mount.source));
    let name = "udev";
    let entry = format!("/run/udev/data/b{number}");
    let reason = format!("udev does not know the file system on {device}");
    let by_hand = format!("`printf 'E:ID_FS_USAGE=filesystem\\n' | sudo tee {entry}`");
    Some(match place.udev {
        Udev::FileSystem => Check::ok(name, format!("{entry} has ID_FS_USAGE=filesystem")),
        Udev::NoData => Check::ok(name, "there is no /run/udev/data").blocks(
            reason,
            format!(
                "cuFile refuses files on {device} (5027); in a container `docker run -v /run/udev:/run/udev:ro`, \
                 elsewhere `sudo mkdir -p /run/udev/data` and {by_hand}"
            ),
        ),
        Udev::NoEntry | Udev::NotTold => {
            let found = if place.udev == Udev::NoEntry {
                format!("{entry} is not there")
            } else {
                format!("{entry} does not have ID_FS_USAGE=filesystem")
            };
            Check::ok(name, found).blocks(
                reason,
                format!(
                    "cuFile refuses files on {device} (5027); `sudo udevadm trigger --settle /sys/class/block/{device}`, \
                     or by hand {by_hand}"
                ),
            )
        }
    })
}

fn ssd(disk: &Disk) -> Check {
    let name = "SSD";
    let place = disk.device.as_ref().map_or_else(String::new, |device| format!(" at {device}"));
    let Disk { name: disk_name, kind, device } = disk;
    let one_nvme = "name a directory on a local NVMe SSD: `--spill-dir DIR`";
    match kind {
        DiskKind::Virtio => Check::ok(
            name,
            format!("{disk_name}{place}: virtual disk (virtio): no peer-to-peer"),
        )
        .blocks(
            format!("{disk_name} is a virtual disk (virtio)"),
            format!(
                "bytes go through host memory; pass an NVMe SSD through to the virtual machine, or {one_nvme}"
            ),
        ),
        DiskKind::Other => Check::ok(name, format!("{disk_name}{place}: not NVMe"))
            .blocks(format!("{disk_name} is not NVMe"), format!("bytes go through host memory; {one_nvme}")),
        DiskKind::Nvme => {
            let check = Check::ok(name, format!("{disk_name}{place}"));
            match device.as_ref().and_then(|device| device.link.as_ref()?.narrowed()) {
                Some((width, most)) => check.but(
                    Status::Warn,
                    format!(
                        "{width} of its {most} lanes are connected, for as much less of its speed; another slot may have \
                         more: `sudo lspci -vv -s {}`",
                        device.as_ref().map_or("", |device| device.address.as_str())
                    ),
                ),
                None => check,
            }
        }
    }
}

/// How far the disks are from the GPUs.
fn distance(facts: &Facts, place: &Place) -> Option<Check> {
    let reached: Vec<_> = place
        .disks
        .iter()
        .filter(|disk| disk.kind == DiskKind::Nvme)
        .filter_map(|disk| Some((disk.name.as_str(), disk.device.as_ref()?)))
        .collect();
    let mut pairs = Vec::new();
    for gpu in &facts.gpus {
        pairs.extend(
            reached.iter().map(|(name, disk)| (gpu.device.distance(disk), *name, *disk, &gpu.device)),
        );
    }
    // A GPU's distance is that of the farthest disk that its bytes are striped over; the nearest GPU counts.
    let farthest = |gpu: &str| pairs.iter().filter(|pair| pair.3.address == gpu).map(|pair| pair.0).max();
    let nearest = facts.gpus.iter().filter_map(|gpu| farthest(&gpu.device.address)).min()?;
    pairs.sort_by_key(|pair| pair.0);
    let mut found: Vec<String> = pairs
        .iter()
        .take(PAIRS)
        .map(|(distance, name, _, gpu)| format!("{name} and GPU {}: {distance}", gpu.address))
        .collect();
    if pairs.len() > PAIRS {
        found.push(format!("and {} more pairs", pairs.len() - PAIRS));
    }
    let check = Check::ok("distance", found.join("; "));
    let apart = pairs.iter().any(|(distance, _, disk, gpu)| {
        *distance == Distance::Switch
            && matches!((&disk.iommu_group, &gpu.iommu_group), (Some(one), Some(another)) if one != another)
    });
    let measure = "`nvidia-smi topo -m` shows the tree, `gdsio` measures it";
    Some(match nearest {
        Distance::Switch if apart => check.but(
            Status::Warn,
            "they are in different IOMMU groups, so the switch may send transfers up to the CPU (ACS); turn ACS off in the \
             firmware",
        ),
        Distance::Switch => check,
        Distance::RootComplex | Distance::Node => check.but(
            Status::Warn,
            format!("direct transfers go through the CPU, as fast as it lets peers; an SSD behind the GPU's switch is best: {measure}"),
        ),
        Distance::Sockets => check.but(
            Status::Warn,
            format!(
                "direct transfers cross the link between sockets, which can be slower than host memory; spill to an SSD of \
                 the GPU's socket: {measure}"
            ),
        ),
        Distance::HostBridges => check.but(
            Status::Warn,
            format!("direct transfers go through the CPU, and perhaps from socket to socket; {measure}"),
        ),
    })
}
