//! Parameters and statistics.

use cufile_sys::sys::{
    CUFileBoolConfigParameter_t as Switch, CUFileSizeTConfigParameter_t as Number,
    CUFileStringConfigParameter_t as Text,
};
use cufile_sys::{Cause, Driver};

use crate::file;
use crate::stand_in::StandIn;

#[test]
fn parameters_are_set_before_the_driver_is_open_and_read_at_any_time() {
    let stand_in = StandIn::new();
    let library = stand_in.open();
    for (index, (number, _)) in Number::ALL.iter().enumerate() {
        library.set_parameter_size(*number, 100 + index).unwrap();
    }
    for (index, (switch, _)) in Switch::ALL.iter().enumerate() {
        library.set_parameter_bool(*switch, index % 2 == 0).unwrap();
    }
    for (text, name) in Text::ALL {
        library.set_parameter_string(*text, name).unwrap();
    }
    let _driver = Driver::open(&library).unwrap();
    for (index, (number, _)) in Number::ALL.iter().enumerate() {
        assert_eq!(library.parameter_size(*number), Ok(100 + index));
        assert_eq!(library.parameter_range(*number), Ok((1, 256)));
    }
    for (index, (switch, _)) in Switch::ALL.iter().enumerate() {
        assert_eq!(library.parameter_bool(*switch), Ok(index % 2 == 0));
    }
    for (text, name) in Text::ALL {
        assert_eq!(library.parameter_string(*text).as_deref(), Ok(*name));
    }
    let error = library.set_parameter_bool(Switch::CUFILE_PARAM_FORCE_COMPAT_MODE, true).unwrap_err();
    assert_eq!(error.status().unwrap().0, 5026);
    assert!(error.to_string().contains("CUFILE_PARAM_FORCE_COMPAT_MODE"), "{error}");
}

#[test]
fn a_parameter_is_found_by_its_name() {
    let number = Number::CUFILE_PARAM_PROPERTIES_IO_BATCHSIZE;
    assert_eq!(Number::named("CUFILE_PARAM_PROPERTIES_IO_BATCHSIZE"), Some(number));
    assert_eq!(Switch::named("CUFILE_PARAM_PROPERTIES_IO_BATCHSIZE"), None);
}

#[test]
fn an_unknown_parameter_and_a_text_with_a_zero_byte_are_errors() {
    let stand_in = StandIn::new();
    let library = stand_in.open();
    let error = library.parameter_size(Number(99)).unwrap_err();
    assert_eq!(error.status().unwrap().0, 5022);
    assert!(error.to_string().contains("(99)"), "{error}");
    let error = library.set_parameter_string(Text::CUFILE_PARAM_LOG_DIR, "a\0b").unwrap_err();
    assert!(matches!(error.cause(), Cause::Argument(_)), "{error}");
}

/// Reads 5 bytes.
fn read(driver: &Driver) {
    let registered = driver.register_file(file(b"12345")).unwrap();
    let mut memory = [0_u8; 5];
    // SAFETY: the memory is 5 bytes long.
    unsafe { registered.read(memory.as_mut_ptr().cast(), 5, 0, 0) }.unwrap();
}

#[test]
fn statistics_count_at_three_levels() {
    let stand_in = StandIn::new();
    let driver = stand_in.driver();
    assert_eq!(driver.statistics().unwrap_err().status().unwrap().0, 5022);
    driver.start_statistics(3).unwrap();
    assert_eq!(driver.statistics_level(), Ok(3));
    read(&driver);
    let statistics = driver.statistics().unwrap();
    assert_eq!((statistics.read_ops.ok, statistics.read_bytes, statistics.write_bytes), (1, 5, 0));
    let sizes = driver.statistics_of_sizes().unwrap();
    assert_eq!((sizes.basic.read_bytes, sizes.read_size_kb_hist[0]), (5, 1));
    let gpus = driver.statistics_of_gpus().unwrap();
    assert_eq!((gpus.detailed.basic.read_bytes, gpus.num_gpus), (5, 1));
    driver.reset_statistics().unwrap();
    assert_eq!(driver.statistics().unwrap().read_bytes, 0);
    driver.stop_statistics().unwrap();
    driver.start_statistics(0).unwrap();
    assert_eq!(driver.statistics_level(), Ok(0));
    assert!(driver.start_statistics(4).is_err());
}

#[test]
fn statistics_of_a_later_release_do_not_overrun_and_are_not_misread() {
    let stand_in = StandIn::new();
    let driver = stand_in.driver();
    driver.start_statistics(3).unwrap();
    stand_in.set_version(1200);
    read(&driver);
    assert_eq!(driver.statistics().unwrap().read_bytes, 5);
    let errors = [driver.statistics_of_sizes().unwrap_err(), driver.statistics_of_gpus().unwrap_err()];
    for error in errors {
        assert!(error.to_string().contains("1.20"), "{error}");
    }
}
