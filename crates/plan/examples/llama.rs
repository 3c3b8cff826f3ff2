//! A Llama's step under goals of time and of memory: what of its activations is kept, moved and recomputed.
//!
//! The workload is made from the shapes of the operations: hidden 4096, 8 layers, 32 heads of which 8 have keys and
//! values, 14336 between, 32000 tokens, 4 sequences of 4096, 16-bit weights, and the whole loss in 32 bits.

use std::time::Duration;

use bytesize::ByteSize;
use ssdtrain_plan::{
    Activation, Caps, Frontier, Goal, Machine, OutOfReach, Placement, Plan, Recompute, Role, Workload,
};

const TOKENS: u64 = 4 * 4096;
const SEQUENCE: u64 = 4096;
const HIDDEN: u64 = 4096;
const KEYS: u64 = 1024;
const BETWEEN: u64 = 14336;
const VOCABULARY: u64 = 32000;
const LAYERS: usize = 8;
/// Bytes per second of element-wise operations, and the seconds that launching one takes.
const MEMORY: f64 = 3e12;
const LAUNCH: f64 = 4e-6;
/// Operations per second of matrix products.
const PRODUCTS: f64 = 600e12;
const GIB: f64 = (1_u64 << 30) as f64;

/// The operations of forward, one after another.
#[derive(Default)]
struct Forward {
    activations: Vec<Activation>,
}

impl Forward {
    /// The result of an operation that takes this long.
    fn result(&mut self, role: Role, bytes: u64, seconds: f64, inputs: &[usize]) -> usize {
        let time = Duration::from_secs_f64(seconds);
        self.activations.push(Activation {
            role,
            bytes,
            forward: time,
            recompute: Some(Recompute { time, inputs: inputs.to_vec() }),
            ..Activation::default()
        });
        self.activations.len() - 1
    }

    /// Backward computes the gradient of an operation before it asks for what was saved before it.
    fn gradient(&mut self, seconds: f64) {
        if let Some(saved) = self.activations.iter_mut().rfind(|activation| activation.role == Role::Saved) {
            saved.backward += Duration::from_secs_f64(seconds);
        }
    }

    /// An element-wise operation: it reads its inputs and writes its result.
    fn each(&mut self, role: Role, bytes: u64, inputs: &[usize]) -> usize {
        let read: u64 = inputs.iter().map(|&input| self.activations[input].bytes).sum();
        let seconds = LAUNCH + (read + bytes) as f64 / MEMORY;
        self.gradient(seconds);
        self.result(role, bytes, seconds, inputs)
    }

    /// A product of an activation with a weight.
    fn product(&mut self, role: Role, from: u64, to: u64, input: usize) -> usize {
        let seconds = 2.0 * (TOKENS * from * to) as f64 / PRODUCTS;
        self.gradient(2.0 * seconds);
        self.result(role, 2 * TOKENS * to, seconds, &[input])
    }

    /// The norm of `x`: its copy in 32 bits, the mean of squares, and what the weight is multiplied with.
    fn norm(&mut self, x: usize) -> usize {
        use Role::{Fleeting, Saved};
        let wide = self.each(Saved, 4 * TOKENS * HIDDEN, &[x]);
        let squares = self.each(Fleeting, 4 * TOKENS * HIDDEN, &[wide]);
        let scale = self.each(Saved, 4 * TOKENS, &[squares]);
        let scaled = self.each(Fleeting, 4 * TOKENS * HIDDEN, &[wide, scale]);
        let narrow = self.each(Saved, 2 * TOKENS * HIDDEN, &[scaled]);
        self.each(Saved, 2 * TOKENS * HIDDEN, &[narrow])
    }

    /// A projection with rotary embedding: two halves are swapped and both are multiplied with constants.
    fn rotated(&mut self, to: u64, input: usize) -> usize {
        use Role::{Fleeting, Saved};
        let plain = self.product(Fleeting, HIDDEN, to, input);
        let swapped = self.each(Fleeting, 2 * TOKENS * to, &[plain]);
        let one = self.each(Fleeting, 2 * TOKENS * to, &[plain]);
        let other = self.each(Fleeting, 2 * TOKENS * to, &[swapped]);
        self.each(Saved, 2 * TOKENS * to, &[one, other])
    }

