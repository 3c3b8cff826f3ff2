//! Checks whether a program does the same with a cache as with plain autograd.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use ssdtrain::store::{Direction, Faulty};
use ssdtrain::{ErrorKind, TensorCache};
use ssdtrain_libtorch as torch;
use tch::nn::VarStore;
use tch::{Device, Kind, TchError, Tensor};

use crate::config::Config;
use crate::fallible::Fallible;
use crate::faults::{Faults, is_a_fault};
use crate::program::Program;
use crate::random::Random;
use crate::run::{Ran, run};
use crate::values::Event;

/// The verdict on a program.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// The same bits and the same errors.
    Agrees,
    /// The same until the cache refused to rerun a segment whose surroundings had changed, or succeeded where
    /// autograd could not.
    AgreesUntil(String),
    /// The same until something that was made to fail made a backward an error, which has this kind and names the cause.
    FailsAsToldTo(ErrorKind),
    /// Two runs without a cache differ.
    Undetermined,
    /// Runs with and without a cache differ, and so do runs without one, now and then.
    Varies,
    /// It makes something that holds itself, and with it all that a cache keeps for it, for as long as the process lives.
    HoldsItself,
    /// There is no such cache.
    NoCache(String),
    /// What is wrong.
    Differs(String),
}

impl Verdict {
    /// Whether something is wrong.
    pub fn is_wrong(&self) -> bool {
        matches!(self, Verdict::Differs(_))
    }

    /// The verdict in one word.
    pub fn name(&self) -> &'static str {
        match self {
            Verdict::Agrees => "agrees",
            Verdict::AgreesUntil(error) if error.contains(NOT_AGAIN) => "refuses-rerun",
            Verdict::AgreesUntil(error) if error.contains("was changed in place") => "changed-in-place",
            Verdict::AgreesUntil(_) => "agrees-until",
            Verdict::FailsAsToldTo(ErrorKind::Io) => "fails-io",
            Verdict::FailsAsToldTo(ErrorKind::Corrupt) => "fails-corrupt",
            Verdict::FailsAsToldTo(ErrorKind::Device) => "fails-device",
            Verdict::FailsAsToldTo(ErrorKind::Torch) => "fails-memory",
            Verdict::FailsAsToldTo(_) => "fails",
            Verdict::Undetermined => "undetermined",
            Verdict::Varies => "varies",
            Verdict::HoldsItself => "holds-itself",
            Verdict::NoCache(_) => "no-cache",
            Verdict::Differs(_) => "wrong",
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Agrees => f.write_str("agrees"),
            Verdict::AgreesUntil(error) => write!(f, "agrees until {error}"),
            Verdict::FailsAsToldTo(kind) => write!(f, "agrees until something fails on purpose: {kind:?}"),
            Verdict::Undetermined => f.write_str("differs from run to run without a cache"),
            Verdict::Varies => f.write_str("differs with a cache, and now and then without one"),
            Verdict::HoldsItself => f.write_str("makes something that holds itself"),
            Verdict::NoCache(error) => write!(f, "no cache: {error}"),
            Verdict::Differs(how) => f.write_str(how),
        }
    }
}

/// What the cache says of a segment or an operation that it refuses to rerun.
const NOT_AGAIN: &str = "ssdtrain cannot compute";

/// How long a cache may go on holding what no graph needs any more: transfers are in flight.
const LET_GO_WITHIN: Duration = Duration::from_secs(10);
/// The same where it may be held for good.
const MAY_STAY_AFTER: Duration = Duration::from_secs(1);

/// So many runs without a cache show whether these differ now and then.
const RUNS: usize = 500;

/// The error about a tensor that was detached in place after it was saved. Only autograd itself, without any hooks,
/// raises it.
const DETACHED: &str = "detached in-place";

/// A cache that several programs are run with, one after the other; or some, with which their steps take turns.
pub struct Lab {
    config: Config,
    /// The parameters that the caches know.
    parameters: VarStore,
    caches: Vec<TensorCache>,
    /// What of them can be made to fail, if anything can.
    fallible: Vec<Fallible>,
    /// Programs that hold themselves without a cache are not run with these.
    is_to_last: bool,
    /// A program has made something that holds itself, including what the cache keeps for it.
    is_used_up: Cell<bool>,
}

