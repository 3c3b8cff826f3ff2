//! Who has the driver open, and for how long.

use std::thread;

use cufile_sys::sys::{
    CUfileDriverControlFlags_t, CUfileDriverStatusFlags_t, CUfileFeatureFlags_t, CUresult,
};
use cufile_sys::{Cause, Driver};

use crate::stand_in::StandIn;

#[test]
fn it_is_opened_by_the_first_and_closed_after_the_last() {
    let stand_in = StandIn::new();
    let library = stand_in.open();
    let first = Driver::open(&library).unwrap();
    let second = Driver::open(&library.clone()).unwrap();
    assert_eq!(stand_in.count("cuFileDriverOpen"), 1);
    drop(first);
    assert_eq!(stand_in.count("users"), 1);
    drop(second.clone());
    assert_eq!(second.use_count(), Ok(1));
    drop(second);
    stand_in.assert_nothing_is_left();
    drop(Driver::open(&library).unwrap());
    assert_eq!(stand_in.count("cuFileDriverOpen"), 2);
    stand_in.assert_nothing_is_left();
}

#[test]
fn many_threads_share_it() {
    let stand_in = StandIn::new();
    let library = stand_in.open();
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..100 {
                    Driver::open(&library).unwrap().properties().unwrap();
                }
            });
        }
    });
    stand_in.assert_nothing_is_left();
}

#[test]
fn a_refusal_is_an_error_that_says_what_to_do() {
    let stand_in = StandIn::new();
    let library = stand_in.open();
    stand_in.fail("cuFileDriverOpen", 5001);
    let message = Driver::open(&library).unwrap_err().to_string();
    for part in ["cuFileDriverOpen", "CU_FILE_DRIVER_NOT_INITIALIZED (5001)", "allow_compat_mode"] {
        assert!(message.contains(part), "{message}");
    }
    stand_in.fail_with("cuFileDriverOpen", 5011, 100);
    assert_eq!(Driver::open(&library).unwrap_err().cause(), &Cause::Cuda(CUresult(100)));
    stand_in.fail("cuFileDriverOpen", 0);
    drop(Driver::open(&library).unwrap());
    stand_in.assert_nothing_is_left();
}

#[test]
fn one_that_someone_else_has_open_is_used_and_left_open() {
    let stand_in = StandIn::new();
    let someone = stand_in.driver();
    // Loaded once more, as another part of the program would.
    stand_in.fail("cuFileDriverOpen", 5026);
    let driver = stand_in.driver();
    assert!(driver.properties().is_ok());
    drop(driver);
    assert_eq!(stand_in.count("users"), 1);
    drop(someone);
    stand_in.assert_nothing_is_left();
}

#[test]
fn its_properties_can_be_read_and_set() {
    let stand_in = StandIn::new();
    let driver = stand_in.driver();
    let properties = driver.properties().unwrap();
    assert_eq!((properties.nvfs.major_version, properties.nvfs.minor_version), (2, 25));
    assert_eq!((properties.max_batch_io_size, properties.per_buffer_cache_size), (128, 1024));
    assert!(properties.supports(CUfileDriverStatusFlags_t::CU_FILE_NVME_SUPPORTED));
    assert!(!properties.supports(CUfileDriverStatusFlags_t::CU_FILE_LUSTRE_SUPPORTED));
    assert!(!properties.supports(CUfileDriverStatusFlags_t(40)));
    assert!(properties.uses(CUfileDriverControlFlags_t::CU_FILE_ALLOW_COMPAT_MODE));
    assert!(properties.has(CUfileFeatureFlags_t::CU_FILE_STREAMS_SUPPORTED));

    driver.set_poll_mode(true, 64).unwrap();
    driver.set_max_direct_io(8192).unwrap();
    driver.set_max_cache(4096).unwrap();
    driver.set_max_pinned(2048).unwrap();
    let properties = driver.properties().unwrap();
    assert_eq!((properties.nvfs.poll_thresh_size, properties.nvfs.max_direct_io_size), (64, 8192));
    assert_eq!((properties.max_device_cache_size, properties.max_device_pinned_mem_size), (4096, 2048));
    assert!(properties.uses(CUfileDriverControlFlags_t::CU_FILE_USE_POLL_MODE));
    assert_eq!(driver.bar_size(0), Ok(1 << 20));
    assert_eq!(driver.bar_size(1).unwrap_err().status().unwrap().0, 5022);
    assert!(driver.bar_size(u32::MAX).is_err());
}

#[test]
fn closed_under_its_users_every_call_is_an_error_and_every_drop_is_quiet() {
    let stand_in = StandIn::new();
    let driver = stand_in.driver();
    let file = driver.register_file(crate::file(b"bytes")).unwrap();
    let mut memory = [0_u8; 5];
    // SAFETY: the memory outlives the buffer.
    let buffer = unsafe { driver.register_buffer(memory.as_ptr().cast(), 5) }.unwrap();
    stand_in.close();
    // SAFETY: the memory is 5 bytes long.
    let read = unsafe { file.read(memory.as_mut_ptr().cast(), 5, 0, 0) };
    assert_eq!(read.unwrap_err().status().unwrap().0, 5001);
    assert_eq!(driver.properties().unwrap_err().status().unwrap().0, 5001);
    drop(buffer);
    drop(file);
    let errors = driver.take_errors();
    let functions: Vec<&str> = errors.iter().map(cufile_sys::Error::function).collect();
    assert_eq!(functions, ["cuFileBufDeregister"]);
    assert!(driver.take_errors().is_empty());
    drop(driver);
    assert_eq!((stand_in.count("users"), stand_in.count("misuse")), (0, 0));
}
