//! A chain in CUDA C++.

use std::fmt::Write as _;

use super::chain::{Chain, Input, Step, Value};
use super::function::Function;
use super::layout::{Dimension, Layout};
use super::operation::Element;

/// The kernel's name.
pub(crate) const ENTRY: &str = "chain";
/// Threads of a block; each computes [`Chain::lanes`] elements.
pub(crate) const THREADS: u32 = 256;
/// The same of a kernel with a table. Each thread has so many times as many elements at once, and goes on with others.
const TABLE_THREADS: u32 = 1024;
const TABLE_PARTS: u32 = 2;
/// A table has a result for each value of 16 bits.
const CODES: u32 = 1 << 16;
/// The bytes of one, which each block has to itself.
pub(crate) const TABLE_BYTES: u32 = 2 * CODES;

/// How a chain's kernel is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Blocks and the threads of each.
    pub(crate) blocks: u64,
    pub(crate) threads: u32,
    /// Bytes that each block has to itself.
    pub(crate) shared: u32,
}

impl Shape {
    /// That of a kernel for so many elements, on a device with so many multiprocessors.
    pub(crate) fn of(chain: &Chain, count: u64, multiprocessors: u32) -> Shape {
        if chain.is_table {
            let at_once = chain.lanes() * u64::from(TABLE_THREADS * TABLE_PARTS);
            let blocks = count.div_ceil(at_once).min(u64::from(multiprocessors));
            return Shape { blocks, threads: TABLE_THREADS, shared: TABLE_BYTES };
        }
        let blocks = count.div_ceil(chain.lanes() * u64::from(THREADS));
        Shape { blocks, threads: THREADS, shared: 0 }
    }
}

/// Conversions of 16-bit types, rounded to even.
const CONVERSIONS: &str = include_str!("conversions.cuh");

/// What libtorch's kernels compute, written as they write it: the compiler contracts products and sums within each, and nowhere else, since
/// the rounding of an operation's own last product or sum is stated.
const FUNCTIONS: &str = include_str!("functions.cuh");

/// Reads and writes of a thread's elements: all at once where they are there.
const TRANSFERS: &str = include_str!("transfers.cuh");

/// Results that are looked up.
const TABLE: &str = include_str!("table.cuh");

/// The source of the chain's kernel. It takes the inputs, the outputs, the numbers, how many elements there are, and the place to note that
/// what it made differs from what is in the outputs; if that is null, it writes the outputs.
pub(crate) fn source(chain: &Chain) -> String {
    let position = if chain.is_wide { "unsigned long long" } else { "unsigned" };
    let lanes = chain.lanes();
    let writer = Writer { chain, lanes };
    let kernel = if chain.is_table { writer.table() } else { writer.kernel() };
    let kernel = kernel.unwrap_or_else(|_| unreachable!("a string takes all text"));
    format!(
        "{CONVERSIONS}typedef {position} position;\n#define LANES {lanes}\n{FUNCTIONS}{TRANSFERS}\n{kernel}"
    )
}

