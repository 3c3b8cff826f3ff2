//! What a chain reads, computes and writes.

use std::collections::HashMap;
use std::hash::Hash;

use super::function::Function;
use super::layout::Layout;
use super::operation::{Element, Operand, Pointwise, Read};

/// A kernel: equal ones have the same source. It is for any number of elements, as far as `is_wide` allows.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Chain {
    pub(super) inputs: Vec<Input>,
    pub(super) steps: Vec<Step>,
    /// How many numbers it is given.
    pub(super) numbers: usize,
    /// The steps whose results are written.
    pub(super) outputs: Vec<usize>,
    /// Whether positions take more than 32 bits.
    pub(super) is_wide: bool,
    /// Whether results are looked up in a table of all there are.
    pub(super) is_table: bool,
}

/// A tensor that is read.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Input {
    pub(super) element: Element,
    pub(super) layout: Layout,
    /// Whether its first element lies at a multiple of [`ALIGNMENT`] bytes.
    pub(super) is_aligned: bool,
}

/// One operation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Step {
    pub(super) function: Function,
    pub(super) operands: Vec<Value>,
    pub(super) element: Element,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Value {
    Input(usize),
    Number(usize),
    Step(usize),
}

/// How much a thread reads or writes at once, in bytes, where elements lie side by side.
pub(crate) const ALIGNMENT: u64 = 16;

/// An operation of a chain.
#[derive(Clone, Debug)]
pub(crate) struct Member<'a, K> {
    pub(crate) operation: &'a Pointwise,
    /// For each storage that it reads: the earlier member that makes it.
    pub(crate) makers: Vec<Option<usize>>,
    /// What identifies each storage that it reads.
    pub(crate) keys: Vec<K>,
    /// Whether its result is needed.
    pub(crate) is_output: bool,
}

/// A chain with what it is run on.
#[derive(Clone, Debug)]
pub(crate) struct Bound<K> {
    pub(crate) chain: Chain,
    /// The storage of each input, and the offset of its first element in bytes.
    pub(crate) inputs: Vec<(K, u64)>,
    pub(crate) numbers: Vec<f32>,
    /// The members whose results are written.
    pub(crate) outputs: Vec<usize>,
    pub(crate) count: u64,
}

