//! Many transfers at once.

use std::sync::Arc;
use std::time::Duration;

use cufile_sys::sys::CUfileStatus_t;
use cufile_sys::{Batch, Cause, Direction, File, Request};

use crate::stand_in::StandIn;
use crate::{contents, file};

/// Memory, and a token that shows whether it is still owned.
type Owner = (Box<[u8]>, Arc<()>);

fn write(file: &File, bytes: &[u8], at: u64, token: &Arc<()>) -> Request<Owner> {
    request(file, Direction::Write, bytes, at, token)
}

fn request(file: &File, direction: Direction, bytes: &[u8], at: u64, token: &Arc<()>) -> Request<Owner> {
    let mut memory: Box<[u8]> = bytes.into();
    Request {
        file: file.clone(),
        direction,
        base: memory.as_mut_ptr().cast(),
        len: memory.len(),
        file_offset: at,
        memory_offset: 0,
        owner: (memory, Arc::clone(token)),
    }
}

fn submit(batch: &mut Batch<Owner>, requests: Vec<Request<Owner>>) {
    // SAFETY: each request owns its memory.
    unsafe { batch.submit(requests) }.unwrap();
}

#[test]
fn bytes_go_out_and_come_back_with_their_owners() {
    let stand_in = StandIn::new();
    let driver = stand_in.driver();
    let (os_file, token) = (file(b""), Arc::new(()));
    let registered = driver.register_file(Arc::clone(&os_file)).unwrap();
    let mut batch = driver.batch(4).unwrap();
    submit(&mut batch, vec![write(&registered, b"one", 0, &token), write(&registered, b"two", 3, &token)]);
    assert_eq!((batch.in_flight(), batch.room()), (2, 2));
    let done = batch.wait(2, None).unwrap();
    assert_eq!(contents(&os_file), b"onetwo");
    assert!(done.iter().all(|done| done.outcome == Ok(3) && done.owner.is_some()), "{done:?}");
    assert_eq!(batch.in_flight(), 0);
    drop(done);
    assert_eq!(Arc::strong_count(&token), 1);

    submit(&mut batch, vec![request(&registered, Direction::Read, b"-----", 1, &token)]);
    let done = batch.wait(1, None).unwrap().pop().unwrap();
    assert_eq!((done.outcome, &*done.owner.unwrap().0), (Ok(5), &b"netwo"[..]));
    assert!(batch.wait(1, None).unwrap().is_empty());
    drop((batch, registered, driver));
    stand_in.assert_nothing_is_left();
}

#[test]
fn what_is_under_way_is_owned_by_the_batch_until_it_completes() {
    let stand_in = StandIn::new();
    let driver = stand_in.driver();
    let (os_file, token) = (file(b""), Arc::new(()));
    let registered = driver.register_file(Arc::clone(&os_file)).unwrap();
    let mut batch = driver.batch(4).unwrap();
    stand_in.hold();
    submit(&mut batch, vec![write(&registered, b"one", 0, &token), write(&registered, b"two", 3, &token)]);
    drop((registered, driver));
    assert!(batch.wait(2, Some(Duration::ZERO)).unwrap().is_empty());
    stand_in.step(1);
    assert_eq!(batch.wait(1, None).unwrap().len(), 1);
    assert_eq!((Arc::strong_count(&token), stand_in.count("files")), (2, 1));
    stand_in.release();
    assert_eq!(batch.wait(1, None).unwrap().len(), 1);
    assert_eq!(contents(&os_file), b"onetwo");
    assert_eq!((Arc::strong_count(&token), stand_in.count("files")), (1, 0));
    drop(batch);
    stand_in.assert_nothing_is_left();
}

