//! What the sweeps over faults share: a small training, what happens to its saved tensors, and what notices hangs and panics.

use std::error::Error as _;
use std::io;
use std::iter::successors;
use std::panic;
use std::process;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use ssdtrain::plan::{Goal, InTurn, Placement};
use ssdtrain::{Adaptive, Auto, Error, ErrorKind, Offload, TensorCache, TensorCacheBuilder, segment};
use tch::{Device, Kind, Tensor, set_num_threads};

use super::{assert_same_bits, grads, leaves, randn};

/// A sweep ends when so many faults in a row were not reached: how many operations there are depends on timing.
pub(crate) const MISSES: usize = 4;

/// How often an operation fails. A read has three attempts.
pub(crate) const TIMES: [u64; 3] = [1, 3, u64::MAX];

/// Longer than any training takes, on any machine.
pub(crate) const TOO_LONG: Duration = Duration::from_secs(60);

/// The rows and columns of the largest storages. These are moved without a copy, as all of 64 KiB and more are, and no
/// storage is a whole number of blocks.
pub(crate) const ROWS: i64 = 130;
pub(crate) const LARGEST: u64 = (ROWS * ROWS * 4) as u64;

pub(crate) type Setting = fn(TensorCacheBuilder) -> TensorCacheBuilder;

/// What happens to saved tensors.
#[derive(Clone, Copy)]
pub(crate) struct Placing {
    pub(crate) name: &'static str,
    /// How many steps a training has.
    pub(crate) steps: usize,
    pub(crate) set: Setting,
}

pub(crate) const PLACINGS: [Placing; 13] = [
    unplanned("offload", |it| it.policy(Offload::default())),
    unplanned("offload, no budget", |it| it.policy(tight())),
    unplanned("offload, small budget", |it| {
        it.policy(Offload::default().device_budget(2 * LARGEST).prefetch(LARGEST / 4)).queue_depth(1)
    }),
    unplanned("recompute", |it| in_turn(it, Offload::default(), &[Placement::Recompute])),
    unplanned("recompute, no budget", |it| in_turn(it, tight(), &[Placement::Recompute])),
    unplanned("recompute every other", |it| {
        in_turn(it, Offload::default(), &[Placement::Disk, Placement::Recompute])
    }),
    unplanned("every placement, no budget", |it| {
        use Placement::{Disk, Host, Keep, Recompute};
        in_turn(it, tight(), &[Recompute, Disk, Host, Keep, Recompute, Host, Disk])
    }),
    planned("adaptive", |it| it.policy(Adaptive::default())),
    planned("adaptive, small budget", |it| {
        it.policy(Adaptive::default().device_budget(2 * LARGEST).prefetch(LARGEST / 4))
    }),
    planned("planned for a budget", |it| it.policy(Auto::new(Goal::budget(4 * LARGEST)))),
    planned("planned for little time", |it| it.policy(Auto::new(Goal::overhead(0.05)))),
    planned("planned for the lowest peak", |it| it.policy(Auto::new(Goal::overhead(f64::INFINITY)))),
    // No history can be kept there, so each training counts by itself.
    planned("planned for few writes", |it| {
        let policy = Auto::new(Goal::budget(4 * LARGEST)).written_per_day(6 * LARGEST);
        it.policy(policy).disk_history("/dev/null")
    }),
];

pub(crate) const fn unplanned(name: &'static str, set: Setting) -> Placing {
    Placing { name, steps: 3, set }
}

/// The first two steps are profiled, and the next two compared with steps that keep everything. With [`Adaptive`], the second is.
pub(crate) const fn planned(name: &'static str, set: Setting) -> Placing {
    Placing { name, steps: 5, set }
}

pub(crate) fn tight() -> Offload {
    Offload::default().device_budget(1).prefetch(0)
}

pub(crate) fn in_turn(
    builder: TensorCacheBuilder,
    policy: Offload,
    placements: &[Placement],
) -> TensorCacheBuilder {
    builder.policy(InTurn::new(policy, placements))
}

/// What was trained, and the gradients that it has without a cache.
pub(crate) struct Model {
    layers: usize,
    sources: Vec<Tensor>,
    expected: Vec<Tensor>,
}

