//! What doctor reports for made-up machines.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use super::disks::disks;
use super::facts::{Facts, Tried};
use super::findings::direct;
use super::host::host;
use super::page::{self, Check, Status};
use super::samples::{Machine, SWITCH, bare_metal, raid, virtual_machine};
use super::tree::Tree;

fn check<'a>(checks: &'a [Check], name: &str) -> &'a Check {
    checks.iter().find(|check| check.name == name).unwrap_or_else(|| panic!("{name}: {checks:#?}"))
}

/// Asserts the status of a check, and that its text and advice hold these words.
fn says(checks: &[Check], name: &str, status: Status, words: &[&str]) {
    let check = check(checks, name);
    let text = format!("{} -> {}", check.found, check.advice.as_deref().unwrap_or_default());
    assert_eq!(check.status, status, "{name}: {text}");
    for word in words {
        assert!(text.contains(word), "{name} lacks {word:?}: {text}");
    }
}

fn statuses(checks: &[Check], status: Status) -> Vec<&str> {
    checks.iter().filter(|check| check.status == status).map(|check| check.name.as_str()).collect()
}

#[test]
fn a_gpu_and_an_ssd_behind_one_switch_go_directly_through_nvidia_fs() {
    let checks = bare_metal().checks();
    says(&checks, "GPU", Status::Ok, &["NVIDIA H200 at 0000:1a:00.0", "NUMA node 0"]);
    says(&checks, "NVIDIA driver", Status::Ok, &["580.95.05", "open"]);
    says(&checks, "cuFile", Status::Ok, &["1.15", "/usr/lib/libcufile.so.0"]);
    says(&checks, "nvidia-fs", Status::Ok, &["2.26.6", "works with nvme"]);
    says(&checks, "PCI P2PDMA", Status::Ok, &["not needed"]);
    says(&checks, "udev", Status::Ok, &["b259:1"]);
    says(&checks, "SSD", Status::Ok, &["nvme0n1 at 0000:1b:00.0", "32.0 GT/s x4"]);
    says(&checks, "distance", Status::Ok, &["same PCIe switch"]);
    says(&checks, "verdict", Status::Ok, &["direct: yes", "nvidia-fs", "uses here: io_uring, O_DIRECT"]);
    assert!(checks.iter().all(|check| check.status == Status::Ok), "{checks:#?}");
}

#[test]
fn without_nvidia_fs_a_machine_set_up_for_p2pdma_goes_directly() {
    let machine = || {
        Machine::new()
            .h200(&format!("{SWITCH}/0000:19:01.0/0000:1a:00.0"), "0")
            .nvme()
            .mount("259:1", "xfs", "/dev/nvme0n1p1", "rw")
            .udev("259:1")
    };
    let ready = machine().p2pdma().checks();
    says(&ready, "nvidia-fs", Status::Ok, &["not loaded; not needed"]);
    says(&ready, "PCI P2PDMA", Status::Ok, &["ready"]);
    says(&ready, "verdict", Status::Ok, &["direct: yes", "PCI P2PDMA"]);

    let unsure = machine().p2pdma().file("etc/cufile.json", "{}").checks();
    says(&unsure, "PCI P2PDMA", Status::Unknown, &["use_pci_p2pdma"]);
    says(&unsure, "verdict", Status::Unknown, &["direct: unknown", "use_pci_p2pdma"]);

    let closed = machine().p2pdma().file("proc/kallsyms", "0 T printk\n").checks();
    says(
        &closed,
        "PCI P2PDMA",
        Status::Blocks,
        &["6.8.0-90-generic was built without it", "CONFIG_PCI_P2PDMA=y"],
    );
    let multipath = machine().p2pdma().file("sys/module/nvme_core/parameters/multipath", "Y\n").checks();
    says(&multipath, "PCI P2PDMA", Status::Blocks, &["multipath", "multipath=N"]);
}

#[test]
fn cufile_without_either_way_is_called_compatibility_mode_and_not_direct() {
    let checks = Machine::new()
        .h200(&format!("{SWITCH}/0000:19:01.0/0000:1a:00.0"), "0")
        .nvme()
        .mount("259:1", "xfs", "/dev/nvme0n1p1", "rw")
        .udev("259:1")
        .checks();
    says(&checks, "nvidia-fs", Status::Blocks, &["compatibility mode", "modprobe nvidia-fs"]);
    says(&checks, "PCI P2PDMA", Status::Blocks, &["NVreg_RegistryDwords", "RMForceStaticBar1=1"]);
    says(
        &checks,
        "verdict",
        Status::Blocks,
        &["direct: no", "neither nvidia-fs nor PCI P2PDMA", "compatibility mode, through host memory"],
    );
}

