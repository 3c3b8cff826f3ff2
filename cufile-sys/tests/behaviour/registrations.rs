//! Files, buffers and streams: registered once, given back once.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use crate::stand_in::StandIn;
use crate::{contents, file};

#[test]
fn a_file_keeps_its_descriptor_and_its_driver_until_its_last_clone_is_gone() {
    let stand_in = StandIn::new();
    let os_file = file(b"");
    let registered = stand_in.driver().register_file(Arc::clone(&os_file)).unwrap();
    assert_eq!(registered.as_fd().as_raw_fd(), os_file.as_raw_fd());
    let clone = registered.clone();
    drop(registered);
    assert_eq!((Arc::strong_count(&os_file), stand_in.count("files"), stand_in.count("users")), (2, 1, 1));
    drop(clone);
    assert_eq!(Arc::strong_count(&os_file), 1);
    stand_in.assert_nothing_is_left();
}

#[test]
fn a_file_owned_alone_is_closed_after_it_was_deregistered() {
    let stand_in = StandIn::new();
    let registered = stand_in.driver().register_file(tempfile::NamedTempFile::new().unwrap()).unwrap();
    drop(registered);
    // The stand-in counts a descriptor that was closed too soon as misuse.
    stand_in.assert_nothing_is_left();
}

#[test]
fn a_file_that_is_refused_is_named_with_the_reason_and_let_go() {
    let stand_in = StandIn::new();
    let driver = stand_in.driver();
    let named = tempfile::NamedTempFile::new().unwrap();
    stand_in.fail("cuFileHandleRegister", 5027);
    let os_file = Arc::new(named.reopen().unwrap());
    let error = driver.register_file(Arc::clone(&os_file)).unwrap_err();
    assert_eq!(error.status().unwrap().0, 5027);
    let message = error.to_string();
    let path = named.path().canonicalize().unwrap();
    for part in [&*path.to_string_lossy(), "CU_FILE_HANDLE_NOT_REGISTERED (5027)", "udev"] {
        assert!(message.contains(part), "{message}");
    }
    assert_eq!(Arc::strong_count(&os_file), 1);
    drop(driver);
    stand_in.assert_nothing_is_left();
}

#[test]
fn a_descriptor_is_registered_once_at_a_time() {
    let stand_in = StandIn::new();
    let driver = stand_in.driver();
    let os_file = file(b"");
    let first = driver.register_file(Arc::clone(&os_file)).unwrap();
    assert_eq!(driver.register_file(Arc::clone(&os_file)).unwrap_err().status().unwrap().0, 5028);
    drop(first);
    assert!(driver.register_file(os_file).is_ok());
}

#[test]
fn a_buffer_is_deregistered_on_drop_or_on_demand() {
    let stand_in = StandIn::new();
    let memory = [0_u8; 4096];
    let driver = stand_in.driver();
    // SAFETY: the memory outlives the buffer.
    let buffer = unsafe { driver.register_buffer(memory.as_ptr().cast(), memory.len()) }.unwrap();
    assert_eq!((buffer.base(), buffer.len(), buffer.is_empty()), (memory.as_ptr().cast(), 4096, false));
    assert_eq!(stand_in.count("buffers"), 1);
    // SAFETY: as above.
    let twice = unsafe { driver.register_buffer(memory.as_ptr().cast(), memory.len()) };
    assert_eq!(twice.unwrap_err().status().unwrap().0, 5023);
    drop(buffer);
    assert_eq!(stand_in.count("buffers"), 0);
    // SAFETY: as above.
    let buffer = unsafe { driver.register_buffer(memory.as_ptr().cast(), memory.len()) }.unwrap();
    drop(driver);
    buffer.deregister().unwrap();
    stand_in.assert_nothing_is_left();
}

#[test]
fn a_buffer_that_is_refused_says_how_large_it_was() {
    let stand_in = StandIn::new();
    let driver = stand_in.driver();
    let memory = [0_u8; 4096];
    stand_in.fail("cuFileBufRegister", 5036);
    // SAFETY: the memory outlives the buffer.
    let error = unsafe { driver.register_buffer(memory.as_ptr().cast(), memory.len()) }.unwrap_err();
    let message = error.to_string();
    for part in ["4096 bytes", "CU_FILE_GPU_MEMORY_PINNING_FAILED (5036)", "BAR1"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn a_buffer_that_cannot_be_deregistered_tells_once() {
    let stand_in = StandIn::new();
    let driver = stand_in.driver();
    let memory = [0_u8; 4096];
    stand_in.fail("cuFileBufDeregister", 5022);
    for on_demand in [true, false] {
        // SAFETY: the memory outlives the buffer.
        let buffer = unsafe { driver.register_buffer(memory[usize::from(on_demand)..].as_ptr().cast(), 9) };
        let buffer = buffer.unwrap();
        let told = if on_demand {
            vec![buffer.deregister().unwrap_err()]
        } else {
            drop(buffer);
            driver.take_errors()
        };
        assert_eq!(told.len(), 1);
        assert_eq!(told[0].status().unwrap().0, 5022);
        assert!(driver.take_errors().is_empty());
    }
    assert_eq!(stand_in.count("cuFileBufDeregister"), 2);
}

#[test]
fn handles_may_be_used_and_dropped_on_other_threads() {
    let stand_in = StandIn::new();
    let os_file = file(b"");
    let registered = stand_in.driver().register_file(Arc::clone(&os_file)).unwrap();
    std::thread::scope(|scope| {
        for offset in 0..4_u8 {
            let registered = registered.clone();
            scope.spawn(move || {
                let byte = [offset];
                // SAFETY: the memory is one byte long and nobody writes it.
                unsafe { registered.write(byte.as_ptr().cast(), 1, offset.into(), 0) }.unwrap();
            });
        }
    });
    drop(registered);
    assert_eq!(contents(&os_file), [0, 1, 2, 3]);
    stand_in.assert_nothing_is_left();
}

#[test]
fn everything_may_change_threads_and_be_shared() {
    fn shared<T: Send + Sync>() {}
    shared::<(cufile_sys::Library, cufile_sys::Driver, cufile_sys::File, cufile_sys::Buffer)>();
    shared::<cufile_sys::Error>();
}
