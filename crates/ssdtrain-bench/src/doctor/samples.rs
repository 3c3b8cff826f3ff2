//! Made-up machines to test the rules on.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use tempfile::TempDir;

use super::cufile::Library;
use super::disks::disks;
use super::facts::{Facts, Tried};
use super::findings::direct;
use super::host::host;
use super::page::Check;
use super::tree::Tree;
use super::verdict::verdict;

pub(super) const SWITCH: &str = "sys/devices/pci0000:17/0000:17:01.0/0000:18:00.0";
pub(super) const OTHER_SOCKET: &str = "sys/devices/pci0000:c0/0000:c0:02.0";

/// A made-up machine: its files, and the results of what would be tried.
pub(super) struct Machine {
    pub(super) root: TempDir,
    pub(super) tried: Tried,
}

impl Machine {
    /// A machine with io_uring, one NUMA node and nothing from NVIDIA.
    pub(super) fn new() -> Machine {
        let tried = Tried { io_uring: Ok(()), cufile: Err("libcufile.so.0: not found".to_owned()), gpus: 0 };
        let machine = Machine { root: tempfile::tempdir().unwrap(), tried };
        machine
            .file("proc/sys/kernel/osrelease", "6.8.0-90-generic\n")
            .file("proc/sys/kernel/io_uring_disabled", "0\n")
            .file(
                "proc/self/status",
                "VmLck:\t       0 kB\nNoNewPrivs:\t0\nSeccomp:\t0\nMems_allowed_list:\t0\n",
            )
            .file(
                "proc/self/limits",
                "Max locked memory         8388608              8388608              bytes\n",
            )
            .file(
                "proc/meminfo",
                "MemTotal: 1048576 kB\nMemAvailable: 524288 kB\nHugePages_Total: 0\nHugepagesize: 2048 kB\n",
            )
            .file("proc/kallsyms", "0000000000000000 T printk\n0000000000000000 d p2pdma_pgmap_ops\n")
            .file("proc/cmdline", "root=/dev/sda1 quiet\n")
            .file("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
            .file("sys/devices/system/node/node0/cpulist", "0-15\n")
            .file("run/udev/data/+pci:0", "")
    }

    pub(super) fn file(self, path: &str, text: &str) -> Machine {
        let path = self.root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    pub(super) fn link(self, path: &str, target: &str) -> Machine {
        let path = self.root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(self.root.path().join(target), path).unwrap();
        self
    }

    /// A PCI device in this directory of sysfs.
    pub(super) fn pci(self, directory: &str, vendor: &str, class: &str, node: &str) -> Machine {
        let address = directory.rsplit('/').next().unwrap();
        let files = [
            ("vendor", vendor),
            ("class", class),
            ("numa_node", node),
            ("current_link_speed", "32.0 GT/s PCIe"),
            ("current_link_width", "4"),
            ("max_link_width", "4"),
        ];
        files
            .into_iter()
            .fold(self, |machine, (name, text)| machine.file(&format!("{directory}/{name}"), text))
            .link(&format!("sys/bus/pci/devices/{address}"), directory)
    }

    /// An H200 with the open driver, without special settings, and cuFile.
    pub(super) fn h200(mut self, directory: &str, node: &str) -> Machine {
        let address = directory.rsplit('/').next().unwrap();
        self.tried.cufile =
            Ok(Library { path: PathBuf::from("/usr/lib/libcufile.so.0"), version: Some("1.15".to_owned()) });
        self.tried.gpus = 1;
        self.pci(directory, "0x10de", "0x030200", node)
            .file(
                &format!("proc/driver/nvidia/gpus/{address}/information"),
                "Model: \t\t NVIDIA H200\nIRQ: 16\n",
            )
            .file(
                "proc/driver/nvidia/version",
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n",
            )
            .file("proc/driver/nvidia/params", "ResmanDebugLevel: 4294967295\nRegistryDwords: \"\"\n")
    }

    pub(super) fn nvidia_fs(self) -> Machine {
        self.file("proc/modules", "nvidia_fs 319488 0 - Live 0x0\nnvidia 100 1 nvidia_fs, Live 0x0\n")
            .file("proc/driver/nvidia-fs/version", "version: 2.26\n")
            .file("proc/driver/nvidia-fs/stats", "GDS Version: 1.15.1.6\nNVFS Driver(version: 2.26.6)\n")
            .file("proc/driver/nvidia-fs/modules", "nvme: 5.8\n")
            .file("proc/driver/nvidia-fs/bridges", "")
            .file("dev/nvidia-fs0", "")
    }

    /// Adds what PCI P2PDMA requires of the driver and of cuFile.
    pub(super) fn p2pdma(self) -> Machine {
        self.file(
            "proc/driver/nvidia/params",
            "RegistryDwords: \"RMForceStaticBar1=1;RmForceDisableIomapWC=1;\"\n",
        )
        .file("etc/cufile.json", "{\n  // direct\n  \"properties\": { \"use_pci_p2pdma\": true }\n}\n")
    }

    /// A block device with this number in this directory.
    pub(super) fn block(self, directory: &str, number: &str) -> Machine {
        self.file(&format!("{directory}/dev"), number).link(&format!("sys/dev/block/{number}"), directory)
    }

    /// An NVMe SSD behind the switch, with a partition of number 259:1.
    pub(super) fn nvme(self) -> Machine {
        let ssd = format!("{SWITCH}/0000:19:02.0/0000:1b:00.0");
        let disk = format!("{ssd}/nvme/nvme0/nvme0n1");
        self.pci(&ssd, "0x144d", "0x010802", "0")
            .block(&disk, "259:0")
            .block(&format!("{disk}/nvme0n1p1"), "259:1")
            .file(&format!("{disk}/nvme0n1p1/partition"), "1")
    }

    /// Mounts something at `/mnt/ssd`.
    pub(super) fn mount(self, number: &str, kind: &str, source: &str, options: &str) -> Machine {
        self.file(
            "proc/self/mountinfo",
            &format!(
                "1 0 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n\
                 2 1 {number} / /mnt/ssd rw,noatime shared:1 - {kind} {source} {options}\n"
            ),
        )
    }

    pub(super) fn udev(self, number: &str) -> Machine {
        self.file(
            &format!("run/udev/data/b{number}"),
            "S:disk/by-id/x\nE:ID_FS_TYPE=ext4\nE:ID_FS_USAGE=filesystem\n",
        )
    }

    /// What doctor reports for `/mnt/ssd`, without what it tries by itself.
    pub(super) fn checks(self) -> Vec<Check> {
        let Machine { root, tried } = self;
        let facts = Facts::read(&Tree::new(root.path()), &[PathBuf::from("/mnt/ssd/spill")], tried);
        let mut checks = direct(&facts);
        checks.extend(facts.places.iter().flat_map(|place| disks(&facts, place)));
        checks.extend(host(&facts));
        checks.push(verdict(&facts, &checks, "io_uring, O_DIRECT"));
        checks
    }
}

/// A good machine: an H200 and an NVMe SSD with ext4 behind the same switch, and `nvidia-fs`.
pub(super) fn bare_metal() -> Machine {
    Machine::new()
        .h200(&format!("{SWITCH}/0000:19:01.0/0000:1a:00.0"), "0")
        .nvidia_fs()
        .nvme()
        .mount("259:1", "ext4", "/dev/nvme0n1p1", "rw,data=ordered")
        .udev("259:1")
}

/// An H200 in a virtual machine with ext4 on a virtio disk.
pub(super) fn virtual_machine() -> Machine {
    let disk = "sys/devices/pci0000:00/0000:00:02.0";
    Machine::new()
        .h200("sys/devices/pci0000:00/0000:00:05.0", "-1")
        .pci(disk, "0x1af4", "0x010000", "-1")
        .block(&format!("{disk}/virtio1/block/vda"), "254:0")
        .mount("254:0", "ext4", "/dev/vda", "rw")
        .file("proc/fs/ext4/vda/options", "rw\ndata=ordered\n")
}

/// md RAID 0 over two SSDs on different sockets.
pub(super) fn raid() -> Machine {
    let far = format!("{OTHER_SOCKET}/0000:c1:00.0");
    let far_disk = format!("{far}/nvme/nvme1/nvme1n1");
    let near_disk = format!("{SWITCH}/0000:19:02.0/0000:1b:00.0/nvme/nvme0/nvme0n1");
    let md = "sys/devices/virtual/block/md0";
    bare_metal()
        .pci(&far, "0x144d", "0x010802", "1")
        .block(&far_disk, "259:2")
        .block(md, "9:0")
        .link(&format!("{md}/slaves/nvme0n1p1"), &format!("{near_disk}/nvme0n1p1"))
        .link(&format!("{md}/slaves/nvme1n1"), &far_disk)
        .mount("9:0", "xfs", "/dev/md0", "rw")
        .udev("9:0")
        .file("sys/devices/system/node/node1/cpulist", "16-31\n")
        .file("proc/self/status", "VmLck:\t0 kB\nNoNewPrivs:\t0\nSeccomp:\t0\nMems_allowed_list:\t0-1\n")
}