/// How a thread reads an input.
enum Manner<'a> {
    /// Side by side, at the thread's position.
    Together,
    /// Side by side, at another one.
    TogetherAt(&'a [Dimension]),
    /// One element for all.
    Once(&'a [Dimension]),
    /// Each by itself.
    Each(&'a [Dimension]),
}

const FLAT: &[Dimension] = &[Dimension { size: 0, stride: 1 }];

struct Writer<'a> {
    chain: &'a Chain,
    lanes: u64,
}

impl Writer<'_> {
    fn kernel(&self) -> Result<String, std::fmt::Error> {
        let Chain { inputs, steps, numbers, outputs, .. } = self.chain;
        let mut text = String::new();
        let mut parameters: Vec<String> = Vec::new();
        let read = |(index, input): (usize, &Input)| {
            format!("const {}* __restrict__ in{index}", type_of(input.element))
        };
        parameters.extend(inputs.iter().enumerate().map(read));
        let write = |(index, step): (usize, &usize)| format!("{}* out{index}", type_of(steps[*step].element));
        parameters.extend(outputs.iter().enumerate().map(write));
        parameters.extend((0..*numbers).map(|index| format!("float n{index}")));
        parameters.extend(["position count".to_owned(), "unsigned* differs".to_owned()]);
        writeln!(text, "extern \"C\" __global__ void __launch_bounds__({THREADS})")?;
        writeln!(text, "{ENTRY}({}) {{", parameters.join(", "))?;
        writeln!(text, "  const position at = ((position)blockIdx.x * {THREADS} + threadIdx.x) * LANES;")?;
        writeln!(text, "  if (at >= count) return;")?;
        for (index, input) in inputs.iter().enumerate() {
            self.read(&mut text, index, input)?;
        }
        for (index, step) in outputs.iter().enumerate() {
            writeln!(text, "  alignas(16) {} w{index}[LANES];", type_of(steps[*step].element))?;
        }
        writeln!(text, "#pragma unroll\n  for (int lane = 0; lane < LANES; ++lane) {{")?;
        for (index, step) in steps.iter().enumerate() {
            writeln!(text, "    const {} s{index} = {};", type_of(step.element), self.result(step))?;
        }
        for (index, step) in outputs.iter().enumerate() {
            writeln!(text, "    w{index}[lane] = s{step};")?;
        }
        writeln!(text, "  }}")?;
        for index in 0..outputs.len() {
            writeln!(text, "  settle(out{index}, w{index}, at, count, differs);")?;
        }
        writeln!(text, "}}")?;
        Ok(text)
    }

    /// A kernel that looks results up, of which each is computed once for all.
    fn table(&self) -> Result<String, std::fmt::Error> {
        let Chain { steps, outputs, .. } = self.chain;
        let mut text = format!("#define CODES {CODES}\n");
        writeln!(text, "__device__ __forceinline__ unsigned short computed(unsigned short code) {{")?;
        writeln!(text, "  const unsigned short a0[1] = {{code}};\n  const int lane = 0;")?;
        for (index, step) in steps.iter().enumerate() {
            writeln!(text, "  const {} s{index} = {};", type_of(step.element), self.result(step))?;
        }
        let last = outputs.first().copied().unwrap_or_default();
        writeln!(text, "  return s{last};\n}}\n{TABLE}")?;
        writeln!(text, "extern \"C\" __global__ void __launch_bounds__({TABLE_THREADS})")?;
        writeln!(
            text,
            "{ENTRY}(const unsigned short* __restrict__ in0, unsigned short* out0, position count, unsigned* differs) {{"
        )?;
        writeln!(text, "  look_up<{TABLE_PARTS}>(in0, out0, count, differs);\n}}")?;
        Ok(text)
    }

    fn manner<'i>(&self, input: &'i Input) -> Manner<'i> {
        let elements = |dimension: &Dimension| dimension.stride * input.element.bytes();
        match &input.layout {
            Layout::Dense if input.is_aligned => Manner::Together,
            Layout::Dense => Manner::Each(FLAT),
            Layout::Constant => Manner::Once(&[]),
            Layout::Strided(dimensions) => {
                let (inner, outer) = (dimensions[0], &dimensions[1..]);
                // Then the number of elements is a multiple as well, and no thread's elements are in two rows.
                let is_even = inner.size > 0 && inner.size.is_multiple_of(self.lanes);
                let is_aligned =
                    input.is_aligned && outer.iter().all(|dimension| elements(dimension).is_multiple_of(16));
                match inner.stride {
                    0 if is_even => Manner::Once(dimensions),
                    1 if is_even && is_aligned => Manner::TogetherAt(dimensions),
                    _ => Manner::Each(dimensions),
                }
            }
        }
    }

    fn read(&self, text: &mut String, index: usize, input: &Input) -> std::fmt::Result {
        let kind = type_of(input.element);
        match self.manner(input) {
            Manner::Together => {
                writeln!(text, "  alignas(16) {kind} a{index}[LANES];")?;
                writeln!(text, "  read(a{index}, in{index}, at, count);")
            }
            Manner::TogetherAt(dimensions) => {
                writeln!(text, "  alignas(16) {kind} a{index}[LANES];")?;
                writeln!(text, "  read_all(a{index}, in{index} + ({}));", place("at", dimensions))
            }
            Manner::Once(dimensions) => {
                writeln!(text, "  const {kind} a{index} = in{index}[{}];", place("at", dimensions))
            }
            Manner::Each(dimensions) => {
                writeln!(text, "  {kind} a{index}[LANES];")?;
                writeln!(text, "#pragma unroll\n  for (int lane = 0; lane < LANES; ++lane) {{")?;
                writeln!(text, "    const position of = at + lane < count ? at + lane : at;")?;
                writeln!(text, "    a{index}[lane] = in{index}[{}];\n  }}", place("of", dimensions))
            }
        }
    }

    /// A step's result, in the bits of its type.
    fn result(&self, step: &Step) -> String {
        let bits = |value: &Value| match value {
            Value::Input(index) => match self.manner(&self.chain.inputs[*index]) {
                Manner::Once(_) => (format!("a{index}"), self.chain.inputs[*index].element),
                _ => (format!("a{index}[lane]"), self.chain.inputs[*index].element),
            },
            Value::Step(index) => (format!("s{index}"), self.chain.steps[*index].element),
            Value::Number(index) => (format!("to_float(n{index})"), Element::Float),
        };
        let wide = |value: &Value| match value {
            Value::Number(index) => format!("n{index}"),
            _ => {
                let (bits, element) = bits(value);
                format!("from_{}({bits})", name_of(element))
            }
        };
        let to = |value: &str| format!("to_{}({value})", name_of(step.element));
        let operands: Vec<String> = step.operands.iter().map(wide).collect();
        let (first, element) = bits(&step.operands[0]);
        match step.function {
            Function::Convert if step.is_copy(element) => first,
            Function::Convert => to(&operands[0]),
            Function::Negate if step.element == Element::Half && element == Element::Half => {
                format!("negate_half({first})")
            }
            // NaN comes back as it is.
            Function::Relu => {
                let wide = &operands[0];
                format!("{wide} != {wide} ? {first} : {}", to(&format!("relu({wide})")))
            }
            function => to(&format!("{}({})", function_name(function), operands.join(", "))),
        }
    }
}

