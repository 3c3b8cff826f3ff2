//! Random programs. They are run while they are generated, so that most of their operations are valid.

use anyhow::{Context, Result};
use ssdtrain_libtorch as torch;
use ssdtrain_libtorch::CpuAutocast;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use crate::config::Config;
use crate::draw::Draw;
use crate::operations::{self, OF_OTHERS, ORDERED, Operation, total};
use crate::program::{Op, Program, Slot};
use crate::random::Random;
use crate::run::Run;
use crate::values::Values;

/// The number of consecutive programs that use the same cache settings: building a cache takes longer than running most
/// programs.
const OF_ONE_CACHE: u64 = 10;

/// The program of `seed`.
pub fn generate(seed: u64) -> Program {
    Programs::default().generate(seed)
}

/// A family of programs, one for each seed.
#[derive(Default)]
pub struct Programs {
    often: Option<&'static Operation>,
}

impl Programs {
    /// Programs in which the operation `often` occurs more than any other.
    ///
    /// # Errors
    ///
    /// There is no operation with this name.
    pub fn new(often: Option<&str>) -> Result<Programs> {
        let find = |name| operations::find(name).with_context(|| format!("there is no operation {name}"));
        Ok(Programs { often: often.map(find).transpose()? })
    }

    /// The operation that occurs often in these programs.
    pub fn often(&self) -> Option<&'static str> {
        self.often.map(|operation| operation.name)
    }

    /// The program of `seed`.
    pub fn generate(&self, seed: u64) -> Program {
        of_seed(seed, self.often)
    }
}

fn of_seed(seed: u64, often: Option<&'static Operation>) -> Program {
    tch::set_num_threads(1);
    let config = Config::draw(&mut Random::new(!(seed / OF_ONE_CACHE)));
    let mut random = Random::new(seed);
    // With few kinds of operations in a program, combinations of them are more frequent.
    let share = *random.of(&[5, 15, 40, 90]);
    let enabled = operations::all()
        .filter(|operation| random.percent(share) || ALWAYS.contains(&operation.name))
        .collect();
    let width = if random.percent(4) { 130 } else { *random.of(&[2, 4, 4, 4, 8, 8, 16]) };
    // Tiles have 128 elements or more.
    let width = if config.has("tiles") && random.percent(80) { *random.of(&[16, 24, 32]) } else { width };
    let misuses = random.percent(10);
    let blocks = [
        ("no_grad", 3),
        ("scope", 4),
        ("thread", 3),
        ("segment", 12),
        ("remat", 12),
        ("autocast", 4),
        ("parallel", 5),
    ];
    let blocks = blocks.into_iter().filter(|_| random.percent(40)).collect();
    let seed = random.bits() % 1000;
    let mut generator = Generator { random, next: 0, enabled, often, blocks, width, misuses };
    let vs = VarStore::new(Device::Cpu);
    let mut run = Run::new(&vs, &[]);
    tch::manual_seed(seed as i64);
    let body = generator.program(&mut run);
    Program { config, seed, body }
}

const ALWAYS: &[&str] = &["sin", "mul", "add", "sigmoid", "matmul", "square"];

/// The largest value that programs go on with: larger ones soon become NaN, and NaNs hide differences.
const LARGEST: f64 = 1e4;
const MOST_ELEMENTS: usize = 1 << 17;

