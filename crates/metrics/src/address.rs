//! Where metrics are served.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::str::FromStr;

/// Where metrics are served. A port alone is one of this machine's own (127.0.0.1), which no other machine can reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address(SocketAddr);

/// A text that is no [`Address`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("give a port, such as 9464, or an address and a port, such as 127.0.0.1:9464 or [::1]:9464")]
pub struct NoAddress;

impl From<u16> for Address {
    fn from(port: u16) -> Address {
        Address((Ipv4Addr::LOCALHOST, port).into())
    }
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Address {
        Address(address)
    }
}

impl From<Address> for SocketAddr {
    fn from(Address(address): Address) -> SocketAddr {
        address
    }
}

impl FromStr for Address {
    type Err = NoAddress;

    fn from_str(text: &str) -> Result<Address, NoAddress> {
        let port = text.strip_prefix("localhost:").unwrap_or(text);
        match port.parse::<u16>() {
            Ok(port) => Ok(port.into()),
            Err(_) => text.parse().map(Address).map_err(|_| NoAddress),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_is_of_this_machine_and_nonsense_is_refused() {
        for (text, address) in [
            ("9464", "127.0.0.1:9464"),
            ("localhost:1", "127.0.0.1:1"),
            ("0.0.0.0:80", "0.0.0.0:80"),
            ("[::1]:0", "[::1]:0"),
        ] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), address);
        }
        for text in [
            "",
            ":9464",
            "65536",
            "-1",
            "example.org:80",
            "127.0.0.1",
            "1.2.3.4:99999",
            "http://127.0.0.1:80",
        ] {
            text.parse::<Address>().unwrap_err();
        }
    }
}
