//! Transfers in the order of a stream.

use std::sync::Arc;

use cufile_sys::{Block, Cause, Driver, File, Queued, Stream};

use crate::stand_in::StandIn;
use crate::{contents, file};

fn stream(driver: &Driver) -> Stream {
    // SAFETY: any pointer is a stream of the stand-in.
    unsafe { driver.register_stream(std::ptr::without_provenance_mut(8), 0) }.unwrap()
}

/// Memory that is never freed, so that a test may leave a transfer under way.
fn memory(bytes: &[u8]) -> &'static mut [u8] {
    Box::leak(bytes.into())
}

fn queue_write(file: &File, block: Block, from: &'static [u8], at: u64, stream: &Stream) -> Queued {
    // SAFETY: the memory is there for good, and nobody writes it.
    unsafe { file.write_async(block, from.as_ptr().cast(), from.len(), at, 0, stream) }.unwrap()
}

#[test]
fn bytes_go_out_and_come_back_and_the_block_is_used_again() {
    let stand_in = StandIn::new();
    let driver = stand_in.driver();
    let (os_file, stream) = (file(b""), stream(&driver));
    let registered = driver.register_file(Arc::clone(&os_file)).unwrap();
    let queued = queue_write(&registered, Block::new(), b"activations", 3, &stream);
    // SAFETY: the stand-in runs transfers at once.
    let (block, outcome) = unsafe { queued.finish() };
    assert_eq!(outcome, Ok(11));
    assert_eq!(contents(&os_file), b"\0\0\0activations");

    let back = memory(b"------");
    // SAFETY: the memory is there for good, and nobody else's.
    let queued = unsafe { registered.read_async(block, back.as_mut_ptr().cast(), 4, 6, 2, &stream) }.unwrap();
    // SAFETY: as above.
    let (_block, outcome) = unsafe { queued.finish() };
    assert_eq!((outcome, &*back), (Ok(4), &b"--ivat"[..]));
    drop((registered, stream, driver));
    stand_in.assert_nothing_is_left();
}

#[test]
fn what_is_queued_keeps_its_file_its_stream_and_its_numbers() {
    let stand_in = StandIn::new();
    let driver = stand_in.driver();
    let (os_file, stream) = (file(b""), stream(&driver));
    let registered = driver.register_file(Arc::clone(&os_file)).unwrap();
    stand_in.hold();
    let first = queue_write(&registered, Block::new(), b"one", 0, &stream);
    let second = queue_write(&registered, Block::default(), b"two", 3, &stream);
    drop((registered, stream, driver));
    assert_eq!((stand_in.count("files"), stand_in.count("streams"), stand_in.count("users")), (1, 1, 1));
    stand_in.step(1);
    assert_eq!(contents(&os_file), b"one");
    // SAFETY: the stream has passed the first.
    assert_eq!(unsafe { first.finish() }.1, Ok(3));
    stand_in.release();
    assert_eq!(contents(&os_file), b"onetwo");
    // SAFETY: the stream has passed the second too.
    assert_eq!(unsafe { second.finish() }.1, Ok(3));
    stand_in.assert_nothing_is_left();
}

#[test]
fn dropped_while_queued_it_still_runs_and_frees_nothing() {
    let stand_in = StandIn::new();
    let driver = stand_in.driver();
    let (os_file, stream) = (file(b""), stream(&driver));
    let registered = driver.register_file(Arc::clone(&os_file)).unwrap();
    stand_in.hold();
    drop(queue_write(&registered, Block::new(), b"late", 5, &stream));
    drop((registered, stream, driver));
    // Were the numbers freed, others would be in their place now.
    let others: Vec<Block> = (0..64).map(|_| Block::new()).collect();
    stand_in.release();
    drop(others);
    assert_eq!(contents(&os_file), b"\0\0\0\0\0late");
    assert_eq!((stand_in.count("files"), stand_in.count("streams"), stand_in.count("users")), (1, 1, 1));
    assert_eq!(stand_in.count("misuse"), 0);
}

#[test]
fn a_failure_as_it_runs_comes_out_at_its_end() {
    let stand_in = StandIn::new();
    let driver = stand_in.driver();
    let (registered, stream) = (driver.register_file(file(b"")).unwrap(), stream(&driver));
    stand_in.fail("cuFileWriteAsync run", 5030);
    let queued = queue_write(&registered, Block::new(), b"bytes", 64, &stream);
    // SAFETY: the stand-in runs transfers at once.
    let (block, outcome) = unsafe { queued.finish() };
    let error = outcome.unwrap_err();
    assert_eq!(error.status().unwrap().0, 5030);
    assert!(error.to_string().contains("cuFileWriteAsync of 5 bytes at 64 of descriptor"), "{error}");

    // The errno is that of a thread of the library.
    stand_in.fail_with("cuFileWriteAsync run", -1, libc::EIO);
    let queued = queue_write(&registered, block, b"bytes", 0, &stream);
    // SAFETY: as above.
    let (block, outcome) = unsafe { queued.finish() };
    assert_eq!(outcome.unwrap_err().cause(), &Cause::Unexplained);

    stand_in.fail("cuFileWriteAsync run", 0);
    stand_in.shorten(2);
    let queued = queue_write(&registered, block, b"bytes", 0, &stream);
    // SAFETY: as above.
    assert_eq!(unsafe { queued.finish() }.1, Ok(2));
}

#[test]
fn a_stream_that_failed_before_is_told_from_an_empty_transfer() {
    let stand_in = StandIn::new();
    let driver = stand_in.driver();
    let (registered, stream) = (driver.register_file(file(b"")).unwrap(), stream(&driver));
    stand_in.hold();
    let queued = queue_write(&registered, Block::new(), b"bytes", 0, &stream);
    // SAFETY: this test says so, as a stream with an error would; the block is kept to the end of the transfer.
    let (_block, outcome) = unsafe { queued.finish() };
    assert_eq!(outcome.unwrap_err().cause(), &Cause::NotRun);
    stand_in.release();
}

#[test]
fn one_that_cannot_be_queued_gives_its_block_back_after_the_stream() {
    let stand_in = StandIn::new();
    let driver = stand_in.driver();
    let (registered, stream) = (driver.register_file(file(b"")).unwrap(), stream(&driver));
    stand_in.fail("cuFileReadAsync", 5038);
    let memory = memory(b"------");
    // SAFETY: the memory is there for good, and nobody else's.
    let refused =
        unsafe { registered.read_async(Block::new(), memory.as_mut_ptr().cast(), 6, 0, 0, &stream) };
    let refused = refused.unwrap_err();
    assert_eq!(refused.error.status().unwrap().0, 5038);
    assert!(refused.to_string().contains("CU_FILE_ASYNC_NOT_SUPPORTED"), "{refused}");
    // SAFETY: nothing was queued.
    let (_block, outcome) = unsafe { refused.queued.finish() };
    assert_eq!(outcome.unwrap_err().cause(), &Cause::NotRun);

    let stand_in = StandIn::without(&["cuFileWriteAsync"]);
    let driver = stand_in.driver();
    let (registered, stream) = (driver.register_file(file(b"")).unwrap(), self::stream(&driver));
    // SAFETY: as above.
    let refused = unsafe { registered.write_async(Block::new(), memory.as_ptr().cast(), 6, 0, 0, &stream) };
    let refused = refused.unwrap_err();
    assert!(matches!(refused.error.cause(), Cause::Missing(_)), "{refused}");
    // SAFETY: nothing was queued.
    drop(unsafe { refused.queued.finish() });
    drop((registered, stream, driver));
    stand_in.assert_nothing_is_left();
}
