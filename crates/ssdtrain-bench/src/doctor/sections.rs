//! What a bug report needs to know of a machine, section by section.

use std::env;
use std::fmt;
use std::num::NonZero;
use std::path::Path;
use std::thread;

use serde::Serialize;

use super::facts::{Driver, Facts, Gpu, NvidiaFs};
use super::place::{Disk, DiskKind, Mount, Place};
use super::redact::{is_plain_device, shown_options, spill_directory};
use super::tree::Tree;
use crate::common::size;

/// Variables that change what training does; their values are shown unless they are paths.
const VARIABLES: &[&str] = &[
    "SSDTRAIN",
    "SSDTRAIN_MALLOC_HOOK",
    "SSDTRAIN_MALLOC_HOOK_REPORT",
    "LIBTORCH",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "TMPDIR",
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "MKL_NUM_THREADS",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "MALLOC_ARENA_MAX",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_GDS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
];
/// Other variables that begin so are told by name.
const FAMILIES: &[&str] = &["SSDTRAIN", "CUFILE"];
/// Features of CPUs that decide which kernels libtorch runs.
const CPU_FEATURES: &[&str] =
    &["avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve", "sve2", "bf16"];

/// Facts about one subject.
#[derive(Debug)]
pub(super) struct Section {
    pub(super) title: &'static str,
    pub(super) facts: Vec<(String, Value)>,
}

/// A fact: for people as text, for programs as a number where it is one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(super) enum Value {
    Text(String),
    Bytes(u64),
    Count(u64),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Text(text) => f.write_str(text),
            Value::Bytes(bytes) => f.write_str(&size::format(*bytes)),
            Value::Count(count) => write!(f, "{count}"),
        }
    }
}

impl Section {
    fn new(title: &'static str) -> Section {
        Section { title, facts: Vec::new() }
    }

    fn text(mut self, name: impl Into<String>, text: impl Into<String>) -> Section {
        self.facts.push((name.into(), Value::Text(text.into())));
        self
    }

    /// Adds a fact if it is known.
    fn maybe(mut self, name: impl Into<String>, value: Option<Value>) -> Section {
        self.facts.extend(value.map(|value| (name.into(), value)));
        self
    }
}

/// All sections. `libtorch` is the version that runs.
pub(super) fn sections(tree: &Tree, facts: &Facts, libtorch: &str) -> Vec<Section> {
    vec![
        versions(libtorch),
        system(tree, facts),
        memory(facts),
        limits(tree, facts),
        gpus(facts),
        spill_directories(tree, facts),
        environment(
            env::vars_os()
                .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()))),
        ),
    ]
}

fn versions(libtorch: &str) -> Section {
    let build = if cfg!(debug_assertions) { "debug" } else { "release" };
    Section::new("versions")
        .text("ssdtrain", env!("CARGO_PKG_VERSION"))
        .text("commit", env!("SSDTRAIN_COMMIT"))
        .text("build", format!("{build}, {}", env::consts::ARCH))
        .text("libtorch", libtorch)
        .text("built for libtorch", ssdtrain_libtorch::VERSION)
}

