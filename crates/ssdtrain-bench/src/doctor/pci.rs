//! Devices on the PCI buses: where they are, and how far one is from another.

use std::fmt;

use super::tree::Tree;

/// A function on a PCI bus.
#[derive(Clone, Debug)]
pub(super) struct Device {
    /// Such as `0000:19:00.0`.
    pub(super) address: String,
    /// The path to it: the host bridge (`pci0000:17`), the bridges, and the device itself.
    way: Vec<String>,
    pub(super) numa_node: Option<u32>,
    /// Its IOMMU group, if an IOMMU is on.
    pub(super) iommu_group: Option<String>,
    pub(super) link: Option<Link>,
}

/// The PCIe link of a device.
#[derive(Clone, Debug)]
pub(super) struct Link {
    /// Such as `32.0 GT/s`; an idle device may run slower than it can.
    speed: String,
    width: u32,
    max_width: u32,
}

/// The distance between two devices, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Distance {
    Switch,
    RootComplex,
    Node,
    Sockets,
    HostBridges,
}

impl Device {
    /// The device whose directory in sysfs is at or above this real path.
    pub(super) fn above(tree: &Tree, real: &str) -> Option<Device> {
        let parts: Vec<&str> = real.split('/').collect();
        let first = parts.iter().position(|part| is_host_bridge(part))?;
        let way: Vec<String> =
            std::iter::once(parts[first]).chain(bridges(&parts[first + 1..])).map(str::to_owned).collect();
        let address = way.last().filter(|_| way.len() > 1)?.clone();
        let directory = parts[..first + way.len()].join("/");
        let text = |name: &str| tree.text(&format!("{directory}/{name}"));
        let group = tree.real(&format!("{directory}/iommu_group"));
        Some(Device {
            numa_node: text("numa_node").and_then(|node| node.parse().ok()),
            iommu_group: group.and_then(|path| path.rsplit('/').next().map(str::to_owned)),
            link: Link::of(text),
            address,
            way,
        })
    }

    /// The distance to the other device.
    pub(super) fn distance(&self, other: &Device) -> Distance {
        let common = self.way.iter().zip(&other.way).take_while(|(one, another)| one == another).count();
        match (common, self.numa_node, other.numa_node) {
            // Both are behind the same bridge, below the host bridge.
            (2.., ..) => Distance::Switch,
            (1, ..) => Distance::RootComplex,
            (_, Some(one), Some(another)) if one == another => Distance::Node,
            (_, Some(_), Some(_)) => Distance::Sockets,
            _ => Distance::HostBridges,
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.address)?;
        if let Some(node) = self.numa_node {
            write!(f, ", NUMA node {node}")?;
        }
        if let Some(Link { speed, width, .. }) = &self.link {
            write!(f, ", PCIe {speed} x{width}")?;
        }
        Ok(())
    }
}

impl Link {
    fn of(text: impl Fn(&str) -> Option<String>) -> Option<Link> {
        let width = |name: &str| text(name)?.parse().ok().filter(|width| (1..=32).contains(width));
        let speed = text("current_link_speed")?;
        Some(Link {
            speed: speed.trim_end_matches(" PCIe").to_owned(),
            width: width("current_link_width")?,
            max_width: width("max_link_width")?,
        })
    }

    /// Both widths, if the link has fewer lanes than the device could use.
    pub(super) fn narrowed(&self) -> Option<(u32, u32)> {
        (self.width < self.max_width).then_some((self.width, self.max_width))
    }
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Distance::Switch => "behind the same PCIe switch",
            Distance::RootComplex => "under the same host bridge",
            Distance::Node => "on the same NUMA node, under different host bridges",
            Distance::Sockets => "across sockets",
            Distance::HostBridges => "under different host bridges, of NUMA nodes not told",
        })
    }
}

/// Such as `pci0000:17`.
fn is_host_bridge(part: &str) -> bool {
    part.strip_prefix("pci").is_some_and(|rest| {
        rest.split_once(':')
            .is_some_and(|(domain, bus)| domain.len() >= 4 && bus.len() == 2 && is_hex(domain) && is_hex(bus))
    })
}

/// The addresses at the beginning of the path; a controller of NVMe drives (VMD) may have a host bridge of its own.
fn bridges<'a>(parts: &[&'a str]) -> impl Iterator<Item = &'a str> {
    parts.iter().copied().take_while(|part| is_address(part) || is_host_bridge(part))
}

/// Such as `0000:19:00.0`.
fn is_address(part: &str) -> bool {
    let mut fields = part.split([':', '.']);
    let mut next = |length: usize| fields.next().is_some_and(|field| field.len() >= length && is_hex(field));
    next(4) && next(2) && next(2) && next(1) && fields.next().is_none()
}

fn is_hex(text: &str) -> bool {
    text.chars().all(|digit| digit.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(way: &str, numa_node: Option<u32>) -> Device {
        let way: Vec<_> = way.split('/').map(str::to_owned).collect();
        Device { address: way.last().unwrap().clone(), way, numa_node, iommu_group: None, link: None }
    }

    #[test]
    fn distances_are_told_by_what_the_ways_share() {
        let gpu = device("pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:01.0/0000:1a:00.0", Some(0));
        let at = |way: &str, node| gpu.distance(&device(way, node));
        assert_eq!(
            at("pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:02.0/0000:1b:00.0", Some(0)),
            Distance::Switch
        );
        assert_eq!(at("pci0000:17/0000:17:02.0/0000:30:00.0", Some(0)), Distance::RootComplex);
        assert_eq!(at("pci0000:40/0000:40:02.0/0000:41:00.0", Some(0)), Distance::Node);
        assert_eq!(at("pci0000:c0/0000:c0:02.0/0000:c1:00.0", Some(1)), Distance::Sockets);
        assert_eq!(at("pci0000:c0/0000:c0:02.0/0000:c1:00.0", None), Distance::HostBridges);
    }

    #[test]
    fn addresses_and_host_bridges_are_known_by_their_form() {
        assert!(is_address("0000:19:00.0") && is_address("10000:19:1f.7"));
        assert!(!is_address("virtio1") && !is_address("0000:19:00") && !is_address("nvme0n1"));
        assert!(is_host_bridge("pci0000:17") && !is_host_bridge("pci") && !is_host_bridge("0000:17:00.0"));
    }
}