struct Generator {
    random: Random,
    next: Slot,
    enabled: Vec<&'static Operation>,
    /// An operation that is drawn more often than the others.
    often: Option<&'static Operation>,
    /// The kinds of blocks, and what percentage of the operations each of them is.
    blocks: Vec<(&'static str, usize)>,
    width: i64,
    /// Whether functions of segments change tensors that they did not make.
    misuses: bool,
}

/// Where in the program an operation is to be.
#[derive(Clone, Copy)]
struct Place {
    depth: usize,
    /// Inside a segment; the values from this one on are its own.
    segment: Option<Slot>,
    /// Other threads run at the same time: only own values are changed, and no result depends on the order of threads.
    is_parallel: bool,
}

const OUTERMOST: Place = Place { depth: 0, segment: None, is_parallel: false };

fn op(name: &'static str, inputs: Vec<Slot>, numbers: Vec<f64>) -> Op {
    Op { name, outputs: vec![], inputs, numbers, body: vec![] }
}

impl Generator {
    fn program(&mut self, run: &mut Run<'_>) -> Vec<Op> {
        let mut body = Vec::new();
        for _ in 0..2 + self.random.below(3) {
            let leaf = self.leaf();
            run.run_all(std::slice::from_ref(&leaf), None);
            body.push(leaf);
        }
        if self.random.percent(30) {
            let optimizer = op("optimizer", vec![], vec![self.random.below(5) as f64]);
            run.run_all(std::slice::from_ref(&optimizer), None);
            body.push(optimizer);
        }
        let steps = *self.random.of(&[1, 1, 2, 3]);
        for _ in 0..steps {
            if self.random.percent(20) {
                let count = self.random.below(4);
                body.extend(self.control_body(run, count));
            }
            let count = *self.random.of(&[3, 6, 12, 25]);
            let mut within = self.control_body(run, count);
            within.extend(self.last_of_step(run));
            let finishes = f64::from(u8::from(self.random.percent(80)));
            body.push(Op { body: within, ..op("step", vec![], vec![finishes]) });
        }
        if self.random.percent(25) {
            body.extend(self.last_of_step(run));
        }
        body
    }

    fn leaf(&mut self) -> Op {
        let width = self.width;
        let shapes: [&[i64]; 6] = [
            &[width, width],
            &[width, width],
            &[width, width],
            &[width],
            &[2, width, width],
            &[1, 2, width, width],
        ];
        let shape = *self.random.of(&shapes);
        let name = *self.random.of(&["leaf", "leaf", "parameter", "parameter", "parameter", "constant"]);
        let seed = self.random.below(1000) as f64;
        let numbers = std::iter::once(seed).chain(shape.iter().map(|size| *size as f64)).collect();
        let slot = self.next;
        self.next += 1;
        Op { outputs: vec![slot], ..op(name, vec![], numbers) }
    }

    /// What a step usually ends with: a loss, backward and an optimizer step.
    fn last_of_step(&mut self, run: &mut Run<'_>) -> Vec<Op> {
        let mut last = Vec::new();
        let most = *self.random.of(&[3, 8, 20]);
        let mut loss = self.loss(&run.values, most);
        if self.random.percent(75) && !loss.is_empty() {
            // The sum keeps what it needs, so the values themselves may be dropped.
            let total = Op { outputs: vec![self.next], ..op("total", loss, vec![]) };
            loss = total.outputs.clone();
            self.next += 1;
            run.run_all(std::slice::from_ref(&total), None);
            last.push(total);
        }
        if self.random.percent(75) {
            last.extend(self.drop_some(&run.values, &loss));
        }
        if self.random.percent(50) {
            last.push(op("flush", vec![], vec![]));
        }
        if self.random.percent(90) && !loss.is_empty() {
            last.push(self.backward(loss));
        }
        if self.random.percent(30) {
            last.push(op("optimize", vec![], vec![]));
        }
        if self.random.percent(20) {
            last.push(op("zero_grad", vec![], vec![]));
        }
        // The total has already been run.
        last.retain(|op| op.name == "total" || self.is_kept(run, op));
        last
    }

    /// Runs `op`. Returns whether it becomes a part of the program: most that fail do not.
    fn is_kept(&mut self, run: &mut Run<'_>, op: &Op) -> bool {
        run.run_all(std::slice::from_ref(op), None);
        let failed = run.values.events.last().is_some_and(|event| event.outcome.is_err());
        !failed || self.random.percent(10)
    }

