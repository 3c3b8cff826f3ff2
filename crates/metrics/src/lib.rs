//! Serves what [tensor caches](ssdtrain::TensorCache) do over HTTP, in the text format of Prometheus, so that a training of weeks can be
//! watched with what people have.
//!
//! ```no_run
//! use ssdtrain::{Keep, TensorCache};
//! use ssdtrain_metrics::Server;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let cache = TensorCache::builder().policy(Keep).build()?;
//! let server = Server::start(9464, &[("train", &cache)])?; // http://127.0.0.1:9464/metrics, until it is dropped
//! println!("{}", server.url());
//! # Ok(())
//! # }
//! ```
//!
//! One thread serves all clients. It reads figures that the cache has anyway ([`Meter`](ssdtrain::Meter)), so steps take no longer,
//! scraped or not. [`text`] makes the same page for programs that have a server of their own. `docs/watching.md` lists the metrics.

mod address;
mod connection;
mod error;
mod families;
mod request;
mod server;
mod text;

pub use address::{Address, NoAddress};
pub use error::{Error, Result};
pub use families::{FAMILIES, Family, Kind};
pub use server::Server;
pub use text::{CONTENT_TYPE, text};
