//! The node of a NUMA machine whose memory is nearest to a device.

use std::fs;
use std::path::Path;

/// The node that a PCI device belongs to, if the machine has several nodes with memory. `address` is the device's, such as
/// `0000:3b:00.0`, in letters of either case.
pub fn node_of_device(address: &str) -> Option<u32> {
    node_below(Path::new("/sys"), address)
}

/// The same, of the machine whose sysfs is at `sys`.
fn node_below(sys: &Path, address: &str) -> Option<u32> {
    let text = |path: &str| fs::read_to_string(sys.join(path)).ok();
    let with_memory = text("devices/system/node/has_memory")?;
    // A list of ranges, such as 0-1,3.
    let are_several = with_memory.trim().contains(['-', ',']);
    let node = text(&format!("bus/pci/devices/{}/numa_node", address.to_ascii_lowercase()))?;
    // -1 where the firmware does not say.
    node.trim().parse().ok().filter(|_| are_several)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_belongs_to_a_node_where_there_are_several() {
        let sys = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = sys.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let node = |address: &str| node_below(sys.path(), address);
        assert_eq!(node("0000:3b:00.0"), None);
        write("devices/system/node/has_memory", "0-1\n");
        write("bus/pci/devices/0000:3b:00.0/numa_node", "1\n");
        write("bus/pci/devices/0000:af:00.0/numa_node", "-1\n");
        assert_eq!(node("0000:3B:00.0"), Some(1));
        assert_eq!((node("0000:af:00.0"), node("0000:5e:00.0")), (None, None));
        write("devices/system/node/has_memory", "0\n");
        assert_eq!(node("0000:3b:00.0"), None, "there is no other memory");
    }
}