    fn backward(&mut self, loss: Vec<Slot>) -> Op {
        let mut flag = |percent| f64::from(u8::from(self.random.percent(percent)));
        op("backward", loss, vec![flag(25), flag(15), flag(25)])
    }

    /// Results to run backward from. Most of the time, their backward succeeds.
    fn loss(&mut self, values: &Values, most: usize) -> Vec<Slot> {
        for tries in 0..6 {
            let results = self.results(values, most >> tries);
            let tensors: Vec<Tensor> =
                results.iter().filter_map(|slot| values.slots.get(slot)).map(Tensor::shallow_clone).collect();
            let has_backward =
                || total(&tensors).is_ok_and(|total| torch::backward(&total, true, false).is_ok());
            if self.random.percent(5) || has_backward() {
                return results;
            }
        }
        vec![]
    }

    fn results(&mut self, values: &Values, most: usize) -> Vec<Slot> {
        let is_result = |t: &Tensor| t.requires_grad() && !t.is_leaf();
        let mut slots: Vec<Slot> =
            values.slots.iter().filter(|(_, t)| is_result(t)).map(|(slot, _)| *slot).collect();
        let mut chosen = Vec::new();
        for _ in 0..1 + self.random.below(most.max(1)) {
            if slots.is_empty() {
                break;
            }
            let index = self.random.below(slots.len()).max(self.random.below(slots.len()));
            chosen.push(slots.remove(index));
        }
        chosen
    }

    /// Drops some of the values that are not in `kept`.
    fn drop_some(&mut self, values: &Values, kept: &[Slot]) -> Option<Op> {
        let percent = *self.random.of(&[20, 80, 100, 100]);
        let dropped: Vec<Slot> = values
            .slots
            .iter()
            .filter(|(slot, t)| !t.is_leaf() && !kept.contains(slot) && self.random.percent(percent))
            .map(|(slot, _)| *slot)
            .collect();
        (!dropped.is_empty()).then(|| op("drop", dropped, vec![]))
    }

    /// Operations on tensors, and those that only the outermost level has.
    fn control_body(&mut self, run: &mut Run<'_>, count: usize) -> Vec<Op> {
        let mut body = Vec::new();
        for _ in 0..count {
            let control = match self.random.below(100) {
                0..10 => Some(op("flush", vec![], vec![])),
                10..15 => self.drop_some(&run.values, &[]),
                15..23 => {
                    let loss = self.loss(&run.values, 2);
                    (!loss.is_empty()).then(|| self.backward(loss))
                }
                23..25 => Some(op("micro_batch", vec![], vec![self.random.below(3) as f64])),
                25..29 => Some(op("optimize", vec![], vec![])),
                29..31 => Some(op("zero_grad", vec![], vec![])),
                31..32 => Some(op("optimizer", vec![], vec![self.random.below(5) as f64])),
                32..33 => Some(self.leaf()),
                _ => None,
            };
            match control {
                Some(control) => body.extend(Some(control).filter(|control| self.is_kept(run, control))),
                None => body.extend(self.tensor_ops(&mut run.values, OUTERMOST)),
            }
        }
        body
    }

    fn tensor_body(&mut self, values: &mut Values, count: usize, place: Place) -> Vec<Op> {
        (0..count).flat_map(|_| self.tensor_ops(values, place)).collect()
    }

    /// An operation, after the weights that were made for it; nothing if it is not possible.
    fn tensor_ops(&mut self, values: &mut Values, place: Place) -> Vec<Op> {
        let block = self.blocks.iter().find(|_| place.depth < 2 && self.random.percent(10)).copied();
        if let Some((name, percent)) = block
            && self.random.percent(10 * percent)
        {
            return self.block(name, values, place).into_iter().collect();
        }
        let often = self.often.filter(|_| self.random.percent(30));
        let operation = often.unwrap_or_else(|| *self.random.of(&self.enabled));
        self.operation(operation, values, place)
    }