/// The chain of these operations, of which each comes after those whose results it reads.
pub(crate) fn bind<K: Copy + Eq + Hash>(members: &[Member<'_, K>]) -> Bound<K> {
    let count = members.first().map_or(0, |member| member.operation.count);
    let mut bound = Bound {
        chain: Chain {
            inputs: Vec::new(),
            steps: Vec::new(),
            numbers: 0,
            outputs: Vec::new(),
            is_wide: count >= NARROW,
            is_table: false,
        },
        inputs: Vec::new(),
        numbers: Vec::new(),
        outputs: Vec::new(),
        count,
    };
    let mut known: HashMap<(K, u64, Input), usize> = HashMap::new();
    for Member { operation, makers, keys, is_output } in members {
        let operands = operation.operands.iter().map(|operand| match operand {
            Operand::Number(number) => {
                bound.numbers.push(*number);
                Value::Number(bound.numbers.len() - 1)
            }
            Operand::Tensor(read) => match makers[read.storage] {
                Some(maker) => Value::Step(maker),
                None => {
                    let offset = read.offset * read.element.bytes();
                    let input = Input {
                        element: read.element,
                        layout: read.layout.clone(),
                        is_aligned: offset.is_multiple_of(ALIGNMENT),
                    };
                    bound.chain.is_wide |= extent(&read.layout, count) >= NARROW;
                    let next = known.len();
                    let place =
                        *known.entry((keys[read.storage], offset, input.clone())).or_insert_with(|| {
                            bound.chain.inputs.push(input);
                            bound.inputs.push((keys[read.storage], offset));
                            next
                        });
                    Value::Input(place)
                }
            },
        });
        let operands = operands.collect();
        bound.chain.steps.push(Step { function: operation.function, operands, element: operation.element });
        if *is_output {
            bound.outputs.push(bound.chain.steps.len() - 1);
        }
    }
    bound.chain.numbers = bound.numbers.len();
    bound.chain.outputs.clone_from(&bound.outputs);
    bound.chain.is_table = bound.chain.may_be_table(count);
    bound
}

/// A chain of one operation.
pub(crate) fn alone(operation: &Pointwise) -> Chain {
    let places = operation.reads().map(|read| read.storage + 1).max().unwrap_or(0);
    let (makers, keys) = (vec![None; places], (0..places).collect());
    bind(&[Member { operation, makers, keys, is_output: true }]).chain
}

/// Whether a kernel of one operation looks its results up.
pub(crate) fn is_table(operation: &Pointwise) -> bool {
    operation.function.is_heavy() && alone(operation).is_table
}

/// Fewer elements are computed in less time than a table takes to be read, which each multiprocessor does.
const WORTH_A_TABLE: u64 = 1 << 24;

/// Positions up to this one, and a thread's elements beyond it, fit in 32 bits.
const NARROW: u64 = 1 << 31;

/// The elements of an operand from the first to the last that is read.
fn extent(layout: &Layout, count: u64) -> u64 {
    let Layout::Strided(dimensions) = layout else { return count };
    let mut left = count;
    let mut last = 0;
    for dimension in dimensions {
        let size = if dimension.size == 0 { left } else { dimension.size };
        last += (size - 1) * dimension.stride;
        left /= size;
    }
    last + 1
}

impl Chain {
    /// How many elements a thread computes: as many of the narrowest as it reads or writes at once.
    pub(crate) fn lanes(&self) -> u64 {
        let dense = self.inputs.iter().filter(|input| input.layout == Layout::Dense);
        let elements = dense.map(|input| input.element).chain(self.results());
        ALIGNMENT / elements.map(Element::bytes).min().unwrap_or(ALIGNMENT)
    }

    /// The types of the results that are written.
    fn results(&self) -> impl Iterator<Item = Element> {
        self.outputs.iter().map(|step| self.steps[*step].element)
    }

    /// Whether it has a result for each value of a single input of 16 bits, and looking them up takes less time than computing them.
    fn may_be_table(&self, count: u64) -> bool {
        let is_narrow = |element: Element| element.bytes() == 2;
        let is_single = matches!(
            &self.inputs[..],
            [Input { element, layout: Layout::Dense, is_aligned: true }] if is_narrow(*element)
        );
        let is_heavy = self.steps.iter().any(|step| step.function.is_heavy());
        count >= WORTH_A_TABLE
            && is_single
            && is_heavy
            && self.numbers == 0
            && self.results().all(is_narrow)
            && self.outputs.len() == 1
    }

    /// Whether results are looked up in a table of all there are.
    pub(crate) fn is_table(&self) -> bool {
        self.is_table
    }

    /// The same, with results that are computed.
    pub(crate) fn without_table(&self) -> Chain {
        Chain { is_table: false, ..self.clone() }
    }

    /// Whether a batch norm is part of it, for which libtorch and cuDNN choose among kernels by size.
    pub(crate) fn has_batch_norm(&self) -> bool {
        let is_one = |step: &Step| matches!(step.function, Function::BatchNorm | Function::BatchNormFolded);
        self.steps.iter().any(is_one)
    }

    /// The same chain as another of libtorch's kernels would round it, if there is one.
    pub(crate) fn alternative(&self) -> Option<Chain> {
        let mut other = self.clone();
        for step in &mut other.steps {
            if step.function == Function::BatchNorm {
                step.function = Function::BatchNormFolded;
            }
        }
        (other != *self).then_some(other)
    }

    /// How many bytes it reads of each input from its first element on, at most, and whether that has to be aligned.
    pub(crate) fn reads(&self, count: u64) -> Vec<(u64, bool)> {
        let read = |Input { element, layout, is_aligned }: &Input| {
            let extent = if *layout == Layout::Constant { 1 } else { extent(layout, count) };
            (extent * element.bytes(), *is_aligned)
        };
        self.inputs.iter().map(read).collect()
    }

    /// How many bytes it writes of each output.
    pub(crate) fn writes(&self, count: u64) -> Vec<u64> {
        self.results().map(|element| count * element.bytes()).collect()
    }

    /// The tensors that a step reads, which computes `operation`, and where they come from.
    pub(crate) fn operands<'a>(
        &self,
        step: usize,
        operation: &'a Pointwise,
    ) -> impl Iterator<Item = (&'a Read, Value)> {
        let values = self.steps.get(step).into_iter().flat_map(|step| &step.operands);
        operation.operands.iter().zip(values).filter_map(|(operand, value)| match operand {
            Operand::Tensor(read) => Some((read, *value)),
            Operand::Number(_) => None,
        })
    }

    /// Which output a step's result is.
    pub(crate) fn output(&self, step: usize) -> Option<usize> {
        self.outputs.iter().position(|output| *output == step)
    }

    /// How many numbers it is given.
    pub(crate) fn numbers(&self) -> usize {
        self.numbers
    }

    /// Whether positions are wide enough for this many elements, which are whole rows of what is expanded.
    pub(crate) fn has_room(&self, count: u64) -> bool {
        let is_narrow = |input: &Input| extent(&input.layout, count) < NARROW;
        let rows = |input: &Input| match &input.layout {
            Layout::Strided(dimensions) => dimensions.iter().map(|dimension| dimension.size.max(1)).product(),
            Layout::Dense | Layout::Constant => 1,
        };
        let are_whole = self.inputs.iter().all(|input| count.is_multiple_of(rows(input)));
        count > 0 && are_whole && (self.is_wide || (count < NARROW && self.inputs.iter().all(is_narrow)))
    }
}