#[test]
fn a_wait_sleeps_until_enough_have_completed() {
    let stand_in = StandIn::new();
    let registered = stand_in.driver().register_file(file(b"")).unwrap();
    let mut batch = registered.driver().batch(4).unwrap();
    stand_in.hold();
    let token = Arc::new(());
    submit(&mut batch, vec![write(&registered, b"one", 0, &token)]);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| batch.wait(1, None).unwrap().len());
        stand_in.wait_held(1);
        stand_in.release();
        assert_eq!(waiter.join().unwrap(), 1);
    });
}

#[test]
fn a_failed_and_a_short_request_come_back_as_such() {
    let stand_in = StandIn::new();
    let registered = stand_in.driver().register_file(file(b"")).unwrap();
    let (mut batch, token) = (registered.driver().batch(4).unwrap(), Arc::new(()));
    stand_in.fail("batch", 5044);
    submit(&mut batch, vec![write(&registered, b"bytes", 64, &token)]);
    let done = batch.wait(1, None).unwrap().pop().unwrap();
    let error = done.outcome.unwrap_err();
    assert_eq!(error.status().unwrap().0, 5044);
    assert!(error.to_string().contains("5 bytes at 64 of descriptor"), "{error}");
    assert!(done.owner.is_some());

    stand_in.fail_with("batch", -1, libc::EIO);
    submit(&mut batch, vec![write(&registered, b"bytes", 0, &token)]);
    let error = batch.wait(1, None).unwrap().pop().unwrap().outcome.unwrap_err();
    assert_eq!(error.cause(), &Cause::State(CUfileStatus_t::CUFILE_FAILED));

    stand_in.fail("batch", 0);
    stand_in.shorten(2);
    submit(&mut batch, vec![write(&registered, b"bytes", 0, &token)]);
    assert_eq!(batch.wait(1, None).unwrap().pop().unwrap().outcome, Ok(2));
}

#[test]
fn more_than_there_is_room_for_comes_back_untouched() {
    let stand_in = StandIn::new();
    let registered = stand_in.driver().register_file(file(b"")).unwrap();
    let (mut batch, token) = (registered.driver().batch(1).unwrap(), Arc::new(()));
    let requests = vec![write(&registered, b"a", 0, &token), write(&registered, b"b", 1, &token)];
    // SAFETY: each request owns its memory.
    let refused = unsafe { batch.submit(requests) }.unwrap_err();
    assert_eq!((refused.requests.len(), stand_in.count("cuFileBatchIOSubmit")), (2, 0));
    assert!(refused.error.to_string().contains("2 requests, but the batch has room for 1"), "{refused:?}");
    assert_eq!(batch.in_flight(), 0);

    let far = write(&registered, b"a", 1 << 63, &token);
    // SAFETY: as above.
    let refused = unsafe { batch.submit(vec![far]) }.unwrap_err();
    assert_eq!((refused.requests.len(), stand_in.count("cuFileBatchIOSubmit")), (1, 0));
    // SAFETY: as above.
    assert!(unsafe { batch.submit(Vec::new()) }.is_ok());
    assert!(registered.driver().batch::<()>(0).is_err());
}

#[test]
fn a_refused_submission_is_kept_for_what_it_may_have_started() {
    let stand_in = StandIn::new();
    let driver = stand_in.driver();
    let (os_file, token) = (file(b""), Arc::new(()));
    let registered = driver.register_file(Arc::clone(&os_file)).unwrap();
    let mut batch = driver.batch(4).unwrap();
    // Two of three are started.
    stand_in.fail_with("batch partly", 5040, 2);
    let requests =
        (0_u8..3).map(|at| write(&registered, &[b'a' + at], at.into(), &token)).collect::<Vec<_>>();
    // SAFETY: each request owns its memory.
    let refused = unsafe { batch.submit(requests) }.unwrap_err();
    assert_eq!((refused.error.status().unwrap().0, refused.requests.len(), batch.in_flight()), (5040, 0, 3));
    let done = batch.wait(3, None).unwrap();
    assert_eq!((done.len(), contents(&os_file)), (2, b"ab".to_vec()));
    drop(done);
    assert_eq!(Arc::strong_count(&token), 2);
    drop((batch, registered));
    // The third may be under way for all that is known.
    assert_eq!((Arc::strong_count(&token), stand_in.count("files")), (2, 1));
    let errors = driver.take_errors();
    assert!(errors[0].to_string().contains("1 requests did not end"), "{errors:?}");
}

