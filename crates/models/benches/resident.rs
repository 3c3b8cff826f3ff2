//! Resident memory of a training run whose sequences differ in length: 200 steps of a GPT on the CPU with 128 to 512
//! tokens, without a cache (libtorch's own allocator), with a cache that keeps everything, and with one that moves
//! storages.
//!
//! The figures are the increase over the process after one step of 16 tokens, when libtorch, the model and its
//! gradients are already in memory. The largest live set is shown next to them, reduced by the same amount. Each row
//! is a process of its own.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

use std::process::Command;
use std::{env, fs};

use bytesize::ByteSize;
use ssdtrain::{Keep, MIB, Offload, TensorCache, resolve_math_kernels};
use ssdtrain_libtorch::{memory, reset_peak};
use ssdtrain_models::{Gpt, GptConfig, LanguageModel};
use tch::{Device, Kind, Tensor, nn};

const STEPS: u64 = 200;
const BATCH: i64 = 8;
const ROWS: [&str; 3] = ["libtorch", "keep", "offload"];

fn main() {
    match env::var("RESIDENT_ROW") {
        Ok(row) => measure(&row),
        // Also run by `cargo test --benches`, which only checks that it starts.
        Err(_) if env::args().any(|argument| argument == "--test") => {}
        Err(_) => ROWS.iter().for_each(|row| {
            let mut run = Command::new(env::current_exe().expect("its own path"));
            assert!(run.env("RESIDENT_ROW", row).status().expect("it runs").success(), "{row}");
        }),
    }
}

fn measure(row: &str) {
    resolve_math_kernels().unwrap();
    let vs = nn::VarStore::new(Device::Cpu);
    let builder = TensorCache::builder().parameters(&vs);
    let cache = match row {
        "keep" => Some(builder.policy(Keep).build().unwrap()),
        "offload" => {
            let spill = builder.spill_to(env::temp_dir()).disk_cap(4 << 30);
            Some(spill.policy(Offload::default().device_budget(64 * MIB)).build().unwrap())
        }
        _ => None,
    };
    let config = GptConfig { vocab: 256, context: 512, ..GptConfig::preset("nanogpt-cpu").unwrap() };
    let model = Gpt::new(&vs.root(), config).unwrap();
    step(&model, cache.as_ref(), 16);

    let (resident, allocated) = (status("VmRSS"), memory(Device::Cpu).allocated);
    // Resets the peak resident memory.
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let mut live = 0;
    for index in 0..STEPS {
        reset_peak(Device::Cpu);
        // Derived from the index, so that all rows have the same lengths.
        step(&model, cache.as_ref(), 128 + ((index * 0x9E37_79B9) >> 7) as i64 % 385);
        live = live.max(memory(Device::Cpu).peak.saturating_sub(allocated));
    }
    let (last, highest) = (status("VmRSS") - resident, status("VmHWM") - resident);
    let reserved = memory(Device::Cpu).reserved.saturating_sub(allocated);
    print!("{row:>8}: {} resident at the end, {} at most", ByteSize(last), ByteSize(highest));
    match live {
        0 => println!(" (its allocator tells of no live set)"),
        live => println!(
            "; {} reserved; largest live set {}: {:.2} and {:.2} of it",
            ByteSize(reserved),
            ByteSize(live),
            last as f64 / live as f64,
            highest as f64 / live as f64
        ),
    }
}

fn step(model: &Gpt, cache: Option<&TensorCache>, tokens: i64) {
    let draw = || Tensor::randint(256, [BATCH, tokens], (Kind::Int64, Device::Cpu));
    let (inputs, targets) = (draw(), draw());
    match cache {
        None => model.loss(&inputs, &targets, true).unwrap().backward(),
        Some(cache) => {
            let step = cache.step();
            step.backward(&model.loss(&inputs, &targets, true).unwrap()).unwrap();
            step.finish().unwrap();
        }
    }
}

/// A value from `/proc/self/status`, in bytes.
fn status(name: &str) -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() << 10
}