impl Lab {
    /// Caches with these settings.
    pub fn new(config: &Config) -> anyhow::Result<Lab> {
        let parameters = VarStore::new(config.device());
        let (mut caches, mut fallible) = (Vec::new(), Vec::new());
        for _ in 0..config.caches() {
            let (cache, fails) = config.build(&parameters)?;
            caches.push(cache);
            fallible.extend(fails);
        }
        Ok(Lab {
            config: config.clone(),
            parameters,
            caches,
            fallible,
            is_to_last: false,
            is_used_up: Cell::default(),
        })
    }

    /// The same, for programs that leave nothing behind; the others are not run with it.
    pub fn to_last(self) -> Lab {
        Lab { is_to_last: true, ..self }
    }

    /// Whether `program` can be run with these caches.
    pub fn fits(&self, program: &Program) -> bool {
        !self.is_used_up.get() && self.config == program.config
    }

    /// How many transfers could have been made to fail so far.
    pub fn transfers(&self) -> u64 {
        let submitted = |disk: &Faulty| disk.submitted(Direction::Write) + disk.submitted(Direction::Read);
        self.fallible.iter().filter_map(|parts| parts.disk.as_deref()).map(submitted).sum()
    }

    /// Runs `program` without a cache, twice, and with these.
    pub fn check(&self, program: &Program) -> Verdict {
        // Tensors are small, and several programs run at once.
        tch::set_num_threads(1);
        let plain = VarStore::new(self.config.device());
        let expected = [(); 2].map(|()| attempt(program, &plain, &[]));
        let [Ok(Ran { events: expected, made }), Ok(Ran { events: again, .. })] = expected else {
            return Verdict::Undetermined;
        };
        if let Err(error) = end_backwards(self.config.device()) {
            return Verdict::Differs(format!("a small backward fails: {error}"));
        }
        // A function that changes what it holds is held by what it has changed. The same is true in autograd itself
        // for what is saved and then changed into a result of itself.
        let holds_itself = made.iter().any(|storage| storage.upgrade().is_some());
        if holds_itself && self.is_to_last {
            return Verdict::HoldsItself;
        }
        let may_hold_itself = holds_itself || expected.iter().any(|event| event.has_changed);
        if !are_alike(&expected, &again) {
            return Verdict::Undetermined;
        }
        let mut verdict = Verdict::Agrees;
        for round in 0..program.config.rounds() {
            let mut random = Random::new(program.seed ^ round ^ self.config.faults() << 32);
            let faults = Faults::draw(&mut random, self.config.has("verify") || self.config.encrypts());
            self.fallible.iter().for_each(|parts| faults.inject(parts));
            torch::press_cpu_memory(self.config.pressed());
            let device = self.config.device();
            let above = |bytes| torch::Ceiling::new(device, torch::memory(device).allocated + bytes);
            let ceiling = self.config.ceiling().map(above);
            let ran = attempt(program, &self.parameters, &self.caches);
            drop(ceiling);
            torch::press_cpu_memory(0);
            self.fallible.iter().for_each(Fallible::heal);
            let events = match ran {
                Ok(ran) => ran.events,
                Err(panic) => return Verdict::Differs(format!("round {round}: panic: {panic}")),
            };
            let faults = if self.fallible.is_empty() { Faults::default() } else { faults };
            match compare(&expected, &events, &faults) {
                Verdict::Differs(_) if self.varies(program, &expected) => return Verdict::Varies,
                Verdict::Differs(how) => return Verdict::Differs(format!("round {round}: {how}")),
                Verdict::Agrees => {}
                other => verdict = other,
            }
            let within = if may_hold_itself { MAY_STAY_AFTER } else { LET_GO_WITHIN };
            if let Some(held) =
                self.caches.iter().find_map(|cache| still_held(cache, self.config.device(), within))
            {
                self.is_used_up.set(may_hold_itself);
                return match may_hold_itself {
                    true if self.is_to_last => Verdict::HoldsItself,
                    true => verdict,
                    false => Verdict::Differs(format!("round {round}: {held}")),
                };
            }
        }
        verdict
    }

    /// Whether runs without a cache differ now and then from what two have shown: on a GPU, what threads write to the same element of
    /// overlapping views is a race.
    fn varies(&self, program: &Program, expected: &[Event]) -> bool {
        let plain = VarStore::new(self.config.device());
        let differs = |_| !attempt(program, &plain, &[]).is_ok_and(|run| are_alike(expected, &run.events));
        self.config.device() != Device::Cpu && (0..RUNS).any(differs)
    }
}

/// Runs `program` without a cache, twice, and with a new one with the settings it asks for.
pub fn check(program: &Program) -> Verdict {
    match Lab::new(&program.config) {
        Ok(lab) => lab.check(program),
        Err(error) => Verdict::NoCache(error.to_string()),
    }
}

