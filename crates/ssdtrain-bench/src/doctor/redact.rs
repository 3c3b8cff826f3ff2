//! Takes out of texts what is the user's own: paths, names of people and hosts, and UUIDs.

use std::collections::HashSet;
use std::env;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::facts::Facts;
use super::place::{Mount, Place};
use super::tree::Tree;
use crate::common::spill::RUNS;

/// Accounts and hosts that many machines have, which tell nothing of a person.
const COMMON: &[&str] = &[
    "root",
    "user",
    "admin",
    "nobody",
    "ubuntu",
    "debian",
    "fedora",
    "centos",
    "ec2-user",
    "vagrant",
    "runner",
    "jovyan",
    "docker",
    "nvidia",
    "localhost",
    "localdomain",
    "none",
];
/// Options of mounts that tell nothing of the user.
const OPTIONS: &[&str] = &[
    "rw",
    "ro",
    "relatime",
    "noatime",
    "nodiratime",
    "strictatime",
    "lazytime",
    "sync",
    "dax",
    "discard",
    "nodiscard",
    "barrier",
    "nobarrier",
    "data",
    "commit",
    "errors",
    "delalloc",
    "nodelalloc",
    "stripe",
    "inode64",
    "attr2",
    "noquota",
    "sunit",
    "swidth",
    "logbufs",
    "logbsize",
    "allocsize",
    "compress",
    "size",
    "nosuid",
    "nodev",
    "noexec",
];
/// The files of the kernel and of cuFile have the same names everywhere.
const PUBLIC: &[&str] = &["/proc", "/sys", "/run/udev/data", "/etc/cufile.json"];
/// The characters that end a path in our messages and in those of the system.
const ENDS: &str = "\"'`()<>[]{},;=";

/// Replaces what it knows to be the user's, and whatever looks like a path.
#[derive(Debug, Default)]
pub(super) struct Redactor {
    /// Texts in lower case, and what to write in their place.
    known: Vec<(String, String)>,
}

impl Redactor {
    /// Knows the spill directories, as given and as resolved, and the people, hosts and directories of this machine.
    pub(super) fn new(tree: &Tree, given: &[PathBuf], facts: &Facts) -> Redactor {
        let mut redactor = Redactor::default();
        redactor.know_people(tree);
        redactor.know_paths(tree);
        for (index, (directory, place)) in given.iter().zip(&facts.places).enumerate() {
            redactor.know_place(place);
            let name = spill_directory(index, given.len());
            // The directory that is taken by default has the same name everywhere.
            if directory != Path::new(RUNS) {
                redactor.hide_path(directory, &name);
            }
            redactor.hide_path(&place.directory, &name);
        }
        // What contains other texts goes first, and of equal texts what was told last.
        redactor.known.reverse();
        redactor.known.sort_by_key(|(text, _)| std::cmp::Reverse(text.len()));
        let mut texts = HashSet::new();
        redactor.known.retain(|(text, _)| texts.insert(text.clone()));
        redactor
    }

    /// The text without what is the user's.
    pub(super) fn text(&self, text: &str) -> String {
        let known = self.known.iter().fold(text.to_owned(), |text, (hidden, by)| replaced(&text, hidden, by));
        without_paths(&without_uuids(&known))
    }

