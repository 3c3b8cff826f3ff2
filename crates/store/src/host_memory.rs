//! Memory of the host that is available at present.

use std::path::Path;

use super::control_groups::{self, GroupMemory, field};

/// The host's memory as a process sees it that may be in control groups, such as those of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostMemory {
    /// Bytes that the kernel calls available on the machine; `None` if it does not say.
    pub machine: Option<u64>,
    /// The control groups with a limit that the process is in, each after those that it contains.
    pub groups: Vec<GroupMemory>,
}

impl HostMemory {
    /// The memory of this process at present.
    pub fn now() -> HostMemory {
        HostMemory::below(Path::new("/"))
    }

    /// The same, of the process whose machine has its files below `root`.
    pub fn below(root: &Path) -> HostMemory {
        HostMemory {
            machine: field(&root.join("proc/meminfo"), "MemAvailable:").map(|kib| kib << 10),
            groups: control_groups::limited(root),
        }
    }

    /// Bytes that are available: what the kernel calls so, but no more than any of the control groups leaves. `None` if
    /// nothing is known.
    pub fn available(&self) -> Option<u64> {
        self.groups.iter().map(GroupMemory::left).chain(self.machine).min()
    }

    /// The group that leaves the least, if that is less than the machine has available.
    pub fn tightest(&self) -> Option<&GroupMemory> {
        let group = self.groups.iter().min_by_key(|group| group.left())?;
        self.machine.is_none_or(|machine| group.left() < machine).then_some(group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_that_machine_and_groups_leave_is_available() {
        let group = |limit| GroupMemory { limit, used: 50, reclaimable: 20 };
        let memory = |machine, limits: &[u64]| HostMemory {
            machine,
            groups: limits.iter().map(|limit| group(*limit)).collect(),
        };
        assert_eq!(HostMemory::default().available(), None);
        assert_eq!(memory(Some(100), &[]).available(), Some(100));
        let tight = memory(Some(100), &[200, 90]);
        assert_eq!((tight.available(), tight.tightest()), (Some(60), Some(&group(90))));
        let loose = memory(Some(40), &[200, 90]);
        assert_eq!((loose.available(), loose.tightest()), (Some(40), None));
        assert_eq!(memory(None, &[20]).available(), Some(0), "a full group leaves nothing");
    }
}
