//! Makes a failing program as small as possible while it still fails.

use crate::program::{Op, Program};

/// The smallest program found for which `fails` holds, as it does for `program`.
pub fn shrink(program: &Program, mut fails: impl FnMut(&Program) -> bool) -> Program {
    let mut best = program.clone();
    loop {
        let before = best.clone();
        drop_operations(&mut best, &mut fails);
        try_each(&mut best, blocks_opened, &mut fails);
        try_each(&mut best, settings_dropped, &mut fails);
        try_each(&mut best, arguments_made_simple, &mut fails);
        if best == before {
            return renumbered(best);
        }
    }
}

/// Accepts each of the candidates that still fails, until none does.
fn try_each(
    best: &mut Program,
    candidates: fn(&Program) -> Vec<Program>,
    fails: &mut impl FnMut(&Program) -> bool,
) {
    while let Some(smaller) = candidates(best).into_iter().find(|candidate| fails(candidate)) {
        *best = smaller;
    }
}

/// Removes runs of operations, long ones first, wherever they are.
fn drop_operations(best: &mut Program, fails: &mut impl FnMut(&Program) -> bool) {
    let mut length = count(&best.body).div_ceil(2).max(1);
    loop {
        let mut first = 0;
        while first < count(&best.body) {
            let mut candidate = best.clone();
            let mut position = 0;
            retain(&mut candidate.body, &mut |_| {
                position += 1;
                !(first..first + length).contains(&(position - 1))
            });
            if candidate != *best && fails(&candidate) {
                *best = candidate;
            } else {
                first += length;
            }
        }
        if length == 1 {
            return;
        }
        length = length.div_ceil(2);
    }
}

fn count(body: &[Op]) -> usize {
    body.iter().map(|op| 1 + count(&op.body)).sum()
}

/// Keeps the operations that `keep` accepts, asked in the order of the text. A block is removed together with
/// everything within it.
fn retain(body: &mut Vec<Op>, keep: &mut impl FnMut(&Op) -> bool) {
    body.retain_mut(|op| {
        let kept = keep(op);
        if kept {
            retain(&mut op.body, keep);
        } else {
            // These have positions too.
            (0..count(&op.body)).for_each(|_| {
                keep(op);
            });
        }
        kept
    });
}

/// Each block in turn replaced by its contents.
fn blocks_opened(program: &Program) -> Vec<Program> {
    fn open(body: &[Op], at: &mut usize) -> Vec<Op> {
        let mut opened = Vec::new();
        for op in body {
            let is_block = !op.body.is_empty();
            if is_block && *at == 0 {
                opened.extend(op.body.iter().cloned());
                *at = usize::MAX;
                continue;
            }
            *at -= usize::from(is_block && *at != usize::MAX);
            opened.push(Op { body: open(&op.body, at), ..op.clone() });
        }
        opened
    }
    fn blocks(body: &[Op]) -> usize {
        body.iter().map(|op| usize::from(!op.body.is_empty()) + blocks(&op.body)).sum()
    }
    (0..blocks(&program.body))
        .map(|mut at| Program { body: open(&program.body, &mut at), ..program.clone() })
        .collect()
}

fn settings_dropped(program: &Program) -> Vec<Program> {
    let drop = |index: usize| {
        let mut smaller = program.clone();
        smaller.config.0.remove(index);
        smaller
    };
    (0..program.config.0.len()).map(drop).collect()
}

/// Removes inputs from operations that accept any number, and sets numbers to zero.
fn arguments_made_simple(program: &Program) -> Vec<Program> {
    fn each(body: &[Op], change: &mut impl FnMut(&mut Op)) -> Vec<Op> {
        body.iter()
            .map(|op| {
                let mut op = op.clone();
                change(&mut op);
                op.body = each(&op.body, change);
                op
            })
            .collect()
    }
    let mut simpler = Vec::new();
    for index in 0..count(&program.body) {
        let mut changed = |change: &dyn Fn(&mut Op)| {
            let mut position = 0;
            let body = each(&program.body, &mut |op| {
                if position == index {
                    change(op);
                }
                position += 1;
            });
            if body != program.body {
                simpler.push(Program { body, ..program.clone() });
            }
        };
        for input in 0..3 {
            changed(&|op| {
                if ["backward", "drop"].contains(&op.name) && op.inputs.len() > 1 && input < op.inputs.len() {
                    op.inputs.remove(input);
                }
            });
        }
        for number in 0..3 {
            changed(&|op| {
                if op.name == "backward" {
                    op.numbers.iter_mut().skip(number).take(1).for_each(|flag| *flag = 0.0);
                }
            });
        }
    }
    simpler
}

/// The same with values counted from 0.
fn renumbered(mut program: Program) -> Program {
    fn each(body: &mut [Op], names: &mut Vec<usize>) {
        for op in body {
            let mut name = |slot: &mut usize| {
                let known = names.iter().position(|known| known == slot);
                *slot = known.unwrap_or_else(|| {
                    names.push(*slot);
                    names.len() - 1
                });
            };
            op.inputs.iter_mut().for_each(&mut name);
            each(&mut op.body, names);
            let mut name = |slot: &mut usize| {
                let known = names.iter().position(|known| known == slot);
                *slot = known.unwrap_or_else(|| {
                    names.push(*slot);
                    names.len() - 1
                });
            };
            op.outputs.iter_mut().for_each(&mut name);
        }
    }
    each(&mut program.body, &mut Vec::new());
    program
}
