//! What steps would have taken if the device's clock had run alike in all of them. One whose power is limited runs slower and faster by some
//! percent from step to step, and most of what steps vary by is that.

/// If the clock is slower by one percent, a step takes so many percent longer, give or take the next: most of it computes, and the rest goes by
/// the clock of the memory.
const FOLLOWS: f64 = 0.8;
const FOLLOWS_DOUBT: f64 = 0.2;
const FOLLOWS_AT_MOST: [f64; 2] = [0.4, 1.0];
/// Steps at one clock vary by about so much.
pub(super) const TYPICAL: f64 = 0.002;
/// The clock of single steps varies by about so much, and by no less: a few run alike by chance now and then.
const VARIES: f64 = 0.015;
/// What planned steps do besides takes power too, but little of it while multiprocessors wait for memory or for transfers: by so much of what
/// each takes besides, a slower clock makes steps longer still, or by so much of all if it is not known which waits; give or take the last.
const WHILE_IDLE: f64 = -0.1;
const WHILE_BUSY: f64 = 0.2;
const ON_AVERAGE: f64 = 0.09;
const BY_POWER_DOUBT: f64 = 0.1;
/// A device whose clock varied by no more than this share, as a standard deviation, in more than two steps of each kind is not at the limit
/// of its power. In a few it may have run alike by chance.
const STEADY: f64 = 0.006;
const FEW: usize = 2;

/// Steps are alike if their sizes differ by no more than this share.
const ALIKE: f64 = 0.01;

/// A step that counts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timed {
    /// How many times what is planned it saved.
    pub(super) scale: f64,
    /// Seconds that it took for as much as is planned, and those of them in which the device waited for what was to come back.
    pub(super) wall: f64,
    pub(super) stall: f64,
    /// Cycles of the device in a second, if that is known.
    pub(super) clock: Option<f64>,
}

impl Timed {
    /// The part of what it took in which the device did not wait.
    fn computed(&self) -> f64 {
        self.wall - self.stall
    }
}

/// The clock in two kinds of steps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clocks {
    follows: f64,
    /// The mean of those that kept everything, as a logarithm.
    kept: f64,
    /// By how much it was faster in planned steps, as a share, and the standard error of that.
    faster: f64,
    error: f64,
    /// By how much it varied in all, and how many steps of each kind there are.
    deviation: f64,
    count: usize,
}

impl Clocks {
    /// `None` unless that of each step is known, and there are two of each kind.
    pub(super) fn of(kept: &[Timed], planned: &[Timed]) -> Option<Clocks> {
        let kinds = [kept, planned].map(|steps| steps.iter().map(Point::of).collect::<Option<Vec<_>>>());
        let [Some(kept), Some(planned)] = kinds else { return None };
        let fewest = kept.len().min(planned.len());
        if fewest < FEW {
            return None;
        }
        let [kept_clock, planned_clock] =
            [&kept, &planned].map(|points| mean(points.iter().map(|point| point.clock)));
        // Steps of another kind or size take another time whatever the clock.
        let mut certain = (TYPICAL / FOLLOWS_DOUBT).powi(2);
        let mut told = FOLLOWS * certain;
        let mut varies = 0.0;
        for (points, kind) in [(&kept, kept_clock), (&planned, planned_clock)] {
            for point in points {
                let alike = || points.iter().filter(|other| is_alike(other.scale, point.scale));
                let faster = point.clock - mean(alike().map(|other| other.clock));
                let longer = point.wall - mean(alike().map(|other| other.wall));
                certain += faster.powi(2);
                told -= faster * longer;
                varies += (point.clock - kind).powi(2);
            }
        }
        let varies = (varies / (kept.len() + planned.len() - 2) as f64).max(VARIES.powi(2));
        let [least, most] = FOLLOWS_AT_MOST;
        let all = || kept.iter().chain(&planned).map(|point| point.clock);
        let all_clock = mean(all());
        let deviation = mean(all().map(|clock| (clock - all_clock).powi(2))).sqrt();
        Some(Clocks {
            follows: (told / certain).clamp(least, most),
            kept: kept_clock,
            faster: planned_clock - kept_clock,
            error: (varies * 2.0 / fewest as f64).sqrt(),
            deviation,
            count: fewest,
        })
    }

    /// Whether they varied at all, so that they may explain what steps vary by.
    pub(super) fn vary(&self) -> bool {
        self.deviation > STEADY
    }

    /// Whether they surely do not.
    pub(super) fn are_steady(&self) -> bool {
        self.count > FEW && !self.vary()
    }