/// The element of an operand that belongs to the one at `position` of a result.
fn place(position: &str, dimensions: &[Dimension]) -> String {
    let mut terms = Vec::new();
    let mut passed: u64 = 1;
    for Dimension { size, stride } in dimensions {
        let mut term = position.to_owned();
        if passed > 1 {
            term = format!("{term} / {passed}");
        }
        if *size > 0 {
            term = format!("{term} % {size}");
            passed *= size;
        }
        match stride {
            0 => {}
            1 => terms.push(term),
            _ => terms.push(format!("({term}) * {stride}")),
        }
    }
    if terms.is_empty() { "0".to_owned() } else { terms.join(" + ") }
}

fn type_of(element: Element) -> &'static str {
    match element {
        Element::Float => "unsigned",
        Element::Half | Element::BFloat16 => "unsigned short",
    }
}

fn name_of(element: Element) -> &'static str {
    match element {
        Element::Float => "float",
        Element::Half => "half",
        Element::BFloat16 => "bfloat",
    }
}

fn function_name(function: Function) -> &'static str {
    match function {
        Function::Convert => "",
        Function::Add => "add",
        Function::Multiply => "multiply",
        Function::Divide => "divide",
        Function::Negate => "negate",
        Function::Absolute => "absolute",
        Function::Reciprocal => "reciprocal",
        Function::Square => "square",
        Function::SquareRoot => "square_root",
        Function::ReciprocalRoot => "reciprocal_root",
        Function::Exponential => "exponential",
        Function::HyperbolicTangent => "hyperbolic_tangent",
        Function::Sigmoid => "sigmoid",
        Function::Silu => "silu",
        Function::Relu => "relu",
        Function::Gelu => "gelu",
        Function::GeluByTangent => "gelu_by_tangent",
        Function::LayerNorm => "layer_norm",
        Function::RootMeanSquareNorm => "root_mean_square_norm",
        Function::BatchNorm => "batch_norm",
        Function::BatchNormFolded => "batch_norm_folded",
    }
}

#[cfg(test)]
pub(super) mod tests {
    use ssdtrain_libtorch::{Argument, Call, View};
    use tch::Kind;

    use super::super::chain::{Member, alone, bind};
    use super::super::operation::Pointwise;
    use super::super::operation::tests::{call, view};
    use super::*;

    /// What is before the functions that all kernels have.
    pub(crate) fn without_conversions(text: &str) -> String {
        text.replacen(CONVERSIONS, "", 1)
    }

    /// The kernel of operations that each read what the ones before made: storage `n` is made by member `n - 10`.
    fn kernel(calls: &[Call]) -> String {
        let known: Vec<Pointwise> = calls.iter().map(|call| Pointwise::of(call).unwrap()).collect();
        let members: Vec<_> = known
            .iter()
            .enumerate()
            .map(|(number, operation)| Member {
                operation,
                makers: (0..20_usize).map(|storage| storage.checked_sub(10)).collect(),
                keys: (0..20).collect(),
                is_output: number + 1 == known.len(),
            })
            .collect();
        let text = source(&bind(&members).chain);
        text.split_once("\n\nextern").map(|(_, kernel)| format!("extern{kernel}")).unwrap()
    }

    fn tensor(storage: usize, kind: Kind, sizes: &[i64]) -> Argument {
        Argument::Tensor(view(storage, kind, sizes))
    }