fn system(tree: &Tree, facts: &Facts) -> Section {
    let release = tree.value("/etc/os-release", "PRETTY_NAME=").map(|name| name.trim_matches('"').to_owned());
    let cpu = |name: &str| {
        let value = tree.value("/proc/cpuinfo", name)?;
        Some(value.trim_start_matches([':', ' ', '\t']).to_owned())
    };
    let flags = cpu("flags").or_else(|| cpu("Features")).unwrap_or_default();
    let flags: Vec<_> =
        CPU_FEATURES.iter().copied().filter(|name| flags.split(' ').any(|flag| flag == *name)).collect();
    let cores = thread::available_parallelism().map_or(1, NonZero::get) as u64;
    let root = Place::read(tree, Path::new("/")).mount.map(|mount| Value::Text(mount.kind));
    Section::new("system")
        .maybe("system", release.map(Value::Text))
        .text("Linux", &facts.release)
        .maybe("CPU", cpu("model name").map(Value::Text))
        .maybe("CPU features", Some(flags.join(" ")).filter(|flags| !flags.is_empty()).map(Value::Text))
        .maybe("cores of the machine", tree.text("/sys/devices/system/cpu/online").map(Value::Text))
        .maybe("cores for this process", Some(Value::Count(cores)))
        .maybe("threads that compute", u64::try_from(tch::get_num_threads()).ok().map(Value::Count))
        .maybe("NUMA nodes", Some(Value::Count(facts.numa_nodes.len() as u64)))
        .maybe("file system of /", root)
        .text(
            "io_uring",
            facts
                .tried
                .io_uring
                .map_or_else(|code| format!("refused, error {code}"), |()| "allowed".to_owned()),
        )
        .text(
            "seccomp",
            facts.process.seccomp.map_or("unknown", |mode| if mode == 0 { "no filter" } else { "a filter" }),
        )
}

fn memory(facts: &Facts) -> Section {
    let memory = &facts.memory;
    let mut section = Section::new("memory")
        .maybe("of the machine", memory.total.map(Value::Bytes))
        .maybe("available to this process", memory.available.map(Value::Bytes));
    for (index, group) in memory.groups.iter().enumerate() {
        let name = |what: &str| format!("control group {}, {what}", index + 1);
        section = section
            .maybe(name("limit"), Some(Value::Bytes(group.limit)))
            .maybe(name("used"), Some(Value::Bytes(group.used)))
            .maybe(name("of that cached files"), Some(Value::Bytes(group.reclaimable)));
    }
    if memory.groups.is_empty() {
        section = section.text("control groups", "no limit");
    }
    section.maybe("transparent huge pages", memory.transparent.clone().map(Value::Text))
}

/// Limits of the process: the soft one, and the one that it may be raised to.
fn limits(tree: &Tree, facts: &Facts) -> Section {
    let limit = |name: &str| {
        let text = tree.value("/proc/self/limits", name)?;
        let mut words = text.split_whitespace();
        Some(Value::Text(format!("{}, at most {}", words.next()?, words.next()?)))
    };
    Section::new("limits")
        .maybe("RLIMIT_MEMLOCK", limit("Max locked memory"))
        .maybe("locked", facts.process.locked.map(Value::Bytes))
        .maybe("RLIMIT_NOFILE", limit("Max open files"))
        .maybe("RLIMIT_AS", limit("Max address space"))
}

fn gpus(facts: &Facts) -> Section {
    let mut section = Section::new("GPUs").maybe("for CUDA", Some(Value::Count(facts.tried.gpus as u64)));
    for (index, Gpu { device, model }) in facts.gpus.iter().enumerate() {
        let model = model.as_deref().unwrap_or("NVIDIA");
        section = section.text(format!("GPU {}", index + 1), format!("{model} at {device}"));
    }
    if let Some(Driver { version, open, .. }) = &facts.driver {
        section =
            section.text("driver", format!("{version}, {} modules", if *open { "open" } else { "closed" }));
    }
    let cufile = match &facts.tried.cufile {
        Ok(library) => library.version.clone().unwrap_or_else(|| "of unknown version".to_owned()),
        Err(error) => format!("none: {error}"),
    };
    let module = facts.nvidia_fs.as_ref();
    let module = module
        .map(|NvidiaFs { version, .. }| version.clone().unwrap_or_else(|| "of unknown version".to_owned()));
    section.text("cuFile", cufile).maybe("nvidia-fs", module.map(Value::Text))
}

