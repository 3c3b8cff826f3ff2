use tempfile::TempDir;

use super::*;

const MIB: u64 = 1 << 20;

/// A made-up machine.
struct Machine(TempDir);

impl Machine {
    /// A process in these groups, with these lines at the end of its mount table.
    fn new(groups: &str, mounts: &[&str]) -> Machine {
        let others = "22 27 0:21 / /proc rw,relatime - proc proc rw\n27 1 254:0 / / rw - ext4 /dev/vda rw\n";
        let machine = Machine(TempDir::new().unwrap());
        machine
            .file("proc/self/cgroup", groups)
            .file("proc/self/mountinfo", &(others.to_owned() + &mounts.join("\n")))
    }

    fn file(self, name: &str, text: &str) -> Machine {
        let file = self.0.path().join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
        self
    }

    /// A group of the second version with these MiB; no limit is 0.
    fn v2(self, folder: &str, [max, high, used, inactive]: [u64; 4]) -> Machine {
        let limit = |mib| if mib == 0 { "max\n".to_owned() } else { format!("{}\n", mib * MIB) };
        self.file(&format!("{folder}/memory.max"), &limit(max))
            .file(&format!("{folder}/memory.high"), &limit(high))
            .file(&format!("{folder}/memory.current"), &format!("{}\n", used * MIB))
            .file(&format!("{folder}/memory.stat"), &format!("anon 1\ninactive_file {}\n", inactive * MIB))
    }

    /// A group of the first version with these MiB; no limit is 0.
    fn v1(self, folder: &str, [own, inherited, used, inactive]: [u64; 4]) -> Machine {
        let limit = |mib| if mib == 0 { 9_223_372_036_854_771_712 } else { mib * MIB };
        let statistics = format!(
            "inactive_file 1\nhierarchical_memory_limit {}\ntotal_inactive_file {}\n",
            limit(inherited),
            inactive * MIB
        );
        self.file(&format!("{folder}/memory.limit_in_bytes"), &format!("{}\n", limit(own)))
            .file(&format!("{folder}/memory.usage_in_bytes"), &format!("{}\n", used * MIB))
            .file(&format!("{folder}/memory.stat"), &statistics)
    }

    /// What each group with a limit leaves, in MiB.
    fn left(&self) -> Vec<u64> {
        limited(self.0.path()).iter().map(|group| group.left() / MIB).collect()
    }
}

const UNIFIED: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate";
const MEMORY: &str = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory";

#[test]
fn without_limits_there_are_no_groups() {
    assert_eq!(Machine(TempDir::new().unwrap()).left(), [0; 0]);
    // The root of the machine has no limits, not even files for them.
    assert_eq!(Machine::new("0::/\n", &[UNIFIED]).left(), [0; 0]);
    assert_eq!(Machine::new("0::/a\n", &[UNIFIED]).v2("sys/fs/cgroup/a", [0, 0, 10, 0]).left(), [0; 0]);
    let machine = Machine::new("4:memory:/a\n", &[MEMORY]).v1("sys/fs/cgroup/memory/a", [0, 0, 10, 0]);
    assert_eq!(machine.left(), [0; 0]);
}

#[test]
fn every_group_that_contains_the_process_counts_with_its_lower_limit() {
    let machine = Machine::new("0::/a/b/c\n", &[UNIFIED])
        .v2("sys/fs/cgroup/a", [500, 0, 450, 150])
        .v2("sys/fs/cgroup/a/b", [0, 0, 100, 0])
        .v2("sys/fs/cgroup/a/b/c", [600, 400, 100, 0])
        .v2("sys/fs/cgroup/a/other", [1, 1, 1, 0]);
    assert_eq!(machine.left(), [300, 200]);
}

