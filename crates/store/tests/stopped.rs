//! A process that is stopped for longer than the disk may take, and goes on.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::env;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use ssdtrain_store::{
    AlignedBuf, BLOCK, BackendKind, Completion, Direction, Fault, Faulty, Pool, Store, StoreConfig,
};

/// What the child process is known by.
const STOPPED: &str = "STOPPED";
const LIMIT: Duration = Duration::from_millis(1500);

fn send(signal: &str, child: &Child) {
    let sent = Command::new("kill").args([&format!("-{signal}"), &child.id().to_string()]).status();
    assert!(sent.unwrap().success());
}

#[test]
fn a_transfer_that_the_disk_answered_while_the_process_was_stopped_is_not_given_up() {
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "writes", "--nocapture"])
        .env(STOPPED, "")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("begun") {
        line.clear();
        assert_ne!(output.read_line(&mut line).unwrap(), 0, "it has ended");
    }
    send("STOP", &child);
    // Nothing happens meanwhile; the time itself is what is tested.
    thread::sleep(2 * LIMIT);
    send("CONT", &child);
    drop(child.stdin.take());
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    assert!(child.wait().unwrap().success(), "{rest}");
}

/// In a process of its own: a write that the disk answers once nobody holds the other end of stdin.
#[test]
fn writes() {
    if env::var_os(STOPPED).is_none() {
        return;
    }
    let faulty = Arc::new(Faulty::new(Arc::new(Pool::new(1).unwrap())));
    let config = StoreConfig {
        backend: BackendKind::Memory,
        cap_bytes: 1 << 20,
        timeout: LIMIT,
        ..StoreConfig::default()
    };
    let store = Store::open_with(config, Arc::<Faulty>::clone(&faulty)).unwrap();
    faulty.inject(Direction::Write, Fault::Never, 0, 1);
    let (tell, told) = channel();
    let done = Completion::new(move |outcome| tell.send(outcome).unwrap());
    store.write(store.reserve(1).unwrap(), Arc::new(AlignedBuf::new(BLOCK).unwrap()), done);
    faulty.wait_never(1);
    println!("begun");
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    faulty.release();
    told.recv().unwrap().unwrap();
}