#[test]
fn a_virtual_disk_that_udev_does_not_know_stands_in_the_way() {
    let checks = virtual_machine().checks();
    says(&checks, "SSD", Status::Blocks, &["vda at 0000:00:02.0", "virtual disk (virtio): no peer-to-peer"]);
    says(
        &checks,
        "udev",
        Status::Blocks,
        &["b254:0 is not there", "5027", "udevadm trigger", "/sys/class/block/vda"],
    );
    says(&checks, "mount", Status::Unknown, &["data=ordered", "sudo umount /mnt/ssd"]);
    says(&checks, "verdict", Status::Blocks, &["direct: no", "virtio", "udev", "pinned host memory"]);
    assert!(checks.iter().all(|check| check.name != "distance"), "{checks:#?}");
}

#[test]
fn a_container_that_refuses_io_uring_is_told_how_to_allow_it() {
    let mut machine = virtual_machine();
    fs::remove_dir_all(machine.root.path().join("run")).unwrap();
    machine.tried.io_uring = Err(libc::EPERM);
    let machine = machine
        .file("proc/self/status", "VmLck:\t0 kB\nNoNewPrivs:\t1\nSeccomp:\t2\nMems_allowed_list:\t0\n")
        .mount("0:52", "overlay", "overlay", "rw,lowerdir=/a,upperdir=/b");
    let checks = machine.checks();
    says(&checks, "io_uring", Status::Warn, &["refused", "threads are used", "--security-opt seccomp="]);
    says(&checks, "seccomp", Status::Warn, &["a filter", "no new privileges", "io_uring_setup"]);
    says(&checks, "mount", Status::Blocks, &["overlay", "docker run -v"]);
    says(&checks, "verdict", Status::Blocks, &["overlay"]);

    let mut forbidden = Machine::new().file("proc/sys/kernel/io_uring_disabled", "2\n");
    forbidden.tried.io_uring = Err(libc::EPERM);
    let checks = forbidden.checks();
    says(&checks, "io_uring", Status::Warn, &["sysctl kernel.io_uring_disabled=0", "now 2"]);
    says(&checks, "seccomp", Status::Ok, &["no filter"]);
}

#[test]
fn where_a_limit_refuses_io_uring_no_filter_is_blamed() {
    for (code, limit) in [(libc::ENOMEM, "`ulimit -l`"), (libc::EMFILE, "`ulimit -n`")] {
        for seccomp in ["0", "2"] {
            let mut machine = Machine::new().file("proc/self/status", &format!("Seccomp:\t{seccomp}\n"));
            machine.tried.io_uring = Err(code);
            let checks = machine.checks();
            says(&checks, "io_uring", Status::Warn, &["refused", "threads are used", limit]);
            says(&checks, "seccomp", Status::Ok, &[]);
        }
    }
}

#[test]
fn a_container_without_udev_is_told_to_mount_it() {
    let machine = bare_metal();
    fs::remove_dir_all(machine.root.path().join("run")).unwrap();
    let checks = machine.checks();
    says(&checks, "udev", Status::Blocks, &["docker run -v /run/udev:/run/udev:ro", "run/udev/data/b259:1"]);
    assert_eq!(statuses(&checks, Status::Blocks), ["udev", "verdict"]);
}

#[test]
fn without_a_gpu_nothing_stands_in_the_way_and_nothing_is_to_be_mended() {
    let checks = Machine::new().mount("0:30", "tmpfs", "tmpfs", "rw").checks();
    says(&checks, "GPU", Status::Missing, &["no NVIDIA GPU", "train on the CPU"]);
    says(&checks, "mount", Status::Ok, &["tmpfs"]);
    says(&checks, "verdict", Status::Ok, &["direct: no, because there is no NVIDIA GPU", "tensor memory"]);
    for name in ["nvidia-fs", "PCI P2PDMA", "udev", "distance"] {
        assert!(checks.iter().all(|check| check.name != name), "{name}");
    }
    assert_eq!(statuses(&checks, Status::Blocks), [""; 0]);
}

#[test]
fn a_gpu_whose_bus_is_hidden_is_not_overlooked() {
    let mut machine = Machine::new().mount("0:30", "overlay", "overlay", "rw");
    machine.tried.gpus = 1;
    let checks = machine.checks();
    says(&checks, "GPU", Status::Unknown, &["does not show the PCI buses"]);
    says(&checks, "verdict", Status::Blocks, &["direct: no"]);
}