fn spill_directories(tree: &Tree, facts: &Facts) -> Section {
    let mut section = Section::new("spill directories");
    for (index, place) in facts.places.iter().enumerate() {
        let directory = spill_directory(index, facts.places.len());
        if let Some(Mount { kind, options, .. }) = &place.mount {
            section = section.text(&directory, format!("{kind} ({})", shown_options(options)));
        }
        let through = place.stacked.as_ref().map(|device| format!(" through {}", shown_device(device)));
        for disk in &place.disks {
            let name = format!("{directory}, disk {}", shown_device(&disk.name));
            section = section.text(name, told(tree, disk) + through.as_deref().unwrap_or_default());
        }
    }
    section
}

/// What sysfs says of a disk, without its serial number.
fn told(tree: &Tree, disk: &Disk) -> String {
    let Disk { name, kind, device } = disk;
    let kind = match kind {
        DiskKind::Nvme => "NVMe",
        DiskKind::Virtio => "virtio",
        DiskKind::Other => "neither NVMe nor virtio",
    };
    let text =
        |file: &str| tree.text(&format!("/sys/class/block/{name}/{file}")).filter(|text| !text.is_empty());
    let bytes = text("size")
        .and_then(|sectors| sectors.parse::<u64>().ok())
        .map(|sectors| size::format(sectors * 512));
    let named = |what: &str, value: Option<String>| value.map(|value| format!("{what} {value}"));
    let facts = [
        Some(kind.to_owned()),
        text("device/model"),
        named("firmware", text("device/firmware_rev")),
        bytes,
        device.as_ref().map(|device| format!("at {device}")),
        named("scheduler", text("queue/scheduler")),
        named("blocks of", text("queue/logical_block_size")),
        text("queue/max_sectors_kb").map(|most| format!("at most {most} KiB at once")),
        named("queue of", text("queue/nr_requests")),
        text("queue/write_cache"),
    ];
    facts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn shown_device(name: &str) -> &str {
    if is_plain_device(name) { name } else { "<device>" }
}

/// The variables that matter. A value that is not text, or could be a path, is not shown.
fn environment(variables: impl Iterator<Item = (String, Option<String>)>) -> Section {
    let is_shown = |value: &str| {
        value.len() <= 100 && value.chars().all(|c| c.is_ascii_alphanumeric() || "_.,:;=+-".contains(c))
    };
    let mut found: Vec<(String, String)> = variables
        .filter(|(name, _)| {
            VARIABLES.contains(&name.as_str()) || FAMILIES.iter().any(|family| name.starts_with(family))
        })
        .map(|(name, value)| {
            let value = value.filter(|value| VARIABLES.contains(&name.as_str()) && is_shown(value));
            (name, value.unwrap_or_else(|| "set, value not shown".to_owned()))
        })
        .collect();
    found.sort_unstable();
    let section = Section::new("environment");
    if found.is_empty() {
        return section.text("variables", "none that matter");
    }
    found.into_iter().fold(section, |section, (name, value)| section.text(name, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_that_matter_are_told_and_values_that_may_be_paths_are_not() {
        let variables = [
            ("OMP_NUM_THREADS", "4"),
            ("SSDTRAIN", "keep"),
            ("SSDTRAIN_ELSE", "secret"),
            ("TMPDIR", "/home/x"),
            ("LD_PRELOAD", "libx.so /y"),
            ("AWS_SECRET", "secret"),
        ];
        let variables = variables.map(|(name, value)| (name.to_owned(), Some(value.to_owned())));
        let section = environment(variables.into_iter());
        let hidden = Value::Text("set, value not shown".to_owned());
        let shown = |text: &str| Value::Text(text.to_owned());
        let expected = [
            ("LD_PRELOAD", hidden.clone()),
            ("OMP_NUM_THREADS", shown("4")),
            ("SSDTRAIN", shown("keep")),
            ("SSDTRAIN_ELSE", hidden.clone()),
            ("TMPDIR", hidden),
        ];
        assert_eq!(section.facts, expected.map(|(name, value)| (name.to_owned(), value)));
    }
}
