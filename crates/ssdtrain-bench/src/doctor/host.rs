//! What the facts mean for the path through host memory, which is always available.

use std::io;

use super::facts::{Facts, Memory};
use super::page::{Check, Status};
use crate::common::size;

/// The setting of transparent huge pages.
const HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// All checks of the host.
pub(super) fn host(facts: &Facts) -> Vec<Check> {
    vec![
        io_uring(facts),
        seccomp(facts),
        memory(&facts.memory),
        locked_memory(facts),
        huge_pages(&facts.memory),
        numa(facts),
    ]
}

fn io_uring(facts: &Facts) -> Check {
    let (name, kernel) = ("io_uring", &facts.release);
    let Err(code) = facts.tried.io_uring else {
        return Check::ok(name, format!("allowed by Linux {kernel}"));
    };
    let advice = match (code, facts.process.io_uring_disabled) {
        (_, Some(disabled @ 1..)) => {
            format!("threads are used instead; `sudo sysctl kernel.io_uring_disabled=0` allows it (now {disabled})")
        }
        (libc::ENOMEM, _) => format!(
            "threads are used instead; its ring counts as locked memory on this kernel: raise that limit (`ulimit -l`, now {})",
            facts.lock_limit()
        ),
        (libc::EMFILE | libc::ENFILE, _) => {
            "threads are used instead; raise the limit of open files (`ulimit -n`)".to_owned()
        }
        (libc::ENOSYS, _) if facts.process.seccomp != Some(2) => {
            "threads are used instead; a kernel from 5.6 on has it".to_owned()
        }
        _ => "threads are used instead; in a container `docker run --security-opt seccomp=unconfined` allows it"
            .to_owned(),
    };
    let error = io::Error::from_raw_os_error(code);
    Check::ok(name, format!("refused by Linux {kernel}: {error}")).but(Status::Warn, advice)
}

fn seccomp(facts: &Facts) -> Check {
    let process = &facts.process;
    let mode = match process.seccomp {
        None => "not told",
        Some(0) => "no filter of system calls",
        Some(1) => "strict",
        Some(_) => "a filter of system calls",
    };
    let more = if process.no_new_privs { ", no new privileges" } else { "" };
    let check = Check::ok("seccomp", format!("{mode}{more}"));
    if process.seccomp == Some(2)
        && process.io_uring_disabled.unwrap_or(0) == 0
        && facts.tried.io_uring.is_err_and(|code| !is_of_a_limit(code))
    {
        return check.but(
            Status::Warn,
            "it refuses io_uring, and threads cost more of the CPU; `docker run --security-opt seccomp=PROFILE.json` with a \
             profile that allows io_uring_setup, io_uring_enter and io_uring_register",
        );
    }
    check
}

/// Whether a limit of resources has caused this error.
fn is_of_a_limit(code: i32) -> bool {
    matches!(code, libc::ENOMEM | libc::EMFILE | libc::ENFILE)
}

fn memory(memory: &Memory) -> Check {
    let shown = |bytes: Option<u64>| bytes.map_or_else(|| "unknown".to_owned(), size::format);
    let group = memory.tightest.map_or_else(String::new, |group| {
        let (limit, used, cached) = (group.limit, group.used, group.reclaimable);
        let [limit, used, cached] = [limit, used, cached].map(size::format);
        format!(": this process's control groups have a limit of {limit} and use {used}, {cached} of which are cached files")
    });
    Check::ok("memory", format!("{}, {} available{group}", shown(memory.total), shown(memory.available)))
}

fn locked_memory(facts: &Facts) -> Check {
    let limit = facts.lock_limit();
    let locked =
        facts.process.locked.map_or_else(String::new, |bytes| format!(", {} locked", size::format(bytes)));
    let for_what = if facts.has_gpu() {
        "host memory is pinned when training on a GPU"
    } else {
        "training on the CPU locks at most a small ring of io_uring"
    };
    Check::ok("locked memory", format!("limit {limit}{locked}; {for_what}"))
}

fn huge_pages(memory: &Memory) -> Check {
    let chosen = memory.transparent.as_deref().unwrap_or("unknown");
    let aside = match memory.huge_pages {
        Some((count @ 1.., bytes)) => {
            format!(", and {count} of {} set aside, which are not used", size::format(bytes))
        }
        _ => String::new(),
    };
    let check = Check::ok("huge pages", format!("transparent huge pages: {chosen}{aside}"));
    match chosen {
        "always" | "madvise" => check,
        _ => check.but(
            Status::Warn,
            format!(
                "memory in small pages is slower to pin and to move to the disk; `echo madvise | sudo tee {HUGE_PAGES}` \
                 allows large ones"
            ),
        ),
    }
}

fn numa(facts: &Facts) -> Check {
    let name = "NUMA";
    if facts.numa_nodes.len() < 2 {
        return Check::ok(name, "one node");
    }
    let disks = facts.places.iter().flat_map(|place| &place.disks);
    let mut devices: Vec<(String, u32)> = facts
        .gpus
        .iter()
        .filter_map(|gpu| Some((format!("GPU {}", gpu.device.address), gpu.device.numa_node?)))
        .collect();
    devices.extend(disks.filter_map(|disk| Some((disk.name.clone(), disk.device.as_ref()?.numa_node?))));
    devices.dedup();
    let mut by_node: Vec<String> = Vec::new();
    for node in &facts.numa_nodes {
        let there: Vec<_> =
            devices.iter().filter(|(_, at)| at == node).map(|(device, _)| device.as_str()).collect();
        if !there.is_empty() {
            by_node.push(format!("node {node} has {}", there.join(", ")));
        }
    }
    let allowed = facts.process.nodes.as_deref().unwrap_or("unknown");
    let mut found = format!("{} nodes, memory of {allowed} allowed", facts.numa_nodes.len());
    for node in by_node {
        found.push_str("; ");
        found.push_str(&node);
    }
    let check = Check::ok(name, found);
    // The devices that should be near the memory: the GPUs or, without any, the disks.
    let Some((_, wanted)) = devices.first() else { return check };
    if allowed == wanted.to_string() {
        return check;
    }
    check.but(
        Status::Warn,
        format!(
            "memory of another node makes copies slower; a GPU's host pool lies on its node where the kernel allows that, and \
             `numactl --cpunodebind={wanted} --membind={wanted} ssdtrain-bench ...` keeps all of a process to one"
        ),
    )
}
