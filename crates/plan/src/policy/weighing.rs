//! Steps that keep everything and planned ones, in turn, for comparison.

use std::time::Duration;

use super::clocks::{self, Clocks, Timed, is_alike};
use super::cost::{Cost, MOST, Told, Weight};
use super::sizes::{KeptSizes, apart, is_near, sizes};
use super::watch::{Seen, deviation, usual};

/// There is a result whenever as many steps of both kinds count, an even number of each, and these many at least.
const FEWEST: usize = 2;
/// How many steps of each kind do not count at first.
const UNCOUNTED: usize = 2;
/// Single steps of machines vary by about so much, and that counts as much as so many of them.
const TYPICAL: f64 = 0.01;
const TYPICAL_COUNT: usize = 2;
/// The same where only steps of other sizes tell what one would have taken: some sizes suit a machine better than those around them.
const TYPICAL_OF_SIZES: f64 = 0.02;
/// The clock explains what steps vary by if they do not by more than this share otherwise.
const MOST_APART: f64 = 2.0 * clocks::TYPICAL;
/// What recomputing takes is known once two steps differ by no more than this share of it.
const AGREEING: f64 = 0.05;
/// Steps of a plan are being compared with steps that keep everything.
///
/// Two steps that keep everything come first, and two that are planned. They do not count: each kind has to find its memory, and a machine
/// may be cold. Of every four others, the second and the third keep everything: a machine that becomes faster or slower meanwhile does so
/// for both kinds. Where sizes vary, it is the first and the last of the second four, so that most sizes that come in turn have steps of
/// both kinds.
#[derive(Clone, Debug)]
pub(super) struct Weighing {
    /// The steps that were the reason, if it is not that the plan is new.
    pub(super) seen: Option<Seen>,
    /// What was known before.
    pub(super) cost: Cost,
    /// What the plan takes in which multiprocessors wait, for memory or for transfers, as a share of a step that keeps everything, if that is
    /// known.
    pub(super) idle: Option<f64>,
    /// The last result.
    pub(super) last: Option<Weight>,
    opening: Opening,
    /// How many steps that were to keep everything have not.
    spoiled: usize,
    /// How many planned steps there were that do not count.
    begun: usize,
    planned: Vec<Timed>,
    kept: Vec<Timed>,
    /// Those that do not count.
    cold_planned: Vec<Timed>,
    cold_kept: Vec<Timed>,
    /// The number of the last step that kept everything, and the sizes of planned steps that came after others, and for how long the device
    /// waited in each.
    last_kept: Option<u64>,
    waits: Vec<(f64, Duration)>,
    /// What recomputing and waiting took in planned steps beyond all else, as a share of that.
    shown: Vec<f64>,
    /// What recomputing took in the first planned steps, counted or not.
    reruns: Vec<Duration>,
}

/// The steps that keep everything before any of them counts.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Opening {
    /// There is none yet.
    Due,
    /// The first one took so long for as much as is planned, if its size is near to that.
    Begun(Option<Told>),
    /// They took so long for that, if both sizes are near to it, and there were any.
    Over(Option<Told>),
}

impl Weighing {
    pub(super) fn new(seen: Option<Seen>, cost: Cost) -> Weighing {
        Weighing {
            seen,
            cost,
            idle: None,
            last: None,
            opening: Opening::Due,
            spoiled: 0,
            begun: 0,
            planned: Vec::new(),
            kept: Vec::new(),
            cold_planned: Vec::new(),
            cold_kept: Vec::new(),
            last_kept: None,
            waits: Vec::new(),
            shown: Vec::new(),
            reruns: Vec::new(),
        }
    }

    /// Steps of a new plan, after those of another one were compared.
    pub(super) fn again(cost: Cost) -> Weighing {
        Weighing { opening: Opening::Over(None), begun: UNCOUNTED - 1, ..Weighing::new(None, cost) }
    }

    /// Whether the next step keeps everything.
    pub(super) fn wants_kept(&self) -> bool {
        if !matches!(self.opening, Opening::Over(_)) {
            return true;
        }
        let is_inner = matches!(self.count() % 4, 1 | 2);
        let is_swapped = self.count() / 4 == 1 && self.begins_varied();
        self.begun == UNCOUNTED && is_inner != is_swapped
    }

