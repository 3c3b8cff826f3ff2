//! Caches as plain data.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Error, Result};
use ssdtrain::plan::{Goal, InTurn, Placement};
use ssdtrain::store::{Faulty, Pool, Store, StoreConfig};
use ssdtrain::{
    Adaptive, Auto, BackendKind, IoPath, Keep, Offload, Policy, TensorCache, TensorCacheBuilder, Verify,
};
use tch::Device;
use tch::nn::VarStore;

use crate::fallible::Fallible;
use crate::random::Random;

/// The settings of a cache: words, some of which have a value. Each can be omitted.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config(pub Vec<(&'static str, u64)>);

/// Bytes that spill files may have.
const DISK: u64 = 1 << 30;

/// Every setting: its name, the percentage of caches that have it, and the values it may have.
const SETTINGS: &[(&str, usize, &[u64])] = &[
    // The policy; the last one counts. Without any, it is offload.
    ("keep", 4, &[0]),
    ("adaptive", 8, &[0]),
    // In bytes.
    ("auto_budget", 8, &[0, 4 << 10, 64 << 10, 1 << 20]),
    // In percent.
    ("auto_overhead", 8, &[0, 2, 50, 1000]),
    // One digit per save: 1 keep, 2 host, 3 disk, 4 recompute.
    ("forced", 40, &[1, 2, 3, 4, 13, 23, 31, 1234, 432_133, 41, 332_211, 44_443, 4_434, 24]),
    // The path of the bytes; the last one counts. Without any, it is the CPU's.
    // Host pool and disk; the value is the pool's size in bytes.
    ("staged", 25, &[0, 4 << 10, 64 << 10, 1 << 20]),
    // A host pool alone.
    ("host_only", 12, &[64 << 10, 1 << 20]),
    ("direct", 12, &[0]),
    ("uring", 20, &[0]),
    ("pool", 20, &[0]),
    ("memory", 30, &[0]),
    ("verify", 40, &[0]),
    // What goes to the disk, but not straight from a device: that is refused.
    ("encrypt", 20, &[0]),
    ("min_bytes", 10, &[65, 4096]),
    // These three and keep_last are obeyed by offload and adaptive alone.
    ("device_budget", 50, &[1, 1 << 10, 16 << 10, 256 << 10]),
    ("backward_budget", 15, &[1, 4 << 10, 64 << 10]),
    ("prefetch", 30, &[0, 1, 4 << 10, 64 << 10]),
    ("read_ahead", 15, &[0, 4 << 10]),
    ("keep_last", 8, &[1, 2]),
    ("queue_depth", 15, &[1, 2]),
    // Small enough that some values have no room.
    ("disk_cap", 10, &[16 << 10, 256 << 10]),
    // In bytes per second.
    ("disk_rate", 6, &[20_000_000]),
    ("trace", 6, &[0]),
    // What tiles of reruns take, in bytes: as few elements as can be, or some more.
    ("tiles", 40, &[1, 1, 4 << 10]),
    // The cache knows the parameters.
    ("registered", 60, &[0]),
    // Additional microseconds that each copy takes.
    ("delay", 15, &[50, 500]),
    // One in so many allocations is told that there is no memory.
    ("pressed", 20, &[1, 3, 17]),
    // So many bytes may be allocated besides what is when the program begins; for more, the cache is asked.
    ("ceiling", 20, &[0, 16 << 10, 256 << 10]),
    // How many times the program is run with one cache.
    ("rounds", 30, &[2, 4]),
    // Transfers with the disk fail now and then, and calls of a device; each value makes others fail. Only who asks for it gets it.
    ("faulty", 0, &[0]),
    // How many caches the steps take turns with.
    ("caches", 15, &[2]),
    // Tensors are on the first GPU, which takes the place of the CPU and of simulated devices. Only who asks for it gets it.
    ("cuda", 0, &[0]),
];

