//! Whatever somebody sends to the server of metrics, it is answered in well-formed HTTP, and the answer depends on nothing
//! that comes after the head.
#![no_main]

use libfuzzer_sys::fuzz_target;

// The file alone: its crate needs libtorch.
#[path = "../../crates/metrics/src/request.rs"]
mod request;

use request::{Answer, MOST_BYTES};

fuzz_target!(|bytes: &[u8]| {
    // It is asked after each arrival, however little has arrived.
    let cuts = (0..bytes.len()).step_by((bytes.len() / 16).max(1)).chain([bytes.len()]);
    let first = cuts.map(|cut| &bytes[..cut]).find_map(Answer::to);
    let answer = Answer::to(bytes);
    match (first, answer) {
        // Too long is only told once so much has arrived.
        (Some(first), Some(answer)) => assert!(first == answer || bytes.len() >= MOST_BYTES),
        (first, answer) => assert_eq!(first, answer),
    }
    let Some(answer) = answer else { return assert!(bytes.len() < MOST_BYTES) };
    let response = String::from_utf8(answer.response("text/plain", || "page\n".to_owned())).expect("it is text");
    let (head, body) = response.split_once("\r\n\r\n").expect("a head ends");
    assert!(head.starts_with("HTTP/1.1 ") && head.contains(&format!("Content-Length: {}", body.len())));
    assert_eq!(answer == Answer::Page, body == "page\n");
});
