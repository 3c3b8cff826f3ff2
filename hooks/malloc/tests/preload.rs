//! The hook in front of programs: fake CUDA and cuFile libraries, and a thousand random allocations and frees.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod support;

use support::{Bench, Report};

const ON: &[(&str, &str)] = &[("SSDTRAIN_MALLOC_HOOK", "1")];

/// Halfway, everything live is registered; at the end nothing is; and nothing forbidden happened. Memory that was
/// freed before its turn was never registered.
fn registered_throughout(report: &Report) {
    let live = report.number("first.really_live");
    assert!(live > 0, "{}", report.errors);
    for name in ["live", "registered", "really_registered", "found"] {
        assert_eq!(report.number(&format!("first.{name}")), live, "{name}");
        assert_eq!(report.number(&format!("last.{name}")), 0, "{name}");
    }
    assert_eq!(report.number("first.waited"), 0);
    assert!(report.number("last.registrations") >= live);
    assert!(report.number("last.registrations") <= report.number("last.allocations"));
    assert_eq!(report.number("last.asked"), report.number("last.registrations"), "each is tried once");
    assert_eq!(report.number("last.deregistrations"), report.number("last.registrations"));
    assert_eq!(report.number("last.frees"), report.number("last.allocations"));
    assert_eq!(report.number("last.refusals"), 0);
    assert_eq!(report.number("last.unknown_frees"), 0);
    assert_eq!(report.number("last.opened"), 1, "cuFile is opened once");
    assert_eq!(report.number("last.violations"), 0, "{}", report.errors);
}

fn nothing_left(report: &Report, when: &str) {
    for name in ["live", "registered", "really_registered", "violations"] {
        assert_eq!(report.number(&format!("{when}.{name}")), 0, "{when}: {name}\n{}", report.errors);
    }
}

fn nothing_registered(report: &Report, when: &str) {
    for name in ["registrations", "registered", "really_registered", "found", "violations"] {
        assert_eq!(report.number(&format!("{when}.{name}")), 0, "{when}: {name}");
    }
}

#[test]
fn memory_of_the_runtime_is_registered_while_it_lives() {
    registered_throughout(&Bench::new().run("plain", ON));
}

#[test]
fn memory_of_the_driver_is_registered_while_it_lives() {
    registered_throughout(&Bench::new().run("driver", ON));
}

#[test]
fn memory_of_pools_is_registered_while_it_lives() {
    registered_throughout(&Bench::new().run("pool", ON));
}

#[test]
fn mapped_memory_is_registered_while_it_is_accessible_however_the_calls_were_found() {
    let bench = Bench::new();
    for mode in ["by_version", "by_name", "by_driver", "by_lookup_of_lookup"] {
        registered_throughout(&bench.run(mode, ON));
    }
}

#[test]
fn a_module_that_is_loaded_for_itself_alone_is_seen() {
    let bench = Bench::new();
    for mode in ["plain", "driver", "by_version", "by_driver"] {
        registered_throughout(&bench.run_as_module(mode, ON));
    }
}

#[test]
fn memory_waits_for_its_registration_while_cufile_opens() {
    let variables = [("SSDTRAIN_MALLOC_HOOK", "1"), ("STAND_IN_OPENS_SLOWLY", "1")];
    let report = Bench::new().run("plain", &variables);
    registered_throughout(&report);
    let never = report.number("last.allocations") - report.number("last.registrations");
    assert!(never > 0, "the threads went on meanwhile");
}

#[test]
fn an_allocation_does_not_wait_for_a_registration_nor_the_free_of_memory_that_waits_for_its_own() {
    for mode in ["free", "open_free"] {
        let report = Bench::new().run_held(mode, ON);
        assert_eq!(report.number("held.live"), 3, "{mode}");
        assert_eq!(report.number("held.registered"), 0, "{mode}");
        assert_eq!(report.number("freed_one.live"), 2, "{mode}");
        assert_eq!(report.number("freed_two.live"), 1, "{mode}");
        assert_eq!(report.number("waited"), 0, "{mode}");
        assert_eq!(report.number("let_go.registered"), 1, "{mode}");
        nothing_left(&report, "last");
    }
}

#[test]
fn a_free_waits_for_the_registration_under_way_of_its_own_memory_and_no_other() {
    let report = Bench::new().run_held("free", ON);
    let before = report.number("held.registrations");
    assert_eq!(report.number("freed_two.registrations"), before + 1, "that of the memory that is freed");
    assert_eq!(report.number("freed_two.really_registered"), 0, "it is undone");
    nothing_left(&report, "last");
}