    /// A step that kept everything, and saved `scale` times what is planned, took `wall` for as much as is planned. Returns the result, if
    /// there is a new one. The device had so many cycles in a second of it, if that is known.
    pub(super) fn kept(&mut self, wall: Duration, scale: f64, clock: Option<f64>) -> Option<Weight> {
        let told = is_near(scale).then_some(Told { wall, is_of_size: is_alike(scale, 1.0) });
        let timed = Timed { scale, wall: wall.as_secs_f64(), stall: 0.0, clock };
        match self.opening {
            Opening::Due => self.opening = Opening::Begun(told),
            Opening::Begun(first) => {
                self.opening = Opening::Over(first.zip(told).map(|(one, other)| one.better(other)))
            }
            Opening::Over(_) => {
                self.kept.push(timed);
                return self.weight();
            }
        }
        self.cold_kept.push(timed);
        None
    }

    /// The same of a planned step, in which the device waited for `stall`, and `shown` of which is known to be recomputing and waiting.
    pub(super) fn planned(
        &mut self,
        wall: Duration,
        scale: f64,
        clock: Option<f64>,
        stall: Duration,
        shown: Option<Duration>,
    ) -> Option<Weight> {
        // What several threads wait for adds up, and may be more than the step.
        let is_possible = |part: &Duration| *part < wall / 2;
        let shown = shown.filter(is_possible);
        let stall = Some(stall).filter(is_possible).unwrap_or_default().as_secs_f64();
        let timed = Timed { scale, wall: wall.as_secs_f64(), stall, clock };
        if self.begun < UNCOUNTED {
            self.begun += 1;
            self.cold_planned.push(timed);
            return None;
        }
        self.shown.extend(shown.map(|shown| {
            shown.as_secs_f64() / wall.saturating_sub(shown).as_secs_f64().max(f64::MIN_POSITIVE)
        }));
        self.planned.push(timed);
        self.weight()
    }

    /// Step `number` keeps everything.
    pub(super) fn keeps(&mut self, number: u64) {
        self.last_kept = Some(number);
    }

    /// For how much of `stall` a device waited in planned step `number` only because the step before it kept everything: for longer than in
    /// those of its size that came after others. That is the comparison's doing.
    pub(super) fn spared(&mut self, number: u64, scale: f64, stall: Duration) -> Duration {
        let alike = |(size, stall): &(f64, Duration)| is_alike(*size, scale).then_some(*stall);
        let usual = self.waits.iter().filter_map(alike).max();
        if self.last_kept.is_none_or(|kept| kept + 1 != number) {
            if self.begun == UNCOUNTED {
                self.waits.push((scale, stall));
            }
            return Duration::ZERO;
        }
        usual.map_or(Duration::ZERO, |usual| stall.saturating_sub(usual))
    }

    /// A step that was to keep everything has not. Returns whether so many have not that there is no use in more.
    pub(super) fn spoils(&mut self) -> bool {
        self.spoiled += 1;
        self.spoiled >= MOST
    }

    /// The time of a step that keeps everything, once the first ones have shown it, before any planned step.
    pub(super) fn begins_with(&self) -> Option<Told> {
        match self.opening {
            Opening::Over(took) if self.begun == 0 => took,
            _ => None,
        }
    }

    /// Recomputing took so long in a planned step. Returns what it takes if this is the second of a new plan, and both agree.
    pub(super) fn reran(&mut self, took: Duration) -> Option<Duration> {
        if self.reruns.len() >= FEWEST || self.seen.is_some() {
            return None;
        }
        self.reruns.push(took);
        let &[one, other] = self.reruns.as_slice() else { return None };
        let (less, more) = (one.min(other), one.max(other));
        (more <= less.mul_f64(1.0 + AGREEING)).then_some(less)
    }

    /// What recomputing and waiting take in a planned step beyond all else, as a share of that, if all that count have shown it.
    pub(super) fn shown(&self) -> Option<f64> {
        (!self.shown.is_empty() && self.shown.len() == self.planned.len()).then(|| usual(self.shown.clone()))
    }

    /// Whether so few steps were timed that they tell little of how much steps vary, and no clock explains that either.
    pub(super) fn is_short(&self) -> bool {
        let is_alike =
            |steadied: Steadied| steadied.clocks.vary() && steadied.compared.deviation <= MOST_APART;
        self.has_few() && !self.at_one_clock().is_some_and(is_alike)
    }

    /// Whether as few steps were timed as have a result.
    pub(super) fn has_few(&self) -> bool {
        self.planned.len() <= FEWEST
    }