    fn operation(&mut self, operation: &'static Operation, values: &mut Values, place: Place) -> Vec<Op> {
        let is_within = place.segment.is_some();
        if place.is_parallel && ORDERED.contains(&operation.name)
            || is_within && OF_OTHERS.contains(&operation.name)
        {
            return vec![];
        }
        let mut draw = Draw {
            random: &mut self.random,
            values: &values.slots,
            before: vec![],
            next: self.next,
            may_make: place.segment.is_none(),
            own_from: place.segment.filter(|_| place.is_parallel || !self.misuses).unwrap_or(0),
        };
        let Some(draft) = operation.action.draw(&mut draw) else { return vec![] };
        let Draw { mut before, next, .. } = draw;
        self.next = next;
        values.run_all(&before);
        // How many results there are is not known yet; unused slots do no harm.
        let mut made = Op { name: operation.name, ..op("", draft.inputs, draft.numbers) };
        made.outputs = (self.next..self.next + 8).collect();
        let is_done = matches!(values.outcome(&made), Some(Ok(())));
        made.outputs.retain(|slot| values.slots.contains_key(slot));
        self.next += made.outputs.len();
        let is_fit = made.outputs.iter().filter_map(|slot| values.slots.get(slot)).all(is_fit);
        if is_done && is_fit || !is_done && place.segment.is_none() && self.random.percent(10) {
            before.push(made);
            return before;
        }
        for slot in made.outputs {
            drop(values.slots.remove(&slot));
        }
        before
    }

    fn block(&mut self, name: &'static str, values: &mut Values, place: Place) -> Option<Op> {
        let count = 1 + self.random.below(5);
        let mut block = op(name, vec![], vec![]);
        let within = Place { depth: place.depth + 1, ..place };
        match name {
            "segment" | "remat" => {
                let inputs = 1 + self.random.below(2);
                for _ in 0..inputs {
                    let slot = Draw {
                        random: &mut self.random,
                        values: &values.slots,
                        before: vec![],
                        next: self.next,
                        may_make: false,
                        own_from: 0,
                    }
                    .value()?;
                    block.inputs.push(slot);
                }
                let mut copies = values.fork();
                let within = Place { segment: Some(self.next), ..within };
                block.body = self.tensor_body(&mut copies, count, within);
                // At the end, so that the result depends on it.
                if let Some(often) = self.often.filter(|_| self.random.percent(50)) {
                    block.body.extend(self.operation(often, &mut copies, within));
                }
                drop(copies);
                block.outputs = vec![self.next];
                self.next += 1;
                let is_done = matches!(values.outcome(&block), Some(Ok(())));
                let is_fit =
                    is_done && block.outputs.iter().filter_map(|slot| values.slots.get(slot)).all(is_fit);
                return is_fit.then_some(block);
            }
            "parallel" if place.segment.is_none() => {
                for _ in 0..2 + self.random.below(2) {
                    let within = Place { segment: Some(self.next), is_parallel: true, ..within };
                    let body = self.tensor_body(&mut values.fork(), count, within);
                    block.body.push(Op { body, ..op("branch", vec![], vec![]) });
                }
                values.run(&block);
            }
            "autocast" => {
                let _region = CpuAutocast::enter();
                block.body = self.tensor_body(values, count, within);
            }
            "no_grad" => {
                let _guard = tch::no_grad_guard();
                block.body = self.tensor_body(values, count, within);
            }
            "scope" => {
                block.numbers = vec![self.random.below(3) as f64];
                block.body = self.tensor_body(values, count, within);
            }
            "thread" if place.segment.is_none() => block.body = self.tensor_body(values, count, within),
            _ => return None,
        }
        Some(block)
    }
}

/// Whether a program can go on with this value: it is neither too large nor has too many elements.
fn is_fit(value: &Tensor) -> bool {
    let largest = || value.detach().abs().f_max()?.f_to_kind(Kind::Double)?.f_double_value(&[]);
    value.numel() <= MOST_ELEMENTS && (value.numel() == 0 || largest().is_ok_and(|largest| largest < LARGEST))
}