impl Step {
    /// Whether the result is the operand, bit by bit.
    pub(super) fn is_copy(&self, operand: Element) -> bool {
        self.function == Function::Convert && operand == self.element
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::Dimension;
    use super::*;

    fn read(storage: usize, layout: Layout) -> Operand {
        Operand::Tensor(Read { argument: Some(storage), storage, element: Element::Half, offset: 0, layout })
    }

    fn product(operands: Vec<Operand>) -> Pointwise {
        Pointwise {
            function: Function::Multiply,
            operands,
            element: Element::Half,
            count: 1 << 20,
            statistics: vec![],
        }
    }

    #[test]
    fn a_tensor_that_several_read_is_one_input() {
        let first = product(vec![read(0, Layout::Dense), read(1, Layout::Constant)]);
        let second = product(vec![read(0, Layout::Dense), read(1, Layout::Dense)]);
        let bound = bind(&[
            Member { operation: &first, makers: vec![None, None], keys: vec!['x', 'w'], is_output: false },
            Member { operation: &second, makers: vec![Some(0), None], keys: vec!['y', 'x'], is_output: true },
        ]);
        assert_eq!(bound.inputs, [('x', 0), ('w', 0)]);
        assert_eq!(bound.chain.steps[1].operands, [Value::Step(0), Value::Input(0)]);
        assert_eq!(bound.outputs, [1]);
        assert_eq!(bound.chain.lanes(), 8);
    }

    #[test]
    fn positions_beyond_31_bits_are_wide() {
        let wide = |layout| {
            let operation = product(vec![read(0, Layout::Dense), read(1, layout)]);
            let makers = vec![None, None];
            bind(&[Member { operation: &operation, makers, keys: vec![0, 1], is_output: true }]).chain.is_wide
        };
        let rows = |stride| {
            Layout::Strided(vec![Dimension { size: 1 << 10, stride: 1 }, Dimension { size: 0, stride }])
        };
        assert!(!wide(Layout::Constant) && !wide(rows(1 << 20)) && wide(rows(1 << 22)));
    }
}
