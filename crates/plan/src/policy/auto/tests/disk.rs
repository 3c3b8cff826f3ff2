//! Plans, and the disk that they count on.

use super::*;

#[test]
fn a_disk_that_becomes_faster_is_used_again_within_five_steps() {
    let goal = Goal::overhead(0.02);
    let unthrottled = Run::planned(goal, profile(400.0)).report().prediction.peak();
    let mut run = Run::planned(goal, profile(20.0));
    assert!(run.report().prediction.peak() > 2 * unthrottled);
    let faster = |observed| Observation { written: Some(400e6), read: Some(400e6), ..observed };
    let steps = (1..=5).find(|_| {
        run.steps(1, faster);
        run.report().prediction.peak() == unthrottled
    });
    assert_eq!(steps, Some(2));
    run.steps(100, faster);
    assert_eq!(run.report().plans, 2, "and that is that");
}

#[test]
fn a_disk_of_another_speed_that_changes_no_plan_is_taken_note_of() {
    let mut run = Run::planned(Goal::overhead(0.02), profile(400.0));
    run.steps(3, |usual| usual);
    let before = run.report();
    run.steps(2, |usual| Observation { written: Some(800e6), read: Some(800e6), ..usual });
    let after = run.report();
    assert!(run.auto.is_settled() && after.plans == 1, "{before}\n{after}");
    assert!((after.machine.disk_write / before.machine.disk_write - 2.0).abs() < 0.1, "{before}\n{after}");
}

#[test]
fn a_day_of_steps_writes_no_more_than_it_may() {
    let mut run = Run::begin(Goal::overhead(0.02));
    // A step takes 600 ms: 144,000 a day.
    run.auto = run.auto.written_per_day(144_000 * 3 * MB);
    run.next_step();
    let objective = run.auto.objective;
    run.auto.kinds.profiled(&objective, 9, profile(400.0));
    let written = run.report().prediction.written;
    assert!((1..=3 * MB).contains(&written), "{written}");
}

/// What a run has written on each of `days` days, and what reports say at their ends. It takes steps all the time, up to a thousand alike.
/// At noon others write `others` bytes.
fn days(run: &mut Run, days: u32, others: u64) -> Vec<(u64, Vec<String>)> {
    const DAY: Duration = Duration::from_secs(86_400);
    const ALIKE: u32 = 1000;
    let mut past = Vec::new();
    for day in 1..=days {
        let (mut time, mut own, mut foreign) = (Duration::ZERO, 0, 0);
        while time < DAY {
            run.today = Today { day, written: own + foreign, left: DAY - time };
            run.next_step();
            let report = run.report();
            // What is not planned to be written may be written as well, but no more than this.
            own += (report.prediction.written * u64::from(ALIKE)).min(run.plan.most_written.unwrap());
            let observed = run.usual();
            time += ALIKE * observed.wall;
            foreign = if time >= DAY / 2 { others } else { 0 };
            let warnings = run.auto.warnings(&run.plan, &observed);
            run.ended(WHOLE, observed);
            if time >= DAY {
                past.push((own, warnings));
            }
        }
    }
    past
}

#[test]
fn no_day_takes_more_than_it_may_and_each_new_one_as_much_again() {
    let most = 144_000 * 3 * MB;
    for others in [0, most / 3, 2 * most] {
        let mut run = Run::begin(Goal::overhead(0.02));
        run.auto = run.auto.written_per_day(most);
        run.begun(profile(400.0));
        let past = days(&mut run, 4, others);
        for (own, warnings) in &past {
            let is_over = own + others > most;
            assert!(!is_over || (others > most && *own <= most / 2 + most / 100), "{own} beside {others}");
            assert!(*own > most / 3, "{own} beside {others}");
            let is_told = warnings.iter().any(|warning| warning.contains("until midnight UTC"));
            assert_eq!(is_told, is_over, "{warnings:?}");
        }
        let (first, last) = (past[0].0, past[3].0);
        assert!(first.abs_diff(last) < most / 50, "{past:?}");
    }
}

#[test]
fn a_limit_that_is_reached_ends_writing_until_the_next_day() {
    let most = 144_000 * 3 * MB;
    let mut run = Run::begin(Goal::overhead(0.02));
    run.auto = run.auto.written_per_day(most);
    run.begun(profile(400.0));
    let hour = Duration::from_secs(3600);
    for (day, written, left, writes) in
        [(1, 0, 24, true), (1, most, 12, false), (1, most + 1, 1, false), (2, 0, 24, true)]
    {
        run.today = Today { day, written, left: left * hour };
        run.next_step();
        assert_eq!(run.report().prediction.written > 0, writes, "day {day}: {written}");
        assert_eq!(run.plan.most_written, Some(most.saturating_sub(written)));
        let observed = run.usual();
        run.ended(WHOLE, observed);
    }
    assert!(run.auto.needs().days && !Auto::default().needs().days);
}