#[test]
fn a_raid_is_as_far_as_its_farthest_disk() {
    let checks = raid().checks();
    let ssds: Vec<_> =
        checks.iter().filter(|check| check.name == "SSD").map(|check| &check.found[..7]).collect();
    assert_eq!(ssds, ["nvme0n1", "nvme1n1"]);
    says(
        &checks,
        "distance",
        Status::Warn,
        &[
            "nvme0n1 and GPU 0000:1a:00.0: behind the same PCIe switch",
            "nvme1n1 and GPU 0000:1a:00.0: across sockets",
        ],
    );
    says(
        &checks,
        "NUMA",
        Status::Warn,
        &["node 0 has GPU 0000:1a:00.0, nvme0n1", "node 1 has nvme1n1", "numactl --cpunodebind=0"],
    );
    says(&checks, "verdict", Status::Ok, &["direct: yes"]);
}

#[test]
fn p2pdma_does_not_go_through_a_raid() {
    let machine = raid().p2pdma();
    fs::remove_dir_all(machine.root.path().join("proc/driver/nvidia-fs")).unwrap();
    let checks = machine.file("proc/modules", "").checks();
    says(&checks, "PCI P2PDMA", Status::Blocks, &["md0 is a RAID or volume", "--spill-dir A --spill-dir B"]);
}