    fn result(kind: Kind, sizes: &[i64]) -> View {
        view(0, kind, sizes)
    }

    #[test]
    fn a_gate() {
        let (kind, sizes) = (Kind::BFloat16, &[16, 64][..]);
        let silu = call("aten::silu", "", vec![tensor(0, kind, sizes)], result(kind, sizes));
        let product = call(
            "aten::mul",
            "Tensor",
            vec![tensor(10, kind, sizes), tensor(1, kind, sizes)],
            result(kind, sizes),
        );
        assert_text(&kernel(&[silu, product]), GATE);
    }

    const GATE: &str = r#"
extern "C" __global__ void __launch_bounds__(256)
chain(const unsigned short* __restrict__ in0, const unsigned short* __restrict__ in1, unsigned short* out0, position count, unsigned* differs) {
  const position at = ((position)blockIdx.x * 256 + threadIdx.x) * LANES;
  if (at >= count) return;
  alignas(16) unsigned short a0[LANES];
  read(a0, in0, at, count);
  alignas(16) unsigned short a1[LANES];
  read(a1, in1, at, count);
  alignas(16) unsigned short w0[LANES];
#pragma unroll
  for (int lane = 0; lane < LANES; ++lane) {
    const unsigned short s0 = to_bfloat(silu(from_bfloat(a0[lane])));
    const unsigned short s1 = to_bfloat(multiply(from_bfloat(s0), from_bfloat(a1[lane])));
    w0[lane] = s1;
  }
  settle(out0, w0, at, count, differs);
}
"#;

    #[test]
    fn the_output_of_a_norm() {
        let sizes = &[16, 64][..];
        let (narrow, wide) = (Kind::BFloat16, Kind::Float);
        let cast = call("aten::_to_copy", "", vec![tensor(0, narrow, sizes)], result(wide, sizes));
        let root = tensor(1, wide, &[16, 1]);
        let scaled = call("aten::mul", "Tensor", vec![tensor(10, wide, sizes), root], result(wide, sizes));
        let back = call("aten::_to_copy", "", vec![tensor(11, wide, sizes)], result(narrow, sizes));
        let weight = tensor(2, narrow, &[64]);
        let output =
            call("aten::mul", "Tensor", vec![tensor(12, narrow, sizes), weight], result(narrow, sizes));
        assert_text(&kernel(&[cast, scaled, back, output]), NORM);
    }

    const NORM: &str = r#"
extern "C" __global__ void __launch_bounds__(256)
chain(const unsigned short* __restrict__ in0, const unsigned* __restrict__ in1, const unsigned short* __restrict__ in2, unsigned short* out0, position count, unsigned* differs) {
  const position at = ((position)blockIdx.x * 256 + threadIdx.x) * LANES;
  if (at >= count) return;
  alignas(16) unsigned short a0[LANES];
  read(a0, in0, at, count);
  const unsigned a1 = in1[at / 64];
  alignas(16) unsigned short a2[LANES];
  read_all(a2, in2 + (at % 64));
  alignas(16) unsigned short w0[LANES];
#pragma unroll
  for (int lane = 0; lane < LANES; ++lane) {
    const unsigned s0 = to_float(from_bfloat(a0[lane]));
    const unsigned s1 = to_float(multiply(from_float(s0), from_float(a1)));
    const unsigned short s2 = to_bfloat(from_float(s1));
    const unsigned short s3 = to_bfloat(multiply(from_bfloat(s2), from_bfloat(a2[lane])));
    w0[lane] = s3;
  }
  settle(out0, w0, at, count, differs);
}
"#;

    #[test]
    fn gelu_in_32_bits() {
        let (kind, sizes) = (Kind::Float, &[100][..]);
        let arguments = vec![tensor(0, kind, sizes), Argument::Text("tanh".to_owned())];
        let gelu = call("aten::gelu", "", arguments, result(kind, sizes));
        let arguments = vec![tensor(10, kind, sizes), Argument::Real(0.5), Argument::Integer(1)];
        let sum = call("aten::add", "Scalar", arguments, result(kind, sizes));
        assert_text(&kernel(&[gelu, sum]), GELU);
    }