    /// Replaces in all texts of a JSON value.
    pub(super) fn value(&self, value: &mut Value) {
        match value {
            Value::String(text) => *text = self.text(text),
            Value::Array(values) => values.iter_mut().for_each(|value| self.value(value)),
            Value::Object(fields) => fields.values_mut().for_each(|value| self.value(value)),
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    fn know_people(&mut self, tree: &Tree) {
        for name in ["USER", "LOGNAME", "USERNAME", "SUDO_USER"] {
            self.hide_name(&env::var(name).unwrap_or_default(), "<user>");
        }
        let id = tree.value("/proc/self/status", "Uid:");
        let id = id.as_deref().and_then(|ids| ids.split_whitespace().next());
        let accounts = tree.text("/etc/passwd").unwrap_or_default();
        for account in accounts.lines().map(|line| line.split(':').collect::<Vec<_>>()) {
            if let [name, _, number, _, full_name, home, ..] = account[..]
                && Some(number) == id
            {
                self.hide_name(name, "<user>");
                full_name.split(',').for_each(|name| self.hide_name(name, "<user>"));
                self.hide_path(Path::new(home), "<home>");
            }
        }
        let told = tree.text("/proc/sys/kernel/hostname");
        let hosts = told.into_iter().chain(tree.text("/etc/hostname")).chain(env::var("HOSTNAME"));
        for host in hosts {
            self.hide_name(&host, "<host>");
            if let Some((name, domain)) = host.split_once('.') {
                self.hide_name(name, "<host>");
                self.hide_name(domain, "<domain>");
            }
        }
    }

    /// Directories whose names may have spaces, so that they cannot be told by their form.
    fn know_paths(&mut self, tree: &Tree) {
        let table = tree.text("/proc/self/mountinfo").unwrap_or_default();
        table
            .lines()
            .filter_map(Mount::parse)
            .for_each(|mount| self.hide_path(&mount.point, "<mount point>"));
        let variables = env::vars_os().flat_map(|(_, value)| env::split_paths(&value).collect::<Vec<_>>());
        variables.filter(|path| path.is_absolute()).for_each(|path| self.hide_path(&path, "<path>"));
        let own = env::current_exe().ok().and_then(|file| Some(file.parent()?.to_owned()));
        own.into_iter().chain(env::current_dir()).for_each(|path| self.hide_path(&path, "<path>"));
        if let Some(home) = env::home_dir() {
            self.hide_name(&home.file_name().unwrap_or_default().to_string_lossy(), "<user>");
            self.hide_path(&home, "<home>");
        }
    }

    fn know_place(&mut self, place: &Place) {
        let names = place.disks.iter().map(|disk| &disk.name);
        let names = names.chain(&place.stacked).chain(&place.device);
        let mut devices: Vec<&str> = names.map(String::as_str).collect();
        if let Some(Mount { source, kind, options, point, .. }) = &place.mount {
            self.hide_path(point, "<mount point>");
            self.known.push((options.join(",").to_lowercase(), shown_options(options)));
            devices.extend(Some(source.as_str()).filter(|source| *source != kind));
        }
        for device in devices.into_iter().filter(|device| !is_plain_device(device)) {
            self.hide_name(device, "<device>");
        }
    }

    fn hide_name(&mut self, name: &str, by: &str) {
        let name = name.trim().to_lowercase();
        // A single letter tells nothing, and is in every text.
        if name.len() > 1 && !COMMON.contains(&name.as_str()) {
            self.known.push((name, by.to_owned()));
        }
    }

    fn hide_path(&mut self, path: &Path, by: &str) {
        let text = path.to_string_lossy().trim_end_matches('/').to_lowercase();
        if text.len() > 1 && text != "/dev" && !is_public(&text) {
            self.known.push((text, by.to_owned()));
        }
    }
}

/// What is written for spill directory number `index`, from 0, of `all`.
pub(super) fn spill_directory(index: usize, all: usize) -> String {
    if all == 1 { "<spill directory>".to_owned() } else { format!("<spill directory {}>", index + 1) }
}

/// The options of a mount that tell nothing of the user.
pub(super) fn shown_options(options: &[String]) -> String {
    let name = |option: &&String| option.split('=').next().is_some_and(|name| OPTIONS.contains(&name));
    let shown: Vec<&str> =
        options.iter().filter(name).map(String::as_str).filter(|option| !option.contains('/')).collect();
    shown.join(",") + if shown.len() < options.len() { ",..." } else { "" }
}

/// Whether a device has one of the kernel's own names, such as `/dev/nvme0n1p1` or `md0`.
pub(super) fn is_plain_device(device: &str) -> bool {
    const FAMILIES: &[&str] =
        &["nvme", "sd", "vd", "xvd", "md", "dm-", "mmcblk", "loop", "pmem", "zram", "ram"];
    let name = device.strip_prefix("/dev/").unwrap_or(device);
    let rest = FAMILIES.iter().find_map(|family| name.strip_prefix(family)).unwrap_or_default();
    // Letters count disks and tell namespaces and partitions: `sda1`, `nvme0c0n1p1`.
    let is_letter = |letter: char| letter.is_ascii_lowercase();
    let most =
        if name.starts_with("sd") || name.starts_with("vd") || name.starts_with("xvd") { 2 } else { 1 };
    !rest.is_empty()
        && rest.chars().all(|c| c.is_ascii_digit() || is_letter(c))
        && rest.split(|c: char| c.is_ascii_digit()).all(|letters| letters.len() <= most)
}

/// Replaces a text, given in lower case, where no letter or digit is right before or after it.
fn replaced(text: &str, hidden: &str, by: &str) -> String {
    let lower = text.to_lowercase();
    if lower.len() != text.len() || hidden.is_empty() {
        // Some letters have other lengths in lower case: only what is written alike is found.
        return text.replace(hidden, by);
    }
    let is_word = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
    let (mut out, mut done, mut from) = (String::new(), 0, 0);
    while let Some(found) = lower[from..].find(hidden) {
        let (start, end) = (from + found, from + found + hidden.len());
        if is_word(lower[..start].chars().next_back()) || is_word(lower[end..].chars().next()) {
            from = start + lower[start..].chars().next().map_or(1, char::len_utf8);
            continue;
        }
        out.push_str(&text[done..start]);
        out.push_str(by);
        (done, from) = (end, end);
    }
    out + &text[done..]
}

fn without_uuids(text: &str) -> String {
    const LENGTH: usize = 36;
    let is_uuid = |piece: &[u8]| {
        piece.iter().enumerate().all(|(at, byte)| match at {
            8 | 13 | 18 | 23 => *byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        })
    };
    let (mut out, mut rest) = (String::new(), text);
    while let Some(start) = rest.as_bytes().windows(LENGTH).position(is_uuid) {
        out.push_str(&rest[..start]);
        out.push_str("<uuid>");
        rest = &rest[start + LENGTH..];
    }
    out + rest
}

/// Replaces whatever has the form of a path, absolute or relative, except for those that are the same everywhere.
fn without_paths(text: &str) -> String {
    let mut out = String::new();
    for piece in text.split_inclusive(|c: char| c.is_whitespace() || ENDS.contains(c)) {
        let end = piece.chars().next_back().filter(|c| c.is_whitespace() || ENDS.contains(*c));
        let piece = &piece[..piece.len() - end.map_or(0, char::len_utf8)];
        // What follows a path in a sentence.
        let path = piece.trim_end_matches([':', '.', '?', '!']);
        if path.contains('/') && !is_public(path) {
            // It may go on from something that was replaced before.
            if !(out.ends_with('>') && path.starts_with('/')) {
                out.push_str("<path>");
            }
            let library =
                path.rsplit('/').next().filter(|name| name.starts_with("lib") && name.contains(".so"));
            library.iter().for_each(|name| out.extend(["/", name]));
            out.push_str(&piece[path.len()..]);
        } else {
            out.push_str(piece);
        }
        out.extend(end);
    }
    out
}

/// Whether a path is the same on many machines, or no path at all, such as the rate `GiB/s`.
fn is_public(path: &str) -> bool {
    let below = |folder: &&str| {
        path.strip_prefix(*folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    matches!(path, "/" | "GNU/Linux")
        || PUBLIC.iter().any(below)
        || path.starts_with("/dev/nvidia")
        || (path.starts_with("/dev/") && is_plain_device(path))
        || path
            .strip_suffix("/s")
            .is_some_and(|unit| unit.len() <= 3 && unit.chars().all(char::is_alphabetic))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redactor(known: &[(&str, &str)]) -> Redactor {
        let known = known.iter().map(|(text, by)| ((*text).to_owned(), (*by).to_owned())).collect();
        Redactor { known }
    }

    #[test]
    fn what_is_known_is_replaced_as_a_whole_word_in_either_case() {
        let redactor = redactor(&[("/mnt/my ssd", "<spill directory>"), ("alice", "<user>")]);
        for (text, expected) in [
            ("/mnt/my ssd: ext4", "<spill directory>: ext4"),
            ("of Alice, by alice-2", "of <user>, by <user>-2"),
            ("/mnt/my ssd/.file: x", "<spill directory>: x"),
            ("malice and alices", "malice and alices"),
            ("Größe für alice", "Größe für <user>"),
        ] {
            assert_eq!(redactor.text(text), expected);
        }
    }

    #[test]
    fn whatever_looks_like_a_path_is_replaced_unless_all_machines_have_it() {
        for (text, expected) in [
            ("cannot open /home/x/y: no such file", "cannot open <path>: no such file"),
            ("`sudo umount /srv/a` and runs/b.", "`sudo umount <path>` and <path>."),
            ("(rw,lowerdir=/a:/b,upperdir=~/c)", "(rw,lowerdir=<path>,upperdir=<path>)"),
            ("1.15, /opt/x/libcufile.so.0", "1.15, <path>/libcufile.so.0"),
            ("server:/export and //host/share", "<path> and <path>"),
            ("/dev/mapper/vg-x, /dev/disk/by-id/y", "<path>, <path>"),
        ] {
            assert_eq!(redactor(&[]).text(text), expected);
        }
        for text in [
            "12.5 GiB/s at PCIe 32.0 GT/s x4",
            "ext4 on /dev/nvme0n1p1, /dev/sda1, /dev/md0 and /dev/dm-1",
            "/proc/self/mountinfo, /sys/kernel/mm, /run/udev/data/b254:0, /etc/cufile.json, /dev/nvidia-fs*",
            "0000:1a:00.0, 580.95.05",
            "Debian GNU/Linux 12, ext4 at / (rw)",
        ] {
            assert_eq!(redactor(&[]).text(text), text);
        }
    }

    #[test]
    fn uuids_are_replaced() {
        let text = "GPU-8c3d1f5e-0a1b-2c3d-4e5f-60718293a4b5,1";
        assert_eq!(redactor(&[]).text(text), "GPU-<uuid>,1");
    }

    #[test]
    fn options_of_a_mount_are_shown_by_their_names() {
        let options = ["rw", "data=ordered", "username=alice", "size=/x"].map(str::to_owned);
        assert_eq!(shown_options(&options), "rw,data=ordered,...");
    }

    #[test]
    fn devices_with_names_of_their_own_are_told_from_the_kernels() {
        for plain in ["/dev/nvme0n1p1", "nvme0c0n1", "sda", "/dev/sdab12", "vda", "md127", "dm-0", "loop3"] {
            assert!(is_plain_device(plain), "{plain}");
        }
        for own in ["/dev/mapper/home", "md_alice", "sdalice", "nvmealice", "tank", "server:/x", "md/alice"] {
            assert!(!is_plain_device(own), "{own}");
        }
    }
}