#[test]
fn what_costs_speed_is_told_with_what_mends_it() {
    let checks = bare_metal()
        .file("proc/cmdline", "root=/dev/sda1 intel_iommu=on iommu=pt\n")
        .file("sys/kernel/iommu_groups/0/type", "identity\n")
        .file("proc/driver/nvidia-fs/bridges", "0000:17:01.0\n0000:18:00.0\n")
        .file(&format!("{SWITCH}/0000:19:02.0/0000:1b:00.0/current_link_width"), "2\n")
        .file("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
        .checks();
    says(&checks, "IOMMU", Status::Warn, &["iommu=pt", "intel_iommu=off"]);
    says(&checks, "ACS", Status::Warn, &["0000:17:01.0, 0000:18:00.0", "setpci -s 0000:17:01.0"]);
    says(&checks, "SSD", Status::Warn, &["2 of its 4 lanes"]);
    says(&checks, "huge pages", Status::Warn, &["never", "tee /sys/kernel/mm"]);
    // None of this prevents direct transfers.
    says(&checks, "verdict", Status::Ok, &["direct: yes"]);
}

#[test]
fn a_journal_that_cufile_refuses_and_a_driver_that_does_not_serve_nvme_are_told() {
    let checks = bare_metal()
        .mount("259:1", "ext4", "/dev/nvme0n1p1", "rw,data=journal")
        .file("proc/driver/nvidia-fs/modules", "")
        .checks();
    says(
        &checks,
        "mount",
        Status::Blocks,
        &["data=journal", "mount -o data=ordered /dev/nvme0n1p1 /mnt/ssd"],
    );
    says(&checks, "nvidia-fs", Status::Blocks, &["no storage driver works with it"]);
    says(&checks, "verdict", Status::Blocks, &["data=journal", "compatibility mode"]);
}

#[test]
fn a_container_without_the_devices_of_nvidia_fs_is_told_how_to_get_them() {
    let machine = bare_metal();
    fs::remove_dir_all(machine.root.path().join("dev")).unwrap();
    let checks = machine.checks();
    says(&checks, "nvidia-fs", Status::Blocks, &["no /dev/nvidia-fs*", "NVIDIA_GDS=enabled"]);
    says(&checks, "verdict", Status::Blocks, &["compatibility mode"]);
}

#[test]
fn a_geforce_is_told_to_have_no_direct_way() {
    let checks = bare_metal()
        .file("proc/driver/nvidia/gpus/0000:1a:00.0/information", "Model: NVIDIA GeForce RTX 4090\n")
        .checks();
    says(&checks, "GPU", Status::Blocks, &["GeForce RTX 4090 at 0000:1a:00.0", "through host memory"]);
    says(&checks, "verdict", Status::Blocks, &["direct: no, because a GeForce"]);
}

#[test]
fn an_ssd_with_multipath_is_found_through_its_controller() {
    let subsystem = "sys/devices/virtual/nvme-subsystem/nvme-subsys0";
    let controller = format!("{SWITCH}/0000:19:02.0/0000:1b:00.0/nvme/nvme0");
    let checks = bare_metal()
        .block(&format!("{subsystem}/nvme0n2"), "259:7")
        .link(&format!("{subsystem}/nvme0"), &controller)
        .mount("259:7", "xfs", "/dev/nvme0n2", "rw")
        .udev("259:7")
        .checks();
    says(&checks, "SSD", Status::Ok, &["nvme0n2 at 0000:1b:00.0"]);
    says(&checks, "distance", Status::Ok, &["nvme0n2 and GPU 0000:1a:00.0: behind the same PCIe switch"]);
}

#[test]
fn the_mode_of_a_journal_is_told_also_where_the_mount_table_hides_it() {
    let options = |text: &str| {
        bare_metal()
            .mount("259:1", "ext4", "/dev/nvme0n1p1", "rw")
            .file("proc/fs/ext4/nvme0n1p1/options", text)
            .checks()
    };
    says(
        &options("rw\ndata=ordered\n"),
        "mount",
        Status::Unknown,
        &["ordered is the default", "data=ordered"],
    );
    says(&options("rw\ndata=writeback\n"), "mount", Status::Blocks, &["data=ordered only"]);
    says(&options("rw\ncommit=5\n"), "mount", Status::Unknown, &["tune2fs -O has_journal /dev/nvme0n1p1"]);
}

#[test]
fn an_empty_tree_is_told_as_unknown() {
    let root = tempfile::tempdir().unwrap();
    let tried = Tried { io_uring: Err(libc::ENOSYS), cufile: Err("not there".to_owned()), gpus: 1 };
    let facts = Facts::read(&Tree::new(root.path()), &[PathBuf::from("/mnt/ssd")], tried);
    let mut checks = direct(&facts);
    checks.extend(facts.places.iter().flat_map(|place| disks(&facts, place)));
    checks.extend(host(&facts));
    says(&checks, "mount", Status::Unknown, &["/mnt/ssd: not in the mount table"]);
    says(&checks, "memory", Status::Ok, &["unknown, unknown available"]);
    says(&checks, "NVIDIA driver", Status::Blocks, &["not loaded"]);
}

#[test]
fn what_a_control_group_leaves_is_what_is_available() {
    let checks = bare_metal()
        .file("proc/self/cgroup", "0::/job\n")
        .file(
            "proc/self/mountinfo",
            "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        )
        .file("sys/fs/cgroup/job/memory.max", "314572800\n")
        .file("sys/fs/cgroup/job/memory.current", "209715200\n")
        .file("sys/fs/cgroup/job/memory.stat", "inactive_file 104857600\n")
        .checks();
    says(
        &checks,
        "memory",
        Status::Ok,
        &["1.0 GiB, 200.0 MiB available", "limit of 300.0 MiB", "use 200.0 MiB"],
    );
}

#[test]
fn the_json_has_the_same_findings_as_the_page() {
    for checks in [bare_metal().checks(), virtual_machine().checks(), raid().checks()] {
        let page = page::text(&checks);
        // The page breaks lines; here its words are joined again.
        let words = page.split_whitespace().collect::<Vec<_>>().join(" ");
        for check in &checks {
            let json = serde_json::to_value(check).unwrap();
            let keys: Vec<_> = json.as_object().unwrap().keys().collect();
            assert_eq!(keys, ["advice", "found", "name", "status"]);
            let (status, name) = (json["status"].as_str().unwrap(), json["name"].as_str().unwrap());
            assert!(
                words.contains(&format!("{status} {name} {}", json["found"].as_str().unwrap())),
                "{page}"
            );
            if let Some(advice) = json["advice"].as_str() {
                assert!(words.contains(&format!("-> {advice}")), "{advice}: {page}");
            }
        }
        assert_eq!(page.lines().filter(|line| !line.starts_with(' ')).count(), checks.len());
        assert!(page.lines().all(|line| line.chars().count() <= 100), "{page}");
    }
}

#[test]
fn every_finding_that_is_not_good_says_what_to_do() {
    for machine in [virtual_machine(), raid(), Machine::new()] {
        for check in machine.checks() {
            let told = check.advice.is_some() || check.name == "verdict";
            assert!(check.status == Status::Ok || told, "{check:?}");
        }
    }
}

#[test]
fn paths_of_a_tree_do_not_leave_it() {
    let root = tempfile::tempdir().unwrap();
    symlink("/", root.path().join("out")).unwrap();
    assert_eq!(Tree::new(root.path()).real("/out"), None);
    assert_eq!(Tree::new(Path::new("/")).real("/proc/../proc").as_deref(), Some("/proc"));
}