    const GELU: &str = r#"
extern "C" __global__ void __launch_bounds__(256)
chain(const unsigned* __restrict__ in0, unsigned* out0, float n0, float n1, position count, unsigned* differs) {
  const position at = ((position)blockIdx.x * 256 + threadIdx.x) * LANES;
  if (at >= count) return;
  alignas(16) unsigned a0[LANES];
  read(a0, in0, at, count);
  alignas(16) unsigned w0[LANES];
#pragma unroll
  for (int lane = 0; lane < LANES; ++lane) {
    const unsigned s0 = to_float(gelu_by_tangent(from_float(a0[lane])));
    const unsigned s1 = to_float(add(from_float(s0), n0, n1));
    w0[lane] = s1;
  }
  settle(out0, w0, at, count, differs);
}
"#;

    #[test]
    fn rows_that_are_strided_and_columns_that_are_expanded() {
        let (kind, sizes) = (Kind::Half, &[4, 6][..]);
        let turned = View { strides: vec![1, 4], offset: 3, ..view(0, kind, sizes) };
        let negated = call("aten::neg", "", vec![Argument::Tensor(turned)], result(kind, sizes));
        let column = tensor(1, kind, &[4, 1]);
        let arguments = vec![tensor(10, kind, sizes), column];
        let quotient = call("aten::div", "Tensor", arguments, result(kind, sizes));
        assert_text(&kernel(&[negated, quotient]), STRIDED);
    }

    const STRIDED: &str = r#"
extern "C" __global__ void __launch_bounds__(256)
chain(const unsigned short* __restrict__ in0, const unsigned short* __restrict__ in1, unsigned short* out0, position count, unsigned* differs) {
  const position at = ((position)blockIdx.x * 256 + threadIdx.x) * LANES;
  if (at >= count) return;
  unsigned short a0[LANES];
#pragma unroll
  for (int lane = 0; lane < LANES; ++lane) {
    const position of = at + lane < count ? at + lane : at;
    a0[lane] = in0[(of % 6) * 4 + of / 6];
  }
  unsigned short a1[LANES];
#pragma unroll
  for (int lane = 0; lane < LANES; ++lane) {
    const position of = at + lane < count ? at + lane : at;
    a1[lane] = in1[of / 6];
  }
  alignas(16) unsigned short w0[LANES];
#pragma unroll
  for (int lane = 0; lane < LANES; ++lane) {
    const unsigned short s0 = negate_half(a0[lane]);
    const unsigned short s1 = to_half(divide(from_half(s0), from_half(a1[lane])));
    w0[lane] = s1;
  }
  settle(out0, w0, at, count, differs);
}
"#;

    fn gelu(kind: Kind, rows: i64, offset: i64) -> Call {
        let sizes = &[rows, 1024][..];
        let read = View { offset, ..view(0, kind, sizes) };
        call(
            "aten::gelu",
            "",
            vec![Argument::Tensor(read), Argument::Text("none".to_owned())],
            result(kind, sizes),
        )
    }

    #[test]
    fn results_of_16_bits_are_looked_up_where_that_takes_less_time() {
        let rows = 1 << 14;
        let kernel = |calls: &[Call]| kernel(calls).contains("look_up<");
        assert!(kernel(&[gelu(Kind::BFloat16, rows, 0)]) && kernel(&[gelu(Kind::Half, rows, 0)]));
        let twice = |call: Call| {
            let View { kind, sizes, .. } = &call.results[0];
            let tensor = tensor(10, kind.unwrap(), sizes);
            [
                call.clone(),
                super::super::operation::tests::call("aten::relu", "", vec![tensor], call.results[0].clone()),
            ]
        };
        assert!(kernel(&twice(gelu(Kind::BFloat16, rows, 0))));
        assert!(!kernel(&[gelu(Kind::Float, rows, 0)]), "too many values");
        assert!(!kernel(&[gelu(Kind::BFloat16, rows / 2, 0)]), "too few elements");
        assert!(!kernel(&[gelu(Kind::BFloat16, rows, 1)]), "elements that are not read together");
    }

    #[test]
    fn a_table_is_read_by_each_multiprocessor_once() {
        let known = alone(&Pointwise::of(&gelu(Kind::BFloat16, 1 << 14, 0)).unwrap());
        let shape = |count| Shape::of(&known, count, 132);
        assert_eq!(shape(1 << 24), Shape { blocks: 132, threads: 1024, shared: 131_072 });
        assert_eq!(shape(3 << 14).blocks, 3);
        assert_eq!(shape(1).blocks, 1);
        let without = known.without_table();
        assert_eq!(Shape::of(&without, 1 << 24, 132), Shape { blocks: 8192, threads: 256, shared: 0 });
        assert!(!source(&without).contains("look_up<"));
    }

    #[track_caller]
    fn assert_text(got: &str, expected: &str) {
        assert_eq!(got.trim(), expected.trim(), "\n{got}");
    }
}