    /// Whether any step counts that kept everything.
    pub(super) fn has_kept(&self) -> bool {
        !self.kept.is_empty()
    }

    /// Whether there were as many steps as there may be.
    pub(super) fn is_long(&self) -> bool {
        self.count() >= 2 * MOST
    }

    /// What its steps that kept everything took. Those that do not count are better than none.
    pub(super) fn kept_sizes(&self) -> KeptSizes {
        if self.kept.is_empty() {
            return KeptSizes::new(self.cold_kept.clone());
        }
        self.at_one_clock().map_or_else(|| KeptSizes::new(self.kept.clone()), |steadied| steadied.kept)
    }

    /// What steps have shown that are too few for a result, or not as many of both kinds. Here, too, those that do not count are better than
    /// none.
    pub(super) fn so_far(&self) -> Option<Weight> {
        let all = |cold: &[Timed], counted: &[Timed]| [cold, counted].concat();
        self.compare(&self.kept, &self.planned).or_else(|| {
            let kept = all(&self.cold_kept, &self.kept);
            self.compare(&kept, &all(&self.cold_planned, &self.planned))
        })
    }

    /// How many steps count.
    fn count(&self) -> usize {
        self.planned.len() + self.kept.len()
    }

    /// Whether the first four are of several sizes. What comes later changes no order: each four has two of each kind.
    fn begins_varied(&self) -> bool {
        let mut first = self.kept.iter().take(2).chain(self.planned.iter().take(2));
        first.next().is_some_and(|one| !first.all(|other| is_alike(other.scale, one.scale)))
    }

    fn weight(&self) -> Option<Weight> {
        let count = self.planned.len();
        if count < FEWEST || !count.is_multiple_of(2) || self.kept.len() != count {
            return None;
        }
        self.compare(&self.kept, &self.planned)
    }

    fn compare(&self, kept: &[Timed], planned: &[Timed]) -> Option<Weight> {
        let seen = Compared::of(&KeptSizes::new(kept.to_vec()), planned)?;
        let Compared { deviation, is_by_others, .. } = seen;
        Some(match Steadied::of(kept, planned) {
            Some(Steadied { clocks, kept, compared }) => Weight {
                kept: kept.told(),
                extra: compared.extra,
                error: compared.error(clocks::TYPICAL),
                slower: Some(clocks.slower(compared.extra, self.idle)),
                deviation,
                apart: compared.deviation,
                is_by_others,
            },
            None => {
                let (kept, error) = (KeptSizes::new(kept.to_vec()).told(), seen.error(TYPICAL));
                let (extra, apart) = (seen.extra, deviation);
                Weight { kept, extra, error, slower: None, deviation, apart, is_by_others }
            }
        })
    }

    fn at_one_clock(&self) -> Option<Steadied> {
        Steadied::of(&self.kept, &self.planned)
    }
}

/// Steps as if the device's clock had run alike in all.
struct Steadied {
    clocks: Clocks,
    kept: KeptSizes,
    compared: Compared,
}

impl Steadied {
    /// If the clock is known, and explains some of what they vary by or did run alike.
    fn of(kept: &[Timed], planned: &[Timed]) -> Option<Steadied> {
        let clocks = Clocks::of(kept, planned)?;
        let seen = Compared::of(&KeptSizes::new(kept.to_vec()), planned)?;
        if clocks.are_steady() {
            return Some(Steadied { clocks, kept: KeptSizes::new(kept.to_vec()), compared: seen });
        }
        let [kept, planned] =
            [kept, planned].map(|steps| steps.iter().map(|timed| clocks.steadied(timed)).collect::<Vec<_>>());
        let kept = KeptSizes::new(kept);
        let compared = Compared::of(&kept, &planned)?;
        (compared.deviation < seen.deviation).then_some(Steadied { clocks, kept, compared })
    }
}

/// Planned steps beside those that kept everything.
struct Compared {
    /// What planned ones take beyond the others, as a share of that.
    extra: f64,
    /// The standard deviation of a single step, and of how many.
    deviation: f64,
    count: usize,
    /// How many planned ones there are.
    planned: usize,
    /// Whether what they are beside is what other sizes tell.
    is_by_others: bool,
}

