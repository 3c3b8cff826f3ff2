//! What the tests share: caches, steps, clients, and a strict reader of the format.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]
#![allow(dead_code, reason = "every test file uses its own part of this module")]

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use ssdtrain::{BackendKind, Offload, StepReport, TensorCache};
use tch::{Device, Kind, Tensor};

/// A cache that moves everything to spill files in memory.
pub(crate) fn cache() -> TensorCache {
    let policy = Offload::default().device_budget(1 << 20);
    let builder = TensorCache::builder().backend(BackendKind::Memory).policy(policy);
    builder.disk_cap(1 << 30).min_bytes(0).spill_to(std::env::temp_dir()).build().unwrap()
}

/// A step that saves some storages of a MiB.
pub(crate) fn step(cache: &TensorCache) -> StepReport {
    let x = Tensor::randn([512, 512], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let step = cache.step();
    let loss = (0..8).fold(&x * 1.0, |y, _| (y * 1.01).sin()).sum(Kind::Float);
    step.backward(&loss).unwrap();
    drop(loss);
    step.finish().unwrap()
}

/// The whole answer to this request.
pub(crate) fn ask(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// The page.
pub(crate) fn scrape(address: SocketAddr) -> String {
    let answer = ask(address, "GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"), "{head}");
    assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())), "{head}");
    body.to_owned()
}

/// A page, read strictly: the type of each metric, and each figure by its name and labels.
#[derive(Debug, Default)]
pub(crate) struct Page {
    pub(crate) kinds: BTreeMap<String, String>,
    pub(crate) helps: BTreeMap<String, String>,
    pub(crate) figures: BTreeMap<String, f64>,
}

impl Page {
    pub(crate) fn read(text: &str) -> Page {
        let mut page = Page::default();
        let mut current = String::new();
        assert!(text.ends_with('\n') && !text.contains("\n\n"), "each line has an end, and none is empty");
        let mut lines = text.lines().peekable();
        while let Some(line) = lines.next() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                let (name, help) = help.split_once(' ').unwrap();
                let kind = lines.next().and_then(|line| line.strip_prefix("# TYPE ")).unwrap();
                let (of, kind) = kind.split_once(' ').unwrap();
                assert_eq!(of, name);
                assert!(matches!(kind, "counter" | "gauge") && !help.trim().is_empty(), "{line}");
                let before = page.kinds.insert(name.to_owned(), kind.to_owned());
                assert_eq!(before, None, "{name} occurs twice");
                page.helps.insert(name.to_owned(), help.to_owned());
                assert!(
                    lines.peek().is_some_and(|line| line.starts_with(&format!("{name}{{"))),
                    "{name} has no figure"
                );
                current = name.to_owned();
                continue;
            }
            let (place, value) = line.rsplit_once(' ').unwrap();
            let (name, labels) = place.split_once('{').unwrap();
            assert_eq!(name, current, "figures stand under their metric");
            let labels = labels.strip_suffix('}').unwrap();
            let names: Vec<_> = labels.split(',').map(|label| label.split_once("=\"").unwrap()).collect();
            assert_eq!(names[0].0, "cache");
            for (name, value) in &names {
                assert!(name.bytes().all(|byte| byte.is_ascii_lowercase()), "{line}");
                assert!(value.ends_with('"') && value.matches('"').count() == 1, "{line}");
            }
            let value: f64 = value.parse().unwrap();
            assert!(value.is_finite() && value >= 0.0, "{line}");
            assert_eq!(page.figures.insert(place.to_owned(), value), None, "{place} occurs twice");
        }
        page
    }

    /// A figure of the cache `name`; `label` as it stands in the text, with a comma before it.
    pub(crate) fn of(&self, cache: &str, name: &str, label: &str) -> f64 {
        let place = format!("ssdtrain_{name}{{cache=\"{cache}\"{label}}}");
        *self.figures.get(&place).unwrap_or_else(|| panic!("no {place} in {:#?}", self.figures))
    }
}
