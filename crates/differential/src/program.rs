//! Programs as plain data and as text: failing programs are printed so that they can become tests.

use std::fmt;

use crate::config::Config;
use crate::operations::ORDERED;

/// The operations that contain others.
pub(crate) const BLOCKS: &[&str] =
    &["step", "no_grad", "scope", "segment", "remat", "thread", "autocast", "parallel", "branch"];

/// The name of a value.
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
    /// The cache that it is run with.
    pub config: Config,
    /// The seed of its random numbers.
    pub seed: u64,
    /// Its operations.
    pub body: Vec<Op>,
}

/// One operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Op {
    /// Which operation it is.
    pub name: &'static str,
    /// The names of its results.
    pub outputs: Vec<Slot>,
    /// The values it takes. It is skipped if one of them does not exist.
    pub inputs: Vec<Slot>,
    /// Its other arguments.
    pub numbers: Vec<f64>,
    /// The operations within it, if it is a block.
    pub body: Vec<Op>,
}

impl Op {
    /// The values that it and the operations within it take from outside.
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

    /// Whether the operations within it use `slot` only as the statistics of batch norms that update them.
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

impl Program {
    /// Whether its results depend on what other threads do meanwhile.
    pub fn is_ordered(&self) -> bool {
        self.body.iter().any(|op| op.has(ORDERED))
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "cache {}", self.config)?;
        writeln!(f, "seed {}", self.seed)?;
        self.body.iter().try_for_each(|op| write!(f, "{op}"))
    }
}