impl Compared {
    fn of(kept: &KeptSizes, planned: &[Timed]) -> Option<Compared> {
        let over = |by: fn(&KeptSizes, f64) -> Option<f64>| -> Vec<f64> {
            let times = |timed: &Timed| Some(timed.wall / by(kept, timed.scale)?.max(f64::MIN_POSITIVE));
            planned.iter().filter_map(times).collect()
        };
        let (mut over_kept, mut kept_deviations) = (over(KeptSizes::alike), kept.deviations_of_alike());
        let is_by_others = over_kept.len() < FEWEST;
        if is_by_others {
            // What other sizes take says less: as much as it says of those that kept everything.
            (over_kept, kept_deviations) = (over(KeptSizes::take), kept.deviations_of_others());
            if over_kept.len() <= FEWEST || kept.count() <= FEWEST || sizes(planned) <= FEWEST {
                return None;
            }
        }
        let times = usual(over_kept.clone());
        let varied = over_kept.iter().map(|over| apart(*over, times));
        let apart: Vec<f64> = varied.chain(kept_deviations).collect();
        let count = apart.len();
        let deviation = deviation(apart.into_iter());
        Some(Compared { extra: times - 1.0, deviation, count, planned: over_kept.len(), is_by_others })
    }

    /// The standard error of what planned ones take, where a single step typically varies by so much.
    fn error(&self, typical: f64) -> f64 {
        let typical = if self.is_by_others { typical.max(TYPICAL_OF_SIZES) } else { typical };
        varies_by(self.deviation, self.count, typical) * (2.0 / self.planned as f64).sqrt()
    }
}