fn attempt(program: &Program, vs: &VarStore, caches: &[TensorCache]) -> Result<Ran, String> {
    catch_unwind(AssertUnwindSafe(|| run(program, vs, caches))).map_err(|panic| said_by(&*panic).to_owned())
}

/// The text of a panic.
pub fn said_by(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("of another kind")
}

/// Whether two runs have shown the same.
fn are_alike(one: &[Event], other: &[Event]) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| one.outcome == other.outcome)
}

/// What became of a program whose transfers have these faults.
fn compare(expected: &[Event], got: &[Event], faults: &Faults) -> Verdict {
    // How far a backward got before its error depends on where the error is.
    let mut until = None;
    for (expected, got) in expected.iter().zip(got) {
        let what = &got.what;
        if let Some(kind) = faults.account_for(got) {
            return Verdict::FailsAsToldTo(kind);
        }
        if let Some(error) = got.outcome.as_ref().err().filter(|_| is_a_fault(got)) {
            let kind = got.error.as_ref().map(ssdtrain::Error::kind);
            return Verdict::Differs(format!(
                "at `{what}` an error that no fault accounts for ({kind:?}, {faults:?}): {error}"
            ));
        }
        match (&expected.outcome, &got.outcome) {
            (Ok(expected), Ok(got)) => {
                for ((name, expected), (_, got)) in expected.iter().zip(got) {
                    if expected != got {
                        if let Some(error) = until {
                            return Verdict::AgreesUntil(error);
                        }
                        let distance = expected.distance(got);
                        let distance = distance.map_or_else(String::new, |d| format!(" by {d:e}"));
                        return Verdict::Differs(format!(
                            "at `{what}` {name} differs{distance}\n  expected {expected:?}\n  got      {got:?}"
                        ));
                    }
                }
            }
            (Err(refused), Err(error)) => {
                let may_come_further = expected.may_be_served || refused.contains(DETACHED);
                if may_come_further && what.starts_with("backward") {
                    until = Some(error.clone());
                }
            }
            (Ok(_), Err(error)) if expected.may_be_refused => {
                return Verdict::AgreesUntil(error.clone());
            }
            // Of a view whose base has a gradient since: libtorch refuses it until someone, such as a backward that has it saved, has
            // asked for its function.
            (Ok(_), Err(error))
                if error.contains("a leaf Variable that requires grad is being used in an in-place") =>
            {
                return Verdict::AgreesUntil(error.clone());
            }
            (Ok(_), Err(error)) => {
                return Verdict::Differs(format!(
                    "at `{what}` an error that plain autograd does not have: {error}"
                ));
            }
            (Err(error), Ok(_)) if expected.may_be_served || error.contains(DETACHED) => {
                return Verdict::AgreesUntil(error.clone());
            }
            (Err(error), Ok(_)) => {
                return Verdict::Differs(format!(
                    "at `{what}` plain autograd has an error, the cache has none: {error}"
                ));
            }
        }
    }
    if expected.len() != got.len() {
        let missing = got.iter().find(|event| event.outcome.is_err());
        return Verdict::Differs(format!("{} events for {}: {missing:?}", got.len(), expected.len()));
    }
    Verdict::Agrees
}

/// After an error in backward, libtorch keeps the unfinished work until the thread's next backward.
fn end_backwards(device: Device) -> Result<(), TchError> {
    let one = Tensor::f_ones([1], (Kind::Float, device))?.f_set_requires_grad(true)?;
    one.f_mul(&one)?.f_backward()
}

/// What the cache still holds although all graphs are gone.
fn still_held(cache: &TensorCache, device: Device, within: Duration) -> Option<String> {
    if let Err(error) = end_backwards(device) {
        return Some(format!("a small backward fails: {error}"));
    }
    let mut last = None;
    let mut since = Instant::now();
    loop {
        let held = cache.held();
        let reserved = cache.store_stats().map_or(0, |stats| stats.reserved_bytes);
        if (held.entries, held.tapes, held.device_bytes, reserved) == (0, 0, 0, 0) {
            return None;
        }
        if last != Some((held, reserved)) {
            (last, since) = (Some((held, reserved)), Instant::now());
        }
        if since.elapsed() > within {
            return Some(format!(
                "all graphs are gone, but {held:?} and {reserved} bytes of the disk are held"
            ));
        }
        thread::sleep(Duration::from_micros(100));
    }
}