#[test]
fn a_drop_cancels_what_is_under_way_and_frees_it_afterwards() {
    let stand_in = StandIn::new();
    let driver = stand_in.driver();
    let token = Arc::new(());
    let registered = driver.register_file(file(b"")).unwrap();
    let mut batch = driver.batch(4).unwrap();
    stand_in.hold();
    submit(&mut batch, vec![write(&registered, b"one", 0, &token), write(&registered, b"two", 3, &token)]);
    drop(batch);
    assert_eq!(Arc::strong_count(&token), 1);
    assert!(driver.take_errors().is_empty());
    drop((registered, driver));
    stand_in.assert_nothing_is_left();
}

#[test]
fn cancelled_requests_complete_as_such() {
    let stand_in = StandIn::new();
    let registered = stand_in.driver().register_file(file(b"")).unwrap();
    let (mut batch, token) = (registered.driver().batch(4).unwrap(), Arc::new(()));
    stand_in.hold();
    submit(&mut batch, vec![write(&registered, b"one", 0, &token)]);
    batch.cancel().unwrap();
    let done = batch.wait(1, None).unwrap().pop().unwrap();
    assert_eq!(done.outcome.unwrap_err().cause(), &Cause::State(CUfileStatus_t::CUFILE_CANCELED));
    assert!(done.owner.is_some());
}

#[test]
fn a_drop_that_cannot_end_what_is_under_way_keeps_it_for_good() {
    let stand_in = StandIn::new();
    let driver = stand_in.driver();
    let (os_file, token) = (file(b""), Arc::new(()));
    let registered = driver.register_file(Arc::clone(&os_file)).unwrap();
    let mut batch = driver.batch(4).unwrap();
    stand_in.hold();
    submit(&mut batch, vec![write(&registered, b"late", 0, &token)]);
    stand_in.fail("cuFileBatchIOCancel", 5042);
    drop((batch, registered));
    assert_eq!(Arc::strong_count(&token), 2);
    let errors = driver.take_errors();
    assert_eq!(errors.len(), 2, "{errors:?}");
    assert_eq!(stand_in.count("cuFileBatchIODestroy"), 0);
    drop(driver);
    // It still runs, from memory and into a file that are still there.
    stand_in.release();
    assert_eq!(contents(&os_file), b"late");
    assert_eq!(stand_in.count("misuse"), 0);
}

#[test]
fn a_request_that_ran_out_of_time_keeps_its_memory() {
    let stand_in = StandIn::new();
    let registered = stand_in.driver().register_file(file(b"")).unwrap();
    let (mut batch, token) = (registered.driver().batch(4).unwrap(), Arc::new(()));
    for state in [CUfileStatus_t::CUFILE_TIMEOUT, CUfileStatus_t(0x80)] {
        stand_in.fail("batch state", state.0.cast_signed());
        submit(&mut batch, vec![write(&registered, b"one", 0, &token)]);
        let done = batch.wait(1, None).unwrap().pop().unwrap();
        assert!(done.owner.is_none());
        assert_eq!(done.outcome.unwrap_err().cause(), &Cause::State(state));
    }
    assert_eq!((Arc::strong_count(&token), batch.in_flight()), (3, 0));
}

#[test]
fn a_batch_that_is_refused_says_its_size() {
    let stand_in = StandIn::new();
    let driver = stand_in.driver();
    stand_in.fail("cuFileBatchIOSetUp", 5039);
    let error = driver.batch::<()>(128).map(drop).unwrap_err();
    assert!(error.to_string().contains("a batch of 128 requests"), "{error}");
    assert_eq!(error.status().unwrap().0, 5039);
}