impl Model {
    pub(crate) fn new(layers: usize) -> Model {
        Model::on(Device::Cpu, layers)
    }

    pub(crate) fn on(device: Device, layers: usize) -> Model {
        // Threads that wait for each other are slow where other tests run.
        set_num_threads(1);
        tch::manual_seed(1);
        let shapes = [[ROWS, 12], [12, ROWS], [ROWS, 12]];
        let sources: Vec<_> =
            shapes.map(|[rows, columns]| (randn(&[rows, columns]) / 4.0).to_device(device)).into();
        let plain = leaves(&sources);
        tch::manual_seed(7);
        [0, 1].map(|index| loss(&plain, layers, index)).iter().for_each(Tensor::backward);
        Model { layers, expected: grads(&plain), sources }
    }

    /// A step of two micro-batches. Every other one has both graphs at once, and waits until what they saved has left.
    pub(crate) fn step(&self, what: &str, cache: &TensorCache, number: usize) -> ssdtrain::Result<()> {
        let inputs = leaves(&self.sources);
        tch::manual_seed(7);
        let step = cache.step();
        let forward = |index: usize| {
            step.micro_batch(index);
            loss(&inputs, self.layers, index)
        };
        // After one backward has failed, the next one is right, or an error of its own.
        let outcomes = if number.is_multiple_of(2) {
            let losses = [0, 1].map(forward);
            step.flush();
            losses.map(|loss| step.backward(&loss))
        } else {
            [0, 1].map(|index| step.backward(&forward(index)))
        };
        step.finish()?;
        for outcome in outcomes {
            outcome?;
        }
        assert_same_bits(what, &self.expected, &grads(&inputs));
        Ok(())
    }
}

/// What a micro-batch computes: layers of pointwise operations that can be run again and of products, and a segment
/// that draws random numbers.
fn loss(inputs: &[Tensor], layers: usize, micro_batch: usize) -> Tensor {
    let [x, wide, narrow] = inputs else { panic!("three tensors") };
    let y = (0..layers).fold(x * (micro_batch + 1) as f64, |y, _| {
        let gate = (&y * 1.5).silu() * (&y + 0.5).tanh();
        gate.matmul(wide).sigmoid().matmul(narrow)
    });
    let block = |y: &Tensor| y.f_gelu("tanh")?.f_dropout(0.1, true)?.f_exp();
    segment("block", &y, block).unwrap().square().sum(Kind::Float)
}

/// Ends the process if a training takes too long: a thread that hangs cannot be ended. It is told what begins.
pub(crate) fn watchdog() -> Sender<String> {
    let (tell, told) = channel();
    let watch = move || {
        let mut now = String::new();
        loop {
            match told.recv_timeout(TOO_LONG) {
                Ok(next) => now = next,
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    eprintln!("hangs: {now}");
                    process::abort();
                }
            }
        }
    };
    // It ends when the sender is dropped.
    drop(thread::Builder::new().name("watchdog".to_owned()).spawn(watch).unwrap());
    tell
}

/// The number of panics on any thread, but for those that are planned.
pub(crate) fn panics() -> usize {
    static PANICS: AtomicUsize = AtomicUsize::new(0);
    static COUNTS: Once = Once::new();
    COUNTS.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            PANICS.fetch_add(1, Ordering::Relaxed);
            before(info);
        }));
    });
    PANICS.load(Ordering::Relaxed)
}

/// Asserts that this error may be returned: it is of that kind, and it and all its causes say why.
pub(crate) fn check(what: &str, error: &Error, expected: Option<(ErrorKind, String)>) {
    let Some((kind, words)) = expected else { panic!("{what}: no error is needed: {error}") };
    assert_eq!(error.kind(), kind, "{what}: {error}");
    assert!(error.to_string().contains(&words), "{what}: {error}");
    assert!(!error.to_string().contains("internal error"), "{what}: {error}");
    let mut causes = successors(error.source(), |&cause| cause.source());
    assert!(causes.clone().all(|cause| cause.to_string().contains(&words)), "{what}: {error}");
    let system = causes.any(|cause| cause.is::<io::Error>());
    assert_eq!(system, kind == ErrorKind::Io, "{what}: the system's own error is the last cause of {error}");
}
