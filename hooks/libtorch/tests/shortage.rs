//! What an allocation asks for that finds no memory, and how often.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use ssdtrain_libtorch::{Reliever, Storage, install_cpu_allocator, limit_cpu_memory, relieve_with};
use tch::Device;

const BYTES: u64 = 1 << 20;

/// Says that it has freed what it is told to, and frees nothing.
struct Answers {
    answers: Mutex<Vec<u64>>,
    asked: Mutex<Vec<u64>>,
}

impl Reliever for Answers {
    fn relieve(self: Arc<Self>, bytes: u64) -> u64 {
        self.asked.lock().push(bytes);
        self.answers.lock().pop().unwrap_or_default()
    }
}

/// What is asked for, in turn, if these are the answers.
fn asked(answers: &[u64]) -> Vec<u64> {
    let answers = answers.iter().rev().copied().collect();
    let reliever = Arc::new(Answers { answers: Mutex::new(answers), asked: Mutex::default() });
    let weak: Weak<dyn Reliever> = Arc::downgrade(&(Arc::clone(&reliever) as Arc<dyn Reliever>));
    relieve_with(Device::Cpu, weak).unwrap();
    assert!(Storage::allocate(BYTES).is_err());
    let asked = reliever.asked.lock();
    asked.clone()
}

#[test]
fn twice_as_much_is_asked_for_where_as_much_as_was_wanted_has_become_free() {
    install_cpu_allocator();
    limit_cpu_memory(BYTES / 2);
    assert_eq!(asked(&[]), [BYTES]);
    assert_eq!(asked(&[BYTES, 2 * BYTES, 0]), [BYTES, 2 * BYTES, 4 * BYTES]);
    assert_eq!(asked(&[1, 1, BYTES - 1, 0]), [BYTES; 4], "others may have freed it, and used it again");
    let endless = asked(&vec![1; 1000]);
    assert!(endless.len() < 100 && endless.iter().all(|bytes| *bytes == BYTES), "{endless:?}");
    limit_cpu_memory(u64::MAX);
}