    /// What a step would have taken at the clock of those that kept everything. Transfers take their time at any clock, so one that waited
    /// for them waits the less, the longer it computes, and the longer, the less it does; but no more than for as long again.
    pub(super) fn steadied(&self, timed: &Timed) -> Timed {
        let faster = timed.clock.map_or(0.0, |clock| clock.ln() - self.kept);
        let longer = timed.computed() * (self.follows * faster).exp_m1();
        let stall = timed.stall - longer.clamp(-timed.stall, timed.stall);
        Timed { wall: timed.computed() + longer + stall, stall, ..*timed }
    }

    /// By how much planned steps are longer because their clock is slower, if they are longer by the share `extra` at one clock, in `idle` of
    /// which multiprocessors wait, and the standard error of that. Chance makes it slower and faster, so what is seen of it counts as much as
    /// it is certain.
    pub(super) fn slower(&self, extra: f64, idle: Option<f64>) -> [f64; 2] {
        if self.are_steady() {
            return [0.0, 0.0];
        }
        let extra = extra.max(0.0);
        let expected = match idle.map(|idle| idle.clamp(0.0, extra)) {
            Some(idle) => WHILE_IDLE * idle + WHILE_BUSY * (extra - idle),
            None => ON_AVERAGE * extra,
        };
        let doubt = BY_POWER_DOUBT * extra;
        let [seen, error] = [-self.faster, self.error].map(|share| self.follows * share);
        let both = doubt.powi(2) + error.powi(2);
        let known = if both > 0.0 { doubt.powi(2) / both } else { 0.0 };
        [expected + known * (seen - expected), known.sqrt() * error]
    }
}

/// Whether two sizes are alike.
pub(super) fn is_alike(scale: f64, other: f64) -> bool {
    (scale / other - 1.0).abs() <= ALIKE
}

/// A step's size, and the logarithms of its clock and of what it computed for.
struct Point {
    scale: f64,
    clock: f64,
    wall: f64,
}

impl Point {
    fn of(timed: &Timed) -> Option<Point> {
        let clock = timed.clock.filter(|clock| clock.is_finite() && *clock > 0.0)?;
        Some(Point {
            scale: timed.scale,
            clock: clock.ln(),
            wall: timed.computed().max(f64::MIN_POSITIVE).ln(),
        })
    }
}

