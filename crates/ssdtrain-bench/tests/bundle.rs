//! `doctor --bundle`: a file for a bug report, with nothing in it that is the user's own.
#![expect(clippy::unwrap_used, reason = "a helper that cannot go on fails its test")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

/// Everything of the made-up user begins with one of these.
const TELLING: &[&str] = &["zaphod", "heartofgold", "beeblebrox", "8c3d1f5e", "S4NZNF0"];
const UUID: &str = "8c3d1f5e-0a1b-2c3d-4e5f-60718293a4b5";

/// The files of a made-up machine, and of a user with telling names.
fn workplace() -> TempDir {
    let root = tempfile::Builder::new().prefix("zaphod-").tempdir().unwrap();
    let directory = root.path().canonicalize().unwrap();
    let spill = directory.join("my heartofgold project");
    fs::create_dir(&spill).unwrap();
    let disk = "sys/devices/pci0000:00/0000:00:02.0/nvme/nvme0/nvme0n1";
    let mount = format!(
        "1 0 8:1 / / rw - ext4 /dev/mapper/zaphod-root rw\n\
         2 1 259:0 / {} rw,noatime - ext4 /dev/disk/by-uuid/{UUID} rw,username=zaphod,data=ordered\n",
        directory.display()
    );
    for (name, text) in [
        ("proc/sys/kernel/hostname", "heartofgold.beeblebrox.example\n"),
        ("proc/sys/kernel/osrelease", "6.8.0-zaphod\n"),
        ("proc/self/status", "Uid:\t1234\t1234\nSeccomp:\t0\n"),
        ("proc/self/mountinfo", &mount),
        ("proc/self/limits", "Max locked memory         8388608              unlimited            bytes\n"),
        ("proc/cpuinfo", "processor : 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 avx512f\n"),
        ("proc/meminfo", "MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n"),
        ("etc/passwd", "zb:x:1234:1234:Zaphod Beeblebrox,,,:/home/zaphod:/bin/sh\n"),
        ("etc/os-release", "PRETTY_NAME=\"Debian 12\"\n"),
        (&format!("{disk}/dev"), "259:0"),
        (&format!("{disk}/size"), "2097152\n"),
        (&format!("{disk}/device/model"), "Some SSD\n"),
        (&format!("{disk}/device/serial"), "S4NZNF0\n"),
    ] {
        let file = directory.join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }
    for link in ["sys/dev/block/259:0", "sys/class/block/nvme0n1"] {
        let link = directory.join(link);
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(directory.join(disk), link).unwrap();
    }
    root
}

fn doctor(place: &Path, more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ssdtrain-bench"))
        .args(["doctor", "--root", "."])
        .args(more)
        .current_dir(place)
        .env("HOME", place)
        .env("USER", "zaphod")
        .env("HOSTNAME", "heartofgold")
        .env("SSDTRAIN", "keep")
        .env("SSDTRAIN_NOTES", "beeblebrox")
        .env("CUDA_VISIBLE_DEVICES", format!("GPU-{UUID}"))
        .env("TMPDIR", place)
        .output()
        .unwrap()
}

const BUNDLE: &[&str] = &["--spill-dir", "my heartofgold project", "--bundle", "report.md"];

/// The bundle, and what was printed of it.
fn bundled(place: &Path, more: &[&str]) -> (String, String) {
    let output = doctor(place, &[BUNDLE, more].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = fs::read_to_string(place.join("report.md")).unwrap();
    (text, String::from_utf8(output.stdout).unwrap())
}

fn data(text: &str) -> Value {
    let json = text.rsplit("```json").next().unwrap().split("```").next().unwrap();
    serde_json::from_str(json).unwrap()
}

#[test]
fn nothing_of_the_users_own_is_in_a_bundle() {
    let place = workplace();
    let (text, _) = bundled(place.path(), &[]);
    let lower = text.to_lowercase();
    for telling in TELLING.iter().map(|text| text.to_lowercase()) {
        assert!(!lower.contains(&telling), "{telling}:\n{text}");
    }
    assert!(!text.contains(&place.path().display().to_string()), "{text}");
    assert!(text.contains("<spill directory>"), "{text}");
}

#[test]
fn a_bundle_has_what_a_report_needs_for_people_and_for_programs() {
    let place = workplace();
    let (text, told) = bundled(place.path(), &[]);
    let data = data(&text);
    let titles: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("## ")).collect();
    let (last, sections) = titles.split_last().unwrap();
    assert_eq!(*last, "the same for programs");
    for title in sections {
        assert!(told.contains(title) && data.get(*title).is_some(), "{title}: {told}");
    }
    assert!(told.contains("report.md") && told.contains("Look it over"), "{told}");
    assert_eq!(data["versions"]["ssdtrain"], env!("CARGO_PKG_VERSION"));
    assert_eq!(data["system"]["CPU features"], "avx2 avx512f");
    assert_eq!(data["memory"]["available to this process"], 512 << 20);
    assert_eq!(data["limits"]["RLIMIT_MEMLOCK"], "8388608, at most unlimited");
    assert_eq!(data["environment"]["SSDTRAIN"], "keep");
    assert_eq!(data["environment"]["CUDA_VISIBLE_DEVICES"], "GPU-<uuid>");
    assert_eq!(data["spill directories"]["<spill directory>"], "ext4 (rw,noatime,data=ordered,...)");
    let disk = data["spill directories"]["<spill directory>, disk nvme0n1"].as_str().unwrap();
    assert!(disk.contains("Some SSD, 1.0 GiB"), "{disk}");
    let doctor = data["doctor"].as_array().unwrap();
    assert!(doctor.iter().any(|check| check["name"] == "verdict"), "{doctor:?}");
    assert!(text.contains("\nCPU: Some CPU\n") && text.contains("verdict "), "{text}");
}

#[test]
fn a_profile_is_added_only_if_it_is_asked_for() {
    let place = workplace();
    fs::write(place.path().join("profile.json"), "{\"of\":\"a model\",\"from\":\"/srv/x\"}\n").unwrap();
    let (text, told) = bundled(place.path(), &["--profile", "profile.json"]);
    assert!(
        text.contains("## profile")
            && text.contains("\"of\":\"a model\"")
            && text.contains("\"from\":\"<path>\""),
        "{text}"
    );
    assert!(told.contains("profile"), "{told}");
}

#[test]
fn what_cannot_be_done_is_refused_before_anything_is_tried() {
    let place = workplace();
    fs::write(place.path().join("there.md"), "mine").unwrap();
    fs::write(place.path().join("text.txt"), "no JSON").unwrap();
    for (more, expected) in [
        (&["--bundle", "there.md"][..], "there.md is there already"),
        (&["--bundle", "no/such/place.md"], "no/such/place.md"),
        (&["--bundle", "new.md", "--profile", "text.txt"], "text.txt is neither a profile"),
        (&["--bundle", "new.md", "--profile", "none.json"], "cannot read none.json"),
        (&["--profile", "text.txt"], "--bundle"),
        (&["--bundle", "new.md", "--json"], "--json"),
    ] {
        let output = doctor(place.path(), more);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains(expected), "{more:?}: {error}");
        assert!(output.stdout.is_empty() && !place.path().join("new.md").exists());
    }
    assert_eq!(fs::read_to_string(place.path().join("there.md")).unwrap(), "mine");
}