impl Config {
    /// Random settings.
    pub fn draw(random: &mut Random) -> Config {
        let mut words = Vec::new();
        for (name, percent, values) in SETTINGS {
            if random.percent(*percent) {
                words.push((*name, *random.of(values)));
            }
        }
        Config(words)
    }

    /// Where tensors are.
    pub fn device(&self) -> Device {
        if self.has("cuda") { Device::Cuda(0) } else { Device::Cpu }
    }

    /// How many times a program is run with one cache.
    pub fn rounds(&self) -> u64 {
        self.value("rounds").unwrap_or(1)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.value(name).is_some()
    }

    fn value(&self, name: &str) -> Option<u64> {
        self.0.iter().find(|(word, _)| *word == name).map(|(_, value)| *value)
    }

    /// Of how many allocations one asks the cache for memory; 0 if none does.
    pub(crate) fn pressed(&self) -> u64 {
        self.value("pressed").unwrap_or(0)
    }

    /// How many bytes may be allocated besides what is, before the cache is asked; `None` for no limit.
    pub(crate) fn ceiling(&self) -> Option<u64> {
        self.value("ceiling")
    }

    /// How many caches the steps of a program take turns with.
    pub(crate) fn caches(&self) -> u64 {
        self.value("caches").unwrap_or(1)
    }

    /// Which transfers fail.
    pub(crate) fn faults(&self) -> u64 {
        self.value("faulty").unwrap_or(0)
    }

    /// Whether the cache moves bytes between memory and a disk.
    pub fn spills(&self) -> bool {
        self.path().is_none_or(|name| name == "direct")
    }

    /// Whether it encrypts them.
    pub(crate) fn encrypts(&self) -> bool {
        self.has("encrypt") && !self.has("direct")
    }

    /// The path that counts, if it is not one that goes through host memory to a disk.
    fn path(&self) -> Option<&'static str> {
        let mut named = self.0.iter().rev().map(|(name, _)| *name);
        named.find(|name| ["host_only", "direct"].contains(name))
    }

    /// The cache, which knows the variables of `vs` if the settings say so, and what of it can be made to fail.
    pub(crate) fn build(&self, vs: &VarStore) -> Result<(TensorCache, Option<Fallible>)> {
        if !self.has("faulty") {
            return Ok((self.builder(vs).build()?, None));
        }
        let device = Arc::default();
        let builder = self.builder(vs).device_faults(&device);
        if !self.spills() {
            return Ok((builder.build()?, Some(Fallible { disk: None, device })));
        }
        let store = StoreConfig {
            directories: vec![std::env::temp_dir()],
            cap_bytes: self.value("disk_cap").unwrap_or(DISK),
            encrypt: self.encrypts(),
            ..StoreConfig::default()
        };
        let faulty = Arc::new(Faulty::new(Arc::new(Pool::new(2)?)));
        let store = Store::open_with(store, Arc::clone(&faulty) as _)?;
        Ok((TensorCache::with_store(builder, store)?, Some(Fallible { disk: Some(faulty), device })))
    }

    fn builder(&self, vs: &VarStore) -> TensorCacheBuilder {
        let delay = Duration::from_micros(self.value("delay").unwrap_or(0));
        let mut builder =
            self.policy(TensorCache::builder()).device(self.device()).min_bytes(0).disk_cap(DISK);
        let on_device = |builder: TensorCacheBuilder| match self.device() {
            Device::Cpu => builder.simulated_device(delay),
            _ => builder,
        };
        for (name, value) in &self.0 {
            builder = match *name {
                "staged" => on_device(builder).path(IoPath::Staged).host_pool(*value),
                "host_only" => on_device(builder).host_pool(*value),
                "direct" => on_device(builder).path(IoPath::Direct),
                "registered" => builder.parameters(vs),
                "encrypt" => builder.encrypt(self.encrypts()),
                name => set(builder, name, *value),
            };
        }
        if self.spills() { builder.spill_to(std::env::temp_dir()) } else { builder }
    }

    /// The builder with the policy that the settings name.
    fn policy(&self, builder: TensorCacheBuilder) -> TensorCacheBuilder {
        let policies = ["keep", "adaptive", "auto_budget", "auto_overhead"];
        let named = self.0.iter().rev().find(|(name, _)| policies.contains(name));
        match named {
            Some(("keep", _)) => self.in_turn(builder, Keep),
            Some(("adaptive", _)) => {
                let policy = self.set(Adaptive::default(), Adaptive::device_budget, "device_budget");
                let policy = self.set(policy, Adaptive::backward_budget, "backward_budget");
                let policy = self.set(policy, Adaptive::prefetch, "prefetch");
                self.in_turn(builder, policy.keep_last(self.value("keep_last").unwrap_or(0) as usize))
            }
            Some(("auto_budget", bytes)) => self.in_turn(builder, Auto::new(Goal::budget(*bytes))),
            Some((_, percent)) => self.in_turn(builder, Auto::new(Goal::overhead(*percent as f64 / 100.0))),
            None => {
                let policy = self.set(Offload::default(), Offload::device_budget, "device_budget");
                let policy = self.set(policy, Offload::backward_budget, "backward_budget");
                let policy = self.set(policy, Offload::prefetch, "prefetch");
                self.in_turn(builder, policy.keep_last(self.value("keep_last").unwrap_or(0) as usize))
            }
        }
    }

    /// The policy with a setting, if it is there.
    fn set<P>(&self, policy: P, set: impl Fn(P, u64) -> P, name: &str) -> P {
        match self.value(name) {
            Some(value) => set(policy, value),
            None => policy,
        }
    }

    /// The builder with the policy, or with placements of its saves instead if they are forced.
    fn in_turn(
        &self,
        builder: TensorCacheBuilder,
        policy: impl Policy + Clone + 'static,
    ) -> TensorCacheBuilder {
        match self.value("forced") {
            Some(digits) => builder.policy(InTurn::new(policy, placements(digits))),
            None => builder.policy(policy),
        }
    }
}