fn mean(numbers: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = numbers.fold((0.0, 0), |(sum, count), number| (sum + number, count + 1));
    sum / f64::from(count.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLOCK: f64 = 1.4e9;

    /// A step that takes so long at the usual clock, when it runs at so many times that.
    fn step(wall: f64, times: f64) -> Timed {
        Timed { scale: 1.0, wall: wall / times.powf(0.82), stall: 0.0, clock: Some(CLOCK * times) }
    }

    #[test]
    fn steps_that_differ_by_their_clock_alone_are_alike() {
        let [kept, planned] = [(0.4, [1.02, 0.99, 1.0, 1.03]), (0.41, [0.98, 1.01, 1.04, 0.99])]
            .map(|(wall, clocks)| clocks.map(|times| step(wall, times)));
        let clocks = Clocks::of(&kept, &planned).unwrap();
        let steadied = |steps: [Timed; 4]| steps.map(|timed| clocks.steadied(&timed).wall);
        let [kept, planned] = [steadied(kept), steadied(planned)];
        for (planned, kept) in planned.into_iter().zip(kept) {
            assert!((planned / kept - 1.025).abs() < 0.0003, "{planned} {kept}");
        }
        assert!((kept[0] / 0.4 - 1.0).abs() < 0.01, "as long as they were in the mean");
    }

    #[test]
    fn a_step_that_waits_for_transfers_takes_as_long_at_a_slower_clock_as_those_that_do_not_wait() {
        let kept = [1.0, 0.99, 1.01, 1.0].map(|times| step(0.3, times));
        let planned = [1.0, 1.0, 0.99, 1.0].map(|times| step(0.306, times));
        // At a faster clock, it has computed before its transfers are done.
        let fast = Timed { wall: 0.3 + 0.0004, stall: 0.3004 - step(0.306, 1.05).wall, ..step(0.306, 1.05) };
        let slow = Timed { wall: step(0.306, 0.95).wall + 0.002, stall: 0.002, ..step(0.306, 0.95) };
        let clocks = Clocks::of(&kept, &planned).unwrap();
        let usual = clocks.steadied(&planned[0]).wall;
        let [fast, slow] = [fast, slow].map(|timed| clocks.steadied(&timed).wall / usual);
        assert!((fast - 1.0).abs() < 0.001, "{fast}");
        assert!((1.01..1.015).contains(&slow), "it may wait as long again: {slow}");
    }

    #[test]
    fn steps_that_take_as_long_as_their_transfers_do_so_at_one_clock() {
        for f in [0.01, 0.02, 0.03] {
            let kept = [1.0 - f, 1.0 + f, 1.0 + f, 1.0 - f].map(|times| step(0.3, times));
            let planned = [1.0 - f, 1.0 + f, 1.0 - f, 1.0 + f].map(|times| {
                let computed = step(0.306, times);
                Timed { wall: 0.33, stall: 0.33 - computed.wall, ..computed }
            });
            let clocks = Clocks::of(&kept, &planned).unwrap();
            let walls = planned.map(|timed| clocks.steadied(&timed).wall);
            assert!(walls.iter().all(|wall| (wall / 0.33 - 1.0).abs() < 0.002), "{walls:?}");
        }
    }

    /// What a slower clock makes of planned steps that take so much longer at one clock, if each kind ran at so many times the usual one.
    fn slower(extra: f64, kept: &[f64], planned: &[f64]) -> [f64; 2] {
        slower_if(None, extra, kept, planned)
    }

    /// The same, if multiprocessors wait in this share of what they take longer.
    fn slower_if(idle: Option<f64>, extra: f64, kept: &[f64], planned: &[f64]) -> [f64; 2] {
        let steps =
            |wall: f64, clocks: &[f64]| clocks.iter().map(|times| step(wall, *times)).collect::<Vec<_>>();
        let clocks = Clocks::of(&steps(0.4, kept), &steps(0.4 + 0.4 * extra, planned)).unwrap();
        clocks.slower(extra, idle.map(|idle| idle * extra))
    }

    #[test]
    fn a_slower_clock_of_planned_steps_counts_as_far_as_it_is_no_chance() {
        let [few, doubt] = slower(0.1, &[1.0, 1.03, 1.0, 0.97], &[0.97, 1.0, 0.97, 0.94]);
        let [many, less] = slower(0.1, &[1.0, 1.03, 1.0, 0.97].repeat(3), &[0.97, 1.0, 0.97, 0.94].repeat(3));
        assert!(0.009 < few && few < many && many < 0.025, "{few} {many}");
        assert!(less < doubt && doubt < 0.01, "{doubt} {less}");
        let [expected, _] = slower(0.1, &[1.0, 1.03, 1.0, 0.97], &[0.99, 1.02, 0.99, 0.96]);
        assert!((0.008..0.009).contains(&expected), "{expected}");
    }

    #[test]
    fn what_waits_for_memory_takes_less_power_than_the_rest() {
        let clocks = [1.0, 1.03, 1.0, 0.97];
        let slower = |idle| slower_if(idle, 0.05, &clocks, &clocks)[0];
        let [all, none, unknown] = [Some(1.0), Some(0.0), None].map(slower);
        assert!(all < -0.004 && 0.004 < unknown && 2.0 * unknown < none, "{all} {unknown} {none}");
        assert_eq!(all, slower(Some(3.0)), "it is no more than all");
    }

    #[test]
    fn a_few_steps_at_one_clock_by_chance_do_not_make_it_certain_that_it_is_another() {
        // Two of a program with AdamW ran so, and in turns with steps without the cache it took 1.8 % more in all.
        let [slower, error] = slower(0.0225, &[1.0, 1.007], &[0.967, 0.959]);
        assert!((0.002..0.004).contains(&slower) && error < 0.0025, "{slower} {error}");
    }

    #[test]
    fn a_clock_that_hardly_varies_says_that_nothing_is_slower_for_want_of_power() {
        // A ResNet-50 whose images fill an H200 ran so.
        let kept = [1.916, 1.911, 1.902, 1.902];
        assert_eq!(slower(0.05, &kept, &[1.916, 1.91, 1.915, 1.907]), [0.0, 0.0]);
        let [varied, _] = slower(0.05, &kept, &[1.93, 1.90, 1.88, 1.94]);
        let [chance, _] = slower(0.05, &[1.0, 1.001], &[0.999, 1.0]);
        assert!(varied > 0.0 && chance > 0.0);
    }

    #[test]
    fn nothing_is_told_by_steps_without_a_clock() {
        let known = [step(0.4, 1.0), step(0.4, 1.01)];
        let unknown = [known[0], Timed { clock: None, ..known[1] }];
        assert!(Clocks::of(&known, &unknown).is_none() && Clocks::of(&unknown, &known).is_none());
        assert!(Clocks::of(&known, &known[..1]).is_none());
    }
}