#[test]
fn the_free_of_memory_does_not_wait_while_cufile_opens() {
    let report = Bench::new().run_held("open_free", ON);
    assert_eq!(report.number("freed_two.registrations"), 0);
    assert_eq!(report.number("last.registrations"), 1, "that of the memory that was left");
}

#[test]
fn waiting_ends_when_all_that_is_live_is_registered() {
    let report = Bench::new().run_held("wait", ON);
    assert_eq!(report.number("waited"), 0);
    assert_eq!(report.number("waited.live"), 2);
    assert_eq!(report.number("waited.really_registered"), 2);
    nothing_left(&report, "last");
}

#[test]
fn turning_off_undoes_the_registration_under_way() {
    let report = Bench::new().run_held("off", ON);
    assert_eq!(report.number("was"), 1);
    nothing_left(&report, "off");
    assert_eq!(report.number("waited"), -1, "there is nothing to wait for");
    nothing_left(&report, "last");
}

#[test]
fn a_fork_waits_for_nothing_that_its_parent_does() {
    for mode in ["fork", "open_fork"] {
        let report = Bench::new().run_held(mode, ON);
        assert_eq!(report.number("child"), 0, "{mode}");
        nothing_left(&report, "last");
    }
}

#[test]
fn a_process_ends_after_the_call_of_cufile_that_is_under_way() {
    // The fake cuFile aborts the process if it is shut down in the middle of a call, or called after that.
    for mode in ["exit", "open_exit"] {
        let report = Bench::new().run_held(mode, ON);
        assert_eq!(report.number("last.live"), 2, "{mode}");
        assert_eq!(report.number("last.registered"), 0, "{mode}");
    }
}

#[test]
fn the_hook_is_off_until_it_is_asked_for() {
    let bench = Bench::new();
    for mode in ["plain", "driver", "pool", "by_version"] {
        let report = bench.run(mode, &[]);
        nothing_registered(&report, "first");
        nothing_registered(&report, "last");
        assert_eq!(report.number("last.allocations"), 0);
        assert_eq!(report.number("last.opened"), 0, "cuFile is not even loaded");
    }
}

#[test]
fn memory_from_before_the_hook_is_left_alone_and_turning_it_off_undoes_the_rest() {
    let report = Bench::new().run("switched", &[]);
    nothing_registered(&report, "first");
    assert_eq!(report.number("was"), 0);
    nothing_registered(&report, "on");
    let registered = report.number("second.really_registered");
    assert!(registered > 0);
    assert_eq!(report.number("second.registered"), registered);
    assert_eq!(report.number("second.live"), registered);
    assert!(report.number("second.unknown_frees") > 0, "some was older than the hook");
    assert_eq!(report.number("was_on"), 1);
    for name in ["live", "registered", "really_registered", "violations"] {
        assert_eq!(report.number(&format!("off.{name}")), 0, "{name}");
        assert_eq!(report.number(&format!("last.{name}")), 0, "{name}");
    }
    assert_eq!(report.number("last.frees"), report.number("off.frees"), "off, frees are not looked at");
}

/// Memory that was live halfway was refused, and nothing was requested twice.
fn refused_throughout(report: &Report) {
    nothing_registered(report, "last");
    assert_eq!(report.number("first.live"), report.number("first.really_live"));
    assert!(report.number("last.refusals") >= report.number("first.live"));
    assert!(report.number("last.refusals") <= report.number("last.allocations"));
}

#[test]
fn refused_registrations_are_counted_and_the_program_goes_on() {
    let variables = [("SSDTRAIN_MALLOC_HOOK", "1"), ("STAND_IN_REFUSES", "all")];
    let report = Bench::new().run("plain", &variables);
    refused_throughout(&report);
    assert_eq!(report.number("last.asked"), report.number("last.refusals"), "each is tried once");
    assert_eq!(report.number("last.last_error"), 5036);
}

#[test]
fn mapped_memory_that_is_refused_is_not_tried_again() {
    let variables = [("SSDTRAIN_MALLOC_HOOK", "1"), ("STAND_IN_REFUSES", "all")];
    let report = Bench::new().run("by_version", &variables);
    refused_throughout(&report);
    assert_eq!(report.number("last.asked"), report.number("last.refusals"));
}

