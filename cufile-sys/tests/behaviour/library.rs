//! Finding the library, and functions that it lacks.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use cufile_sys::{Cause, Driver, Library, Search, VARIABLE, Version};

use crate::stand_in::StandIn;

#[test]
fn the_path_given_comes_first() {
    let stand_in = StandIn::new();
    let library = Search::new().path(stand_in.path()).load().unwrap();
    assert_eq!(library.path(), stand_in.path());
}

#[test]
fn a_path_that_fails_is_tried_and_the_search_goes_on() {
    let stand_in = StandIn::new();
    let torch = beside_torch(&stand_in, "cu13");
    let search = Search::new().path("/nowhere/libcufile.so").beside(torch.path().join("torch/lib"));
    let all = search.candidates();
    assert_eq!(all[0], Path::new("/nowhere/libcufile.so"));
    // The system's own, if there is one, otherwise the wheel's.
    let library = search.load().unwrap();
    assert!(all[1..].contains(&library.path().to_path_buf()), "{library:?}");
}

#[test]
fn the_order_is_path_variable_system_wheels_toolkit() {
    let torch = tempfile::tempdir().unwrap();
    let all = Search::new().path("/own/libcufile.so").beside(torch.path()).candidates();
    let at = |part: &str| all.iter().position(|path| path.to_string_lossy().contains(part)).unwrap();
    let order = [
        at("/own/"),
        all.iter().position(|path| path == Path::new("libcufile.so.0")).unwrap(),
        all.iter().position(|path| path == Path::new("libcufile.so")).unwrap(),
        at("nvidia/cu13/lib/libcufile.so.0"),
        at("nvidia/cufile/lib/libcufile.so.0"),
        at("/usr/local/cuda/lib64/libcufile.so.0"),
        at("/usr/local/cuda/targets/x86_64-linux/lib/libcufile.so.0"),
    ];
    assert!(order.is_sorted(), "{all:?}");
}

#[test]
fn a_library_that_is_nowhere_is_an_error_that_lists_the_path() {
    let error = Library::open("/nowhere/libcufile.so.0").unwrap_err();
    assert_eq!(error.tried().len(), 1);
    let message = error.to_string();
    assert!(message.contains("/nowhere/libcufile.so.0: "), "{message}");
    assert!(message.contains("No such file"), "{message}");
}

#[test]
fn the_wheels_are_found_beside_torch_through_links() {
    let stand_in = StandIn::new();
    for wheel in ["cu13", "cufile"] {
        let site = beside_torch(&stand_in, wheel);
        // As in a checkout: a link to torch, which is somewhere else.
        let checkout = tempfile::tempdir().unwrap();
        let link = checkout.path().join(".libtorch");
        symlink(site.path().join("torch"), &link).unwrap();
        let found: Vec<PathBuf> = Search::new()
            .beside(link.join("lib"))
            .candidates()
            .into_iter()
            .filter(|path| path.is_file())
            .collect();
        let expected = site.path().join("nvidia").join(wheel).join("lib/libcufile.so.0");
        let expected = expected.canonicalize().unwrap();
        assert!(found.iter().any(|path| path.canonicalize().unwrap() == expected), "{found:?}");
        let found = found.into_iter().find(|path| path.canonicalize().unwrap() == expected).unwrap();
        assert!(Library::open(found).is_ok());
    }
}

/// Packages as pip installs them: torch, and the stand-in as NVIDIA's wheel.
fn beside_torch(stand_in: &StandIn, wheel: &str) -> tempfile::TempDir {
    let site = tempfile::tempdir().unwrap();
    let lib = site.path().join("nvidia").join(wheel).join("lib");
    fs::create_dir_all(site.path().join("torch/lib")).unwrap();
    fs::create_dir_all(&lib).unwrap();
    fs::copy(stand_in.path(), lib.join("libcufile.so.0")).unwrap();
    site
}

const INNER: &str = "STAND_IN_INNER_TEST";

/// Runs only the test with this name, in a process of its own with this environment; `None` inside that process.
fn in_a_process_of_its_own(name: &str, variables: &[(&str, &Path)]) -> Option<()> {
    if env::var_os(INNER).is_some() {
        return None;
    }
    let mut test = Command::new(env::current_exe().unwrap());
    test.args([&format!("library::{name}"), "--exact", "--nocapture"])
        .env(INNER, "1")
        .envs(variables.iter().copied());
    let output = test.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("1 passed"), "{said}");
    Some(())
}