#[test]
fn files_that_were_not_read_lately_are_as_good_as_free_and_a_full_group_leaves_nothing() {
    let machine = Machine::new("0::/a/b\n", &[UNIFIED])
        .v2("sys/fs/cgroup/a", [100, 0, 100, 100])
        .v2("sys/fs/cgroup/a/b", [50, 0, 60, 5]);
    assert_eq!(machine.left(), [0, 100]);
}

#[test]
fn a_container_with_a_namespace_of_its_own_sees_its_group_as_the_root() {
    let machine = Machine::new("0::/\n", &[UNIFIED]).v2("sys/fs/cgroup", [600, 0, 300, 100]);
    assert_eq!(machine.left(), [400]);
    // A process in a group that it has made there.
    let machine = Machine::new("0::/worker\n", &[UNIFIED])
        .v2("sys/fs/cgroup", [600, 0, 300, 100])
        .v2("sys/fs/cgroup/worker", [200, 0, 100, 0]);
    assert_eq!(machine.left(), [100, 400]);
}

#[test]
fn a_container_without_one_sees_its_group_at_the_mount_point() {
    const DOCKER: &str = "35 31 0:32 /docker/7 /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory";
    let machine = Machine::new("5:cpu,memory:/docker/7/worker\n3:cpuset:/x\n", &[DOCKER])
        .v1("sys/fs/cgroup/memory", [600, 600, 300, 100])
        .v1("sys/fs/cgroup/memory/worker", [0, 600, 100, 0]);
    // The worker's own limit is that of the container, of which it does not use all itself.
    assert_eq!(machine.left(), [500, 400]);
}

#[test]
fn a_limit_outside_of_the_container_counts_where_the_kernel_tells_it() {
    const POD: &str = "35 31 0:32 /pod/7 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory";
    let machine = Machine::new("5:memory:/pod/7\n", &[POD]).v1("sys/fs/cgroup/memory", [0, 300, 100, 0]);
    assert_eq!(machine.left(), [200]);
}

#[test]
fn where_both_versions_are_mounted_each_is_looked_for_at_its_place() {
    const BESIDE: &str = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw";
    let cpu = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu";
    let groups = "4:memory:/a\n1:cpu:/b\n0::/c\n";
    let machine =
        Machine::new(groups, &[cpu, MEMORY, BESIDE]).v1("sys/fs/cgroup/memory/a", [600, 600, 300, 0]);
    assert_eq!(machine.left(), [300]);
    // The second version may be the one that limits memory.
    let machine =
        Machine::new("1:cpu:/b\n0::/c\n", &[cpu, BESIDE]).v2("sys/fs/cgroup/unified/c", [70, 0, 0, 0]);
    assert_eq!(machine.left(), [70]);
}

#[test]
fn hierarchies_may_be_mounted_elsewhere_and_groups_have_odd_names() {
    let mount = r"35 31 0:32 / /cgroup/my\040memory rw shared:9 - cgroup none rw,cpu,memory";
    let machine = Machine::new("4:cpu,memory:/a:b/c\n", &[mount]).v1("cgroup/my memory/a:b", [60, 60, 0, 0]);
    assert_eq!(machine.left(), [60]);
    let mount = r"30 23 0:26 /x\134x2dy.slice /sys/fs/cgroup rw - cgroup2 cgroup2 rw";
    let machine = Machine::new("0::/x\\x2dy.slice/z\n", &[mount]).v2("sys/fs/cgroup/z", [50, 0, 0, 0]);
    assert_eq!(machine.left(), [50]);
}

#[test]
fn groups_that_the_process_is_not_in_do_not_count() {
    // Its group is outside of the namespace, or of what is mounted.
    for group in ["0::/../a\n", "0::/b\n"] {
        let mount = "30 23 0:26 /a /sys/fs/cgroup rw - cgroup2 cgroup2 rw";
        let machine = Machine::new(group, &[mount]).v2("sys/fs/cgroup", [1, 0, 0, 0]);
        assert_eq!(machine.left(), [0; 0], "{group}");
    }
}
