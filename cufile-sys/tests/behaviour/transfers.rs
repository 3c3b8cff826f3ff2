//! Reads and writes that the caller waits for.

use std::ffi::c_void;
use std::sync::Arc;
use std::thread;

use cufile_sys::{Cause, File};

use crate::stand_in::StandIn;
use crate::{contents, file};

fn read(file: &File, into: &mut [u8], file_offset: u64, memory_offset: usize) -> cufile_sys::Result<usize> {
    let len = into.len() - memory_offset;
    let base: *mut c_void = into.as_mut_ptr().cast();
    // SAFETY: the slice has `len` bytes from that offset, and is borrowed for the call.
    unsafe { file.read(base, len, file_offset, memory_offset) }
}

fn write(file: &File, from: &[u8], file_offset: u64, memory_offset: usize) -> cufile_sys::Result<usize> {
    // SAFETY: the slice has that many bytes from that offset, and is borrowed for the call.
    unsafe { file.write(from.as_ptr().cast(), from.len() - memory_offset, file_offset, memory_offset) }
}

#[test]
fn bytes_go_out_and_come_back_at_their_offsets() {
    let stand_in = StandIn::new();
    let os_file = file(b"");
    let registered = stand_in.driver().register_file(Arc::clone(&os_file)).unwrap();
    assert_eq!(write(&registered, b"..activations", 3, 2), Ok(11));
    assert_eq!(contents(&os_file), b"\0\0\0activations");
    let mut back = *b"------";
    assert_eq!(read(&registered, &mut back, 6, 2), Ok(4));
    assert_eq!(&back, b"--ivat");
    drop(registered);
    stand_in.assert_nothing_is_left();
}

#[test]
fn a_short_transfer_and_the_end_of_the_file_are_told_by_the_count() {
    let stand_in = StandIn::new();
    let registered = stand_in.driver().register_file(file(b"0123456789")).unwrap();
    let mut back = [0; 10];
    stand_in.shorten(4);
    assert_eq!(read(&registered, &mut back, 0, 0), Ok(4));
    assert_eq!(write(&registered, b"abcdef", 0, 0), Ok(4));
    stand_in.shorten(usize::MAX);
    assert_eq!(read(&registered, &mut back, 8, 0), Ok(2));
    assert_eq!(read(&registered, &mut back, 10, 0), Ok(0));
}

#[test]
fn a_failure_names_the_file_the_place_and_the_cause() {
    let stand_in = StandIn::new();
    let registered = stand_in.driver().register_file(file(b"0123456789")).unwrap();
    let mut back = [0; 10];
    stand_in.fail_with("cuFileRead", -1, libc::EIO);
    let error = read(&registered, &mut back, 4096, 0).unwrap_err();
    assert_eq!(error.cause(), &Cause::Os(libc::EIO));
    let message = error.to_string();
    for part in ["cuFileRead of 10 bytes at 4096 of descriptor", "Input/output error"] {
        assert!(message.contains(part), "{message}");
    }
    for status in [5030, 5044, 5999] {
        stand_in.fail("cuFileWrite", status);
        let error = write(&registered, b"x", 0, 0).unwrap_err();
        assert_eq!(error.status().unwrap().0, u32::try_from(status).unwrap());
    }
}

#[test]
fn an_offset_that_c_cannot_count_is_refused_before_the_library_sees_it() {
    let stand_in = StandIn::new();
    let registered = stand_in.driver().register_file(file(b"")).unwrap();
    let error = write(&registered, b"x", 1 << 63, 0).unwrap_err();
    assert!(matches!(error.cause(), Cause::Argument(_)), "{error}");
    assert_eq!(stand_in.count("cuFileWrite"), 0);
}

#[test]
fn a_slow_transfer_keeps_its_file_though_everyone_else_lets_go() {
    let stand_in = StandIn::new();
    let os_file = file(b"0123456789");
    let registered = stand_in.driver().register_file(Arc::clone(&os_file)).unwrap();
    stand_in.hold();
    thread::scope(|scope| {
        let reader = scope.spawn(move || {
            let mut back = [0; 10];
            let outcome = read(&registered, &mut back, 0, 0);
            (outcome, back)
        });
        stand_in.wait_held(1);
        assert_eq!((stand_in.count("files"), stand_in.count("users")), (1, 1));
        stand_in.release();
        assert_eq!(reader.join().unwrap(), (Ok(10), *b"0123456789"));
    });
    stand_in.assert_nothing_is_left();
}
