//! The server answers one question, to whoever asks, and neither clients nor forks hold anything up.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process;
use std::thread;

use common::{Page, ask, cache, scrape, step};
use ssdtrain::TensorCache;
use ssdtrain_metrics::{Error, Server};

fn served(cache: &TensorCache) -> Server {
    Server::start(0, &[("a", cache)]).unwrap()
}

#[test]
fn the_page_is_what_the_cache_says_at_that_moment() {
    let cache = cache();
    let server = served(&cache);
    let steps = || Page::read(&scrape(server.address())).of("a", "steps_total", ",planning=\"unplanned\"");
    assert_eq!(steps(), 0.0);
    step(&cache);
    assert_eq!(steps(), 1.0);
    assert!(server.address().ip().is_loopback() && server.url().ends_with("/metrics"), "{}", server.url());
}

#[test]
fn a_cache_may_go_before_its_server() {
    let cache = cache();
    let server = served(&cache);
    step(&cache);
    drop(cache);
    let page = Page::read(&scrape(server.address()));
    assert_eq!(page.of("a", "steps_total", ",planning=\"unplanned\""), 1.0);
    assert!(!page.kinds.contains_key("ssdtrain_disk_bytes_total"), "the spill files are gone");
}

#[test]
fn everything_else_is_refused() {
    let cache = cache();
    let server = served(&cache);
    for (request, status) in [
        ("GET / HTTP/1.1\r\n\r\n", "404"),
        ("GET /metrics/ HTTP/1.1\r\n\r\n", "404"),
        ("DELETE /metrics HTTP/1.1\r\n\r\n", "405"),
        ("POST /metrics HTTP/1.1\r\nContent-Length: 9\r\n\r\nsome body", "405"),
        ("\u{1}\u{2}\u{3}\r\n\r\n", "400"),
        ("GET /metrics HTTP/9.9\r\n\r\n", "400"),
    ] {
        let answer = ask(server.address(), request);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request:?}: {answer}");
    }
    let endless = "a: b\r\n".repeat(8 << 10);
    let answer = ask(server.address(), &format!("GET /metrics HTTP/1.1\r\n{}", &endless[..9 << 10]));
    assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
    scrape(server.address());
}

#[test]
fn a_client_that_sends_without_end_is_cut_off() {
    let cache = cache();
    let server = served(&cache);
    let mut stream = TcpStream::connect(server.address()).unwrap();
    let sent = (0..100_000).find_map(|_| stream.write_all(&[b'x'; 4 << 10]).err());
    assert!(matches!(sent.unwrap().kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe));
    scrape(server.address());
}

#[test]
fn clients_that_say_nothing_hold_up_neither_others_nor_steps() {
    let cache = cache();
    let server = served(&cache);
    let mut silent: Vec<TcpStream> =
        (0..100).map(|_| TcpStream::connect(server.address()).unwrap()).collect();
    for stream in &mut silent {
        // Some have been cut off by now.
        drop(stream.write_all(b"GET /met"));
    }
    step(&cache);
    scrape(server.address());
    // Of so many, the first had to go.
    assert_ne!(silent[0].read(&mut [0]).unwrap_or(0), 1);
    drop(server);
}

#[test]
fn many_clients_at_once_all_get_the_page() {
    let cache = cache();
    let server = served(&cache);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| (0..20).for_each(|_| drop(Page::read(&scrape(server.address())))));
        }
        (0..5).for_each(|_| drop(step(&cache)));
    });
}

#[test]
fn a_client_that_comes_letter_by_letter_is_served() {
    let cache = cache();
    let server = served(&cache);
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.set_nodelay(true).unwrap();
    for byte in b"GET /metrics HTTP/1.1\r\n\r\n" {
        stream.write_all(&[*byte]).unwrap();
    }
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
}

#[test]
fn a_server_that_is_dropped_ends_with_its_thread_and_connections() {
    let cache = cache();
    let server = served(&cache);
    let address = server.address();
    let mut waiting = TcpStream::connect(address).unwrap();
    drop(server);
    assert_ne!(waiting.read(&mut [0]).unwrap_or(0), 1);
    TcpStream::connect(address).unwrap_err();
    Server::start(address, &[("a", &cache)]).unwrap();
}

#[test]
fn a_port_that_is_taken_and_names_that_are_the_same_are_errors() {
    let cache = cache();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let error = Server::start(address, &[("a", &cache)]).unwrap_err();
    assert!(matches!(error, Error::Bind { .. }));
    for part in [address.to_string().as_str(), "another program has this port", "0 for any that is free"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    let error = Server::start(0, &[("a", &cache), ("a", &cache)]).unwrap_err();
    assert!(matches!(error, Error::Name(name) if name == "a"));
}

#[test]
fn a_process_that_is_forked_off_leaves_the_server_to_its_parent() {
    let cache = cache();
    let server = served(&cache);
    let address = server.address();
    let [mut read, mut written] = [(); 2].map(|()| Some(std::io::pipe().unwrap()));
    let (told, tell) = read.take().unwrap();
    let (goes_on, go_on) = written.take().unwrap();
    // SAFETY: a plain system call; the library makes it safe to go on in the child.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: a plain system call: a child that hangs is ended.
        unsafe { libc::alarm(60) };
        let passed = cache.metrics().steps == ssdtrain::StepCounts::default();
        drop((server, go_on));
        let told_parent = { tell }.write_all(&[1]).is_ok();
        // It lives, with all that it has of its parent, until that lets it go.
        let ended = { goes_on }.read(&mut [0]).is_ok();
        // SAFETY: ends the process without the exit handlers of the parent's libraries.
        unsafe { libc::_exit(i32::from(!(passed && told_parent && ended))) };
    }
    drop(tell);
    assert_eq!({ told }.read(&mut [0]).unwrap(), 1, "the child has dropped its server");
    scrape(address);
    drop(server);
    assert_eq!(TcpStream::connect(address).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    drop(Server::start(address, &[("a", &cache)]).unwrap());
    drop(go_on);
    let mut status = 0;
    // SAFETY: `status` is a valid place for the result.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((waited, status, process::id() as libc::pid_t == child), (child, 0, false));
}
