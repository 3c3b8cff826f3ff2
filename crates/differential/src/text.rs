//! Parses programs from their text.

use std::str::FromStr;

use anyhow::{Context, Error, Result, bail, ensure};

use crate::operations;
use crate::program::{Op, Program, Slot};

impl FromStr for Program {
    type Err = Error;

    fn from_str(text: &str) -> Result<Program> {
        let mut program = Program::default();
        // The open bodies, each with the block that it belongs to, except for the outermost.
        let mut open: Vec<Vec<Op>> = vec![Vec::new()];
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let innermost = open.len() - 1;
            if let Some(config) = line.strip_prefix("cache") {
                program.config = config.parse()?;
            } else if let Some(seed) = line.strip_prefix("seed ") {
                program.seed = seed.parse().with_context(|| line.to_owned())?;
            } else if line == "}" {
                let body = open.pop().unwrap_or_default();
                let block = open.last_mut().and_then(|outer| outer.last_mut());
                block.context("a brace too many")?.body = body;
            } else if let Some(head) = line.strip_suffix('{') {
                open[innermost].push(op(head)?);
                open.push(Vec::new());
            } else {
                open[innermost].push(op(line)?);
            }
        }
        ensure!(open.len() == 1, "a brace is missing");
        program.body = open.pop().unwrap_or_default();
        Ok(program)
    }
}

/// One line, without its body.
fn op(line: &str) -> Result<Op> {
    let (outputs, call) = line.split_once('=').unwrap_or(("", line));
    let mut words = call.split_whitespace();
    let name = words.next().with_context(|| line.to_owned())?;
    let name = operations::name(name).with_context(|| format!("there is no operation {name}"))?;
    let slot = |word: &str| -> Result<Slot> {
        let digits = word.strip_prefix('%').with_context(|| format!("{word} in {line}"))?;
        digits.parse().with_context(|| line.to_owned())
    };
    let mut op = Op { name, outputs: Vec::new(), inputs: Vec::new(), numbers: Vec::new(), body: Vec::new() };
    op.outputs = outputs.split_whitespace().map(slot).collect::<Result<_>>()?;
    for word in words {
        if word.starts_with('%') {
            if !op.numbers.is_empty() {
                bail!("values come before numbers: {line}");
            }
            op.inputs.push(slot(word)?);
        } else {
            op.numbers.push(word.parse().with_context(|| line.to_owned())?);
        }
    }
    Ok(op)
}