/// How much single steps may vary, if that was the standard deviation of so many. A few are all alike by chance now and then, so typical
/// ones count as well where these vary less.
fn varies_by(seen: f64, count: usize, typical: f64) -> f64 {
    let [count, typical_count] = [count, TYPICAL_COUNT].map(|count| count as f64);
    let both = (count * seen.powi(2) + typical_count * typical.powi(2)) / (count + typical_count);
    seen.max(both.sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// The results of a whole weighing. The step with this number, which keeps everything or not, takes so long.
    fn weigh(wall: impl Fn(u32, bool) -> Duration) -> Vec<Weight> {
        let mut weighing = Weighing::new(None, Cost::first(0.5, 0.0));
        let mut weights = Vec::new();
        for number in 0..20 {
            weights.extend(match weighing.wants_kept() {
                true => weighing.kept(wall(number, true), 1.0, None),
                false => weighing.planned(wall(number, false), 1.0, None, Duration::ZERO, None),
            });
            assert_eq!(weighing.is_long(), number >= 19);
        }
        weights
    }

    fn wall(kept: bool) -> Duration {
        if kept { 100 * MS } else { 103 * MS }
    }

    /// Whether two steps of each kind are enough, if a step takes this when the clock runs at so many times the usual.
    fn is_short(wall: impl Fn(f64) -> f64, clocks: [f64; 2]) -> bool {
        let mut weighing = Weighing::again(Cost::first(0.5, 0.0));
        let step = |times: f64| Duration::from_secs_f64(0.1 * wall(times));
        weighing.planned(step(1.0), 1.0, None, Duration::ZERO, None);
        for times in clocks {
            weighing.planned(step(times).mul_f64(1.05), 1.0, Some(1.4e9 * times), Duration::ZERO, None);
            weighing.kept(step(times), 1.0, Some(1.4e9 * times));
        }
        weighing.is_short()
    }

    #[test]
    fn steps_at_a_steady_clock_are_compared_as_they_are() {
        let mut weighing = Weighing::again(Cost::first(0.5, 0.0));
        weighing.begun = UNCOUNTED;
        let mut weight = None;
        for _ in 0..8 {
            weight = match weighing.wants_kept() {
                true => weighing.kept(100 * MS, 1.0, Some(1.9e9)),
                false => weighing.planned(103 * MS, 1.0, Some(1.89e9), Duration::ZERO, None),
            }
            .or(weight);
        }
        let Weight { extra, error, slower, .. } = weight.unwrap();
        assert!((extra - 0.03).abs() < 1e-9 && error < 0.002 && slower == Some([0.0, 0.0]), "{weight:?}");
    }

    #[test]
    fn what_planned_steps_wait_for_only_after_those_that_keep_everything_is_spared() {
        // Of each step, whether it keeps everything, its size, and the milliseconds that it waits.
        let spared = |steps: &[(bool, f64, u32)]| -> Vec<u128> {
            let mut weighing = Weighing::again(Cost::first(0.5, 0.0));
            weighing.begun = UNCOUNTED;
            let spared = steps.iter().zip(1..).filter_map(|((keeps, scale, stall), number)| match keeps {
                true => {
                    weighing.keeps(number);
                    None
                }
                false => Some(weighing.spared(number, *scale, MS * *stall).as_millis()),
            });
            spared.collect()
        };
        let (k, p) = ((true, 1.0, 0), |stall| (false, 1.0, stall));
        assert_eq!(spared(&[p(1), k, k, p(5), p(5)]), [0, 4, 0]);
        assert_eq!(spared(&[k, p(5), p(0), k, p(5)]), [0, 0, 5], "nothing is known at first");
        assert_eq!(spared(&[p(0), k, (false, 2.0, 5)]), [0, 0], "larger ones may always wait");
        assert_eq!(spared(&[p(5), k, p(3)]), [0, 0]);
    }

    #[test]
    fn two_steps_of_each_kind_are_enough_only_where_the_clock_explains_what_they_vary_by() {
        assert!(!is_short(|times| times.powf(-0.8), [0.98, 1.03]));
        assert!(is_short(|_| 1.0, [1.0, 1.0]), "it may be chance");
        assert!(is_short(|times| times.powf(0.8), [0.98, 1.03]), "another reason");
    }

    #[test]
    fn steps_that_keep_everything_come_first_and_amidst_planned_ones() {
        let mut weighing = Weighing::new(None, Cost::first(0.5, 0.0));
        let kept = (0..20).map(|number| {
            let is_kept = weighing.wants_kept();
            let _ = if is_kept {
                weighing.kept((110 - number) * MS, 1.0, None)
            } else {
                weighing.planned(103 * MS, 1.0, None, Duration::ZERO, None)
            };
            let told = Told { wall: 109 * MS, is_of_size: true };
            assert_eq!(weighing.begins_with(), (number == 1).then_some(told));
            is_kept
        });
        let (k, p) = (true, false);
        assert_eq!(kept.collect::<Vec<_>>(), [k, k, p, p, p, k, k, p, p, k, k, p, p, k, k, p, p, k, k, p]);
    }

    #[test]
    fn there_is_a_result_after_as_many_steps_of_both_kinds() {
        let weights = weigh(|_, kept| wall(kept));
        assert_eq!(weights.len(), 4);
        for Weight { kept, extra, .. } in weights {
            let kept = kept.map(|told| told.wall);
            assert!(kept == Some(100 * MS) && (extra - 0.03).abs() < 1e-9);
        }
    }

    #[test]
    fn a_few_steps_that_are_alike_by_chance_do_not_make_the_result_certain() {
        let errors: Vec<f64> = weigh(|_, kept| wall(kept)).iter().map(|weight| weight.error).collect();
        assert!(errors[0] > 0.5 * TYPICAL && errors.is_sorted_by(|one, next| one > next), "{errors:?}");
    }

    #[test]
    fn planned_steps_show_what_recomputing_takes_if_all_of_them_do() {
        let shown = |of: fn(u32) -> Option<Duration>| {
            let mut weighing = Weighing::new(None, Cost::first(0.5, 0.0));
            for number in 0..12 {
                let _ = match weighing.wants_kept() {
                    true => weighing.kept(100 * MS, 1.0, None),
                    false => weighing.planned(105 * MS, 1.0, None, Duration::ZERO, of(number)),
                };
            }
            weighing.shown()
        };
        assert_eq!(shown(|_| None), None);
        assert_eq!(shown(|number| (number > 6).then_some(5 * MS)), None);
        // The first ones find their memory yet.
        let times = shown(|number| Some(if number < 4 { 20 * MS } else { 5 * MS }));
        assert!(times.is_some_and(|times| (times - 0.05).abs() < 1e-9), "{times:?}");
    }

    #[test]
    fn a_machine_that_becomes_faster_says_nothing_of_the_plan() {
        let weights = weigh(|number, kept| wall(kept).mul_f64(1.0 - 0.001 * f64::from(number)));
        assert!(weights.iter().all(|weight| (weight.extra - 0.03).abs() < 1e-4), "{weights:?}");
    }

    #[test]
    fn a_step_that_was_disturbed_does_not_count() {
        for disturbed in 0..20 {
            let weights = weigh(|number, kept| wall(kept) * if number == disturbed { 2 } else { 1 });
            assert!(weights[1..].iter().all(|weight| (weight.extra - 0.03).abs() < 1e-9), "{weights:?}");
            let Weight { extra, error, .. } = weights[0];
            assert!((extra - 0.03).abs() <= 2.0 * error + 1e-9, "{weights:?}");
        }
    }

    /// The results of steps of these sizes, in turn, one that keeps everything takes `kept` for its size.
    fn weigh_sizes(sizes: &[f64], kept: impl Fn(f64) -> f64) -> Vec<Weight> {
        let mut weighing = Weighing::new(None, Cost::first(0.5, 0.0));
        let mut weights = Vec::new();
        for scale in sizes.iter().cycle().take(20) {
            let is_kept = weighing.wants_kept();
            let times = if is_kept { 1.0 } else { 1.03 };
            let wall = Duration::from_secs_f64(times * kept(*scale) / scale);
            weights.extend(match is_kept {
                true => weighing.kept(wall, *scale, None),
                false => weighing.planned(wall, *scale, None, Duration::ZERO, None),
            });
        }
        assert!(weighing.is_long(), "it ends whatever sizes come");
        weights
    }

    #[test]
    fn steps_are_compared_with_those_of_their_size() {
        for count in 2..=9_u32 {
            for turn in 1..=count {
                let sizes: Vec<f64> = (0..count)
                    .map(|number| f64::from(1 + number * turn % count) / f64::from(count))
                    .collect();
                // Small steps take more for what they save than large ones, and some sizes suit a machine better: of many
                // sizes, not all have steps that tell by how much.
                let suits = if count < 5 { 0.005 } else { 0.001 };
                let kept = |size: f64| 0.01 + 0.1 * size + if (size - 0.5).abs() < 0.1 { suits } else { 0.0 };
                for Weight { extra, error, .. } in weigh_sizes(&sizes, kept) {
                    assert!((extra - 0.03).abs() < 0.004 + 3.0 * error, "{sizes:?}: {extra} {error}");
                }
            }
        }
    }

    #[test]
    fn one_step_of_another_size_ends_no_comparison_and_none_is_endless() {
        for odd in 0..20 {
            let sizes: Vec<f64> = (0..20).map(|number| if number == odd { 0.3 } else { 1.0 }).collect();
            let weights = weigh_sizes(&sizes, |size| 0.02 + 0.1 * size);
            assert!(weights.len() >= 3, "{odd}: {weights:?}");
            assert!(weights.iter().all(|weight| (weight.extra - 0.03).abs() < 1e-6), "{odd}: {weights:?}");
        }
    }

    #[test]
    fn sizes_that_never_come_again_are_compared_with_those_around_them() {
        let sizes: Vec<f64> = (1..=20).map(|number| 0.1 + (f64::from(number) * 0.618).fract()).collect();
        let weights = weigh_sizes(&sizes, |size| 0.01 + 0.1 * size + 0.01 * size * size);
        let Weight { extra, error, .. } = weights[weights.len() - 1];
        assert!((extra - 0.03).abs() < 0.004 && error < 0.007, "{extra} {error}");
    }

    #[test]
    fn a_few_steps_of_sizes_that_vary_by_half_tell_what_planned_ones_take() {
        // Megabytes and milliseconds of a program's steps: those that keep everything, and those of a plan.
        let kept = [(17.4, 29.7), (16.7, 28.5), (21.2, 37.2), (19.7, 34.1)];
        let planned = [(17.2, 32.7), (17.7, 33.7), (17.5, 34.2), (19.2, 36.3)];
        let mut weighing = Weighing::again(Cost::first(0.5, 0.0));
        weighing.planned(MS, 1.0, None, Duration::ZERO, None);
        let timed = |(size, wall): (f64, f64)| (Duration::from_secs_f64(wall * 16.6 / size), size / 16.6);
        let weights = planned.into_iter().zip(kept).map(|(planned, kept)| {
            let [(planned, larger), (kept, size)] = [planned, kept].map(timed);
            weighing.planned(planned, larger, None, Duration::ZERO, None);
            weighing.kept(kept, size, None)
        });
        let Some(Weight { extra, error, .. }) = weights.last().flatten() else { panic!("no result") };
        assert!((0.09..0.12).contains(&extra) && error < 0.02, "{extra} {error}");
    }

    #[test]
    fn the_more_steps_vary_the_larger_is_the_error() {
        let error = |varies: f64| {
            weigh(|number, kept| wall(kept).mul_f64(1.0 + varies * f64::from(number % 3)))[3].error
        };
        assert!(error(0.01) > 0.003 && (3.0..5.0).contains(&(error(0.04) / error(0.01))));
    }
}