#[test]
fn some_registrations_may_be_refused_and_others_not() {
    let variables = [("SSDTRAIN_MALLOC_HOOK", "1"), ("STAND_IN_REFUSES", "large")];
    let report = Bench::new().run("plain", &variables);
    let (accepted, refused) = (report.number("last.registrations"), report.number("last.refusals"));
    assert!(accepted > 0 && refused > 0);
    assert_eq!(accepted + refused, report.number("last.asked"));
    assert!(report.number("first.registered") > 0);
    assert!(report.number("first.registered") < report.number("first.live"));
    assert_eq!(report.number("last.deregistrations"), accepted);
    assert_eq!(report.number("last.really_registered"), 0);
    assert_eq!(report.number("last.violations"), 0);
}

#[test]
fn pools_are_asked_for_no_more_once_they_are_refused() {
    let variables = [("SSDTRAIN_MALLOC_HOOK", "1"), ("STAND_IN_REFUSES", "all")];
    let report = Bench::new().run("pool", &variables);
    refused_throughout(&report);
    assert_eq!(report.number("last.asked"), 1);
}

#[test]
fn what_a_graph_allocates_is_left_alone() {
    let report = Bench::new().run("captured", ON);
    assert_eq!(report.number("captured.allocations"), report.number("first.allocations"));
    assert_eq!(report.number("captured.violations"), 0);
}

#[test]
fn the_thread_has_a_name_and_does_not_take_the_place_of_who_wakes_it() {
    let policy = libc::SCHED_BATCH | libc::SCHED_RESET_ON_FORK;
    assert_eq!(Bench::new().run_held("wait", ON).number("policy"), policy.into());
}

#[test]
fn without_its_thread_the_hook_refuses_and_tries_again_for_later_memory() {
    let report = Bench::new().run_held("threadless", ON);
    assert_eq!(report.number("waited"), 0, "nothing is left waiting");
    assert_eq!(report.number("without.refusals"), 1);
    assert_eq!(report.number("without.last_error"), -2);
    assert_eq!((report.number("with.live"), report.number("with.really_registered")), (2, 1));
    nothing_left(&report, "last");
}

#[test]
fn without_cufile_the_program_goes_on() {
    let bench = Bench::new();
    bench.remove_cufile();
    let report = bench.run("plain", ON);
    refused_throughout(&report);
    assert_eq!(report.number("last.last_error"), -1);
}

#[test]
fn a_cufile_that_does_not_open_is_asked_once() {
    let variables = [("SSDTRAIN_MALLOC_HOOK", "1"), ("STAND_IN_HAS_NO_DRIVER", "1")];
    let report = Bench::new().run("plain", &variables);
    refused_throughout(&report);
    assert_eq!(report.number("last.opened"), 1);
    assert_eq!(report.number("last.asked"), 0);
    assert_eq!(report.number("last.last_error"), 5001);
}

#[test]
fn memory_may_be_freed_after_the_end_of_main() {
    let report = Bench::new().run("leaves", ON);
    // cuFile has been shut down by then, and the fake one aborts the process if it is called.
    assert_eq!(report.number("end.registered"), 1);
}

#[test]
fn a_fork_leaves_its_parents_registrations_alone() {
    let report = Bench::new().run("forks", ON);
    assert_eq!(report.number("child"), 0);
    registered_throughout(&report);
}

#[test]
fn a_report_is_printed_at_the_end_if_asked_for() {
    let bench = Bench::new();
    let variables = [("SSDTRAIN_MALLOC_HOOK", "1"), ("SSDTRAIN_MALLOC_HOOK_REPORT", "1")];
    let report = bench.run("plain", &variables);
    let line = report.errors.lines().find(|line| line.starts_with("ssdtrain-malloc-hook: ")).unwrap();
    assert!(line.contains(&format!("{} registrations", report.number("last.registrations"))), "{line}");
    assert!(!bench.run("plain", ON).errors.contains("ssdtrain-malloc-hook"));
}

#[test]
fn programs_without_cuda_run_as_ever_and_report_nothing() {
    let bench = Bench::new();
    let variables = [("SSDTRAIN_MALLOC_HOOK", "1"), ("SSDTRAIN_MALLOC_HOOK_REPORT", "1")];
    assert_eq!(bench.run_without_cuda(&variables), "");
}
