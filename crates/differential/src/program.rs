//! Programs as plain data, and as text: what fails is printed so that a test can have it.

use std::fmt;

use crate::config::Config;

/// What has operations within it.
pub(crate) const BLOCKS: &[&str] =
    &["step", "no_grad", "scope", "segment", "remat", "thread", "autocast", "parallel", "branch"];

/// What a value is called.
pub type Slot = usize;

/// A program, and the cache that it is run with.
///
/// As text it is the cache's settings on a line of their own, and then an operation per line:
///
/// ```text
/// cache offload verify
/// seed 7
/// %0 = parameter 1 4 4
/// step {
///   %1 = sin %0
///   flush
///   backward %1 0 0 0
/// }
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Program {
    /// The cache it is run with.
    pub config: Config,
    /// What the random numbers within it begin with.
    pub seed: u64,
    /// What it does.
    pub body: Vec<Op>,
}

/// One operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Op {
    /// Which of the operations.
    pub name: &'static str,
    /// What its results are called.
    pub outputs: Vec<Slot>,
    /// The values it takes. It is passed over if one of them is not there.
    pub inputs: Vec<Slot>,
    /// Its other arguments.
    pub numbers: Vec<f64>,
    /// What is done within it, if it is a block.
    pub body: Vec<Op>,
}

impl Op {
    /// The values that it and what is within it take from outside.
    pub fn free(&self) -> Vec<Slot> {
        let mut free = self.inputs.clone();
        let mut own = Vec::new();
        for op in &self.body {
            free.extend(op.free().into_iter().filter(|slot| !own.contains(slot)));
            own.extend(&op.outputs);
        }
        free.sort_unstable();
        free.dedup();
        free
    }

    /// Whether it, or an operation within it, has one of these names.
    pub fn has(&self, names: &[&str]) -> bool {
        names.contains(&self.name) || self.body.iter().any(|op| op.has(names))
    }

    /// Whether what is within it uses `slot` as the statistics of batch norms that update them, and no other way.
    pub fn only_updates(&self, slot: Slot) -> bool {
        let mut uses = self.body.iter().filter(|op| op.free().contains(&slot)).peekable();
        let only_updated = |op: &Op| match op.name {
            "batch_norm" => op.numbers == [1.0] && !op.inputs.iter().take(3).any(|input| *input == slot),
            "narrow" => op.outputs.iter().all(|view| self.only_updates(*view)),
            _ => false,
        };
        !self.inputs.contains(&slot) && uses.peek().is_some() && uses.all(only_updated)
    }

    fn write(&self, f: &mut fmt::Formatter<'_>, depth: usize) -> fmt::Result {
        write!(f, "{:width$}", "", width = 2 * depth)?;
        for slot in &self.outputs {
            write!(f, "%{slot} ")?;
        }
        f.write_str(if self.outputs.is_empty() { "" } else { "= " })?;
        f.write_str(self.name)?;
        for slot in &self.inputs {
            write!(f, " %{slot}")?;
        }
        for number in &self.numbers {
            write!(f, " {number}")?;
        }
        if !BLOCKS.contains(&self.name) {
            return writeln!(f);
        }
        writeln!(f, " {{")?;
        for op in &self.body {
            op.write(f, depth + 1)?;
        }
        writeln!(f, "{:width$}}}", "", width = 2 * depth)
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, 0)
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "cache {}", self.config)?;
        writeln!(f, "seed {}", self.seed)?;
        self.body.iter().try_for_each(|op| write!(f, "{op}"))
    }
}