fn set(builder: TensorCacheBuilder, name: &str, value: u64) -> TensorCacheBuilder {
    match name {
        "uring" => builder.backend(BackendKind::Uring),
        "pool" => builder.backend(BackendKind::Pool),
        "memory" => builder.backend(BackendKind::Memory),
        "verify" => builder.verify(Verify::Full),
        "min_bytes" => builder.min_bytes(value),
        "read_ahead" => builder.read_ahead(value),
        "queue_depth" => builder.queue_depth(value as usize),
        "disk_cap" => builder.disk_cap(value),
        "disk_rate" => builder.disk_rate(value),
        "tiles" => builder.tile_bytes(value),
        "trace" => builder.trace(true),
        _ => builder,
    }
}

fn placements(digits: u64) -> Vec<Placement> {
    digits
        .to_string()
        .chars()
        .map(|digit| match digit {
            '2' => Placement::Host,
            '3' => Placement::Disk,
            '4' => Placement::Recompute,
            _ => Placement::Keep,
        })
        .collect()
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<String> = self
            .0
            .iter()
            .map(|(name, value)| if *value == 0 { (*name).to_owned() } else { format!("{name}={value}") })
            .collect();
        f.write_str(&words.join(" "))
    }
}

impl FromStr for Config {
    type Err = Error;

    fn from_str(text: &str) -> Result<Config> {
        let mut words = Vec::new();
        for word in text.split_whitespace() {
            let (name, value) = word.split_once('=').unwrap_or((word, "0"));
            let setting = SETTINGS.iter().find(|(known, _, _)| *known == name);
            let (name, _, _) = setting.with_context(|| format!("a cache has no setting {name}"))?;
            words.push((*name, value.parse().with_context(|| word.to_owned())?));
        }
        Ok(Config(words))
    }
}