#[test]
fn the_variable_names_a_library_that_comes_before_the_systems() {
    let stand_in = StandIn::new();
    let path = stand_in.path();
    if in_a_process_of_its_own(
        "the_variable_names_a_library_that_comes_before_the_systems",
        &[(VARIABLE, &path)],
    )
    .is_none()
    {
        let named = PathBuf::from(env::var_os(VARIABLE).unwrap());
        assert_eq!(Search::new().candidates()[0], named);
        assert_eq!(Search::new().path("/own").candidates()[1], named);
        assert_eq!(Search::new().load().unwrap().path(), named);
    }
}

#[test]
fn faults_of_the_stand_in_can_come_from_the_environment() {
    let faults = Path::new("cuFileDriverOpen=5011:999,cuFileGetVersion=5005");
    if in_a_process_of_its_own(
        "faults_of_the_stand_in_can_come_from_the_environment",
        &[("STAND_IN_FAIL", faults)],
    )
    .is_none()
    {
        let stand_in = StandIn::new();
        let error = Driver::open(&stand_in.open()).unwrap_err();
        assert_eq!(error.cause(), &Cause::Cuda(cufile_sys::sys::CUresult(999)));
        assert!(stand_in.open().version().is_err());
    }
}

#[test]
fn a_missing_function_is_an_error_of_the_call_that_needs_it_alone() {
    let stand_in = StandIn::without(&["cuFileGetStatsL1"]);
    let library = stand_in.open();
    let driver = Driver::open(&library).unwrap();
    assert_eq!(driver.statistics().unwrap_err().cause(), &Cause::Missing(stand_in.path()));
    assert_eq!(driver.statistics().unwrap_err().function(), "cuFileGetStatsL1");
    let message = driver.statistics().unwrap_err().to_string();
    assert!(message.contains(stand_in.path().to_str().unwrap()), "{message}");
    assert!(driver.properties().is_ok());
    drop(driver);
    stand_in.assert_nothing_is_left();
}

#[test]
fn what_a_drop_needs_is_looked_for_before_anything_is_registered() {
    let cases = ["cuFileHandleDeregister", "cuFileBufDeregister"];
    let stand_in = StandIn::without(&cases);
    let driver = stand_in.driver();
    let memory = [0_u8; 64];
    let file = driver.register_file(crate::file(b"")).map(drop).unwrap_err();
    // SAFETY: the memory outlives the buffer.
    let buffer = unsafe { driver.register_buffer(memory.as_ptr().cast(), 64) }.map(drop).unwrap_err();
    assert_eq!([file.function(), buffer.function()], cases);
    drop(driver);
    stand_in.assert_nothing_is_left();

    let stand_in = StandIn::without(&["cuFileDriverClose", "cuFileDriverClose_v2"]);
    assert_eq!(Driver::open(&stand_in.open()).unwrap_err().function(), "cuFileDriverClose");
    assert_eq!(stand_in.count("cuFileDriverOpen"), 0);
}

#[test]
fn the_driver_is_closed_by_the_newer_name_where_there_is_one() {
    let stand_in = StandIn::new();
    drop(stand_in.driver());
    assert_eq!(stand_in.count("cuFileDriverClose"), 0);
    assert_eq!(stand_in.count("cuFileDriverClose_v2"), 1);

    let stand_in = StandIn::without(&["cuFileDriverClose_v2"]);
    drop(stand_in.driver());
    assert_eq!(stand_in.count("cuFileDriverClose"), 1);
    stand_in.assert_nothing_is_left();
}

#[test]
fn the_version_is_told_apart() {
    let stand_in = StandIn::new();
    let library = stand_in.open();
    assert_eq!(library.version(), Ok(Version { major: 1, minor: 15 }));
    stand_in.set_version(1200);
    assert_eq!(library.version(), Ok(Version { major: 1, minor: 20 }));
    stand_in.fail("cuFileGetVersion", 5005);
    assert_eq!(library.version().unwrap_err().status().unwrap().0, 5005);
}