    fn block(&mut self, x: usize) -> usize {
        use Role::{Fleeting, Saved, Spare};
        let y = self.norm(x);
        let (q, k) = (self.rotated(HIDDEN, y), self.rotated(KEYS, y));
        let v = self.product(Saved, HIDDEN, KEYS, y);
        let attention = 2.0 * (TOKENS * SEQUENCE * HIDDEN) as f64 / (0.6 * PRODUCTS);
        self.gradient(2.5 * attention);
        let a = self.result(Saved, 2 * TOKENS * HIDDEN, attention, &[q, k, v]);
        let out = self.product(Fleeting, HIDDEN, HIDDEN, a);
        let x = self.each(Spare, 2 * TOKENS * HIDDEN, &[x, out]);
        let y = self.norm(x);
        let gate = self.product(Saved, HIDDEN, BETWEEN, y);
        let silu = self.each(Saved, 2 * TOKENS * BETWEEN, &[gate]);
        let up = self.product(Saved, HIDDEN, BETWEEN, y);
        let both = self.each(Saved, 2 * TOKENS * BETWEEN, &[silu, up]);
        let down = self.product(Fleeting, BETWEEN, HIDDEN, both);
        self.each(Spare, 2 * TOKENS * HIDDEN, &[x, down])
    }

    /// A step of this forward. What the gradients take in each block is that of its widest part.
    fn step(mut self) -> Workload {
        for activation in self.activations.iter_mut().filter(|activation| activation.role == Role::Saved) {
            activation.backward_extra = 2 * TOKENS * HIDDEN + 2 * activation.bytes;
        }
        // The gradient of the loss in 32 bits, beside the exponentials that it is made from.
        let logits = 4 * TOKENS * VOCABULARY;
        if let Some(loss) = self.activations.last_mut() {
            (loss.forward_extra, loss.backward_extra) = (logits + logits / 2, 2 * logits);
        }
        let mut work = Workload { activations: self.activations, ..Workload::default() };
        (work.turn, work.turn_extra) = (Duration::from_micros(10), logits);
        // Two billion weights, in 16 bits, with their gradients.
        work.rest = Duration::from_millis(5);
        work
    }
}

fn llama() -> Workload {
    let mut forward = Forward::default();
    let mut x = forward.each(Role::Spare, 2 * TOKENS * HIDDEN, &[]);
    for _ in 0..LAYERS {
        x = forward.block(x);
    }
    let y = forward.norm(x);
    let logits = forward.product(Role::Fleeting, HIDDEN, VOCABULARY, y);
    let wide = forward.each(Role::Fleeting, 4 * TOKENS * VOCABULARY, &[logits]);
    forward.each(Role::Saved, 4 * TOKENS * VOCABULARY, &[wide]);
    forward.step()
}

fn main() {
    let work = llama();
    let machine = Machine { copy_out: 50e9, copy_in: 50e9, ..Machine::default() };
    let frontier = Frontier::new(&work, &machine, Caps::default());
    let kept = work.simulate(&[], &machine, &ssdtrain_plan::Budgets::default());
    println!("with everything kept: {:.1} ms, {}", 1e3 * kept.step.as_secs_f64(), ByteSize(kept.peak()));
    println!(
        "{:>14} {:>7} {:>7} {:>7} {:>9} {:>7} {:>7} {:>10} {:>7}",
        "goal", "peak", "step", "waits", "computes", "kept", "moved", "recomputed", "instead"
    );
    let show = |goal: String, plan: Result<Plan, OutOfReach>| match plan {
        Ok(plan) => {
            let prediction = plan.prediction;
            let gib = |role: Role, placements: &[Placement]| {
                let placed = work.activations.iter().zip(&plan.placements);
                let placed = placed.filter(|(one, at)| one.role == role && placements.contains(at));
                placed.map(|(one, _)| one.bytes).sum::<u64>() as f64 / GIB
            };
            println!(
                "{goal:>14} {:>7.3} {:>7.3} {:>7.3} {:>9.3} {:>7.2} {:>7.2} {:>10.2} {:>7.2}",
                prediction.peak() as f64 / kept.peak() as f64,
                prediction.step.as_secs_f64() / kept.step.as_secs_f64(),
                prediction.stall.total().as_secs_f64() / kept.step.as_secs_f64(),
                prediction.recomputed.as_secs_f64() / kept.step.as_secs_f64(),
                gib(Role::Saved, &[Placement::Keep]),
                gib(Role::Saved, &[Placement::Host]),
                gib(Role::Saved, &[Placement::Recompute]),
                gib(Role::Spare, &[Placement::Keep, Placement::Host]),
            );
        }
        Err(out_of_reach) => println!("{goal:>14} {out_of_reach}"),
    };
    for share in [0.0, 0.01, 0.02, 0.05, 0.10, 0.20, 0.30] {
        show(format!("overhead {share:.2}"), frontier.plan(Goal::overhead(share)));
    }
    for share in [0.8, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15] {
        let budget = (share * kept.peak() as f64) as u64;
        show(format!("budget {share:.2}"), frontier.plan(Goal::budget(budget)));
    }
    show("lowest".to_owned(), Ok(frontier.lowest()));
}
