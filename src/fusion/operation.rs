//! The operations that can be computed together as libtorch computes each.

use ssdtrain_libtorch::{Argument, Call, View};
use tch::Kind;

use super::function::{Function, Given};
use super::layout::{Layout, layout, order};
use super::norm;

/// The first of the memory formats of libtorch that name dimensions.
const CHANNELS_LAST: i64 = 2;

/// A type of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Element {
    Float,
    Half,
    BFloat16,
}

/// An operation that computes each element of its first result from one element of each operand.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Pointwise {
    pub(crate) function: Function,
    pub(crate) operands: Vec<Operand>,
    /// The result's type, in which tensors take part.
    pub(crate) element: Element,
    /// How many elements the result has. They lie side by side from the beginning of its storage.
    pub(crate) count: u64,
    /// Which of its other results have to be there: a norm is pointwise once its statistics are known.
    pub(crate) statistics: Vec<usize>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Operand {
    Tensor(Read),
    /// In 32 bits, whatever the type of the result.
    Number(f32),
}

/// A tensor that is read.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Read {
    /// Which argument of the operation it is; `None` for statistics that it made itself.
    pub(crate) argument: Option<usize>,
    /// Which of the storages that the operation reads; statistics come after them.
    pub(crate) storage: usize,
    pub(crate) element: Element,
    /// In elements.
    pub(crate) offset: u64,
    pub(crate) layout: Layout,
}

impl Element {
    pub(crate) fn bytes(self) -> u64 {
        match self {
            Element::Float => 4,
            Element::Half | Element::BFloat16 => 2,
        }
    }

    fn of(kind: Option<Kind>) -> Option<Element> {
        match kind? {
            Kind::Float => Some(Element::Float),
            Kind::Half => Some(Element::Half),
            Kind::BFloat16 => Some(Element::BFloat16),
            _ => None,
        }
    }
}

impl Read {
    /// Whether its elements are those of a whole storage, in the order of memory.
    pub(crate) fn is_whole(&self) -> bool {
        self.offset == 0 && self.layout == Layout::Dense
    }
}

impl Pointwise {
    /// What the call computes, if it is pointwise and known on its device.
    pub(crate) fn of(call: &Call) -> Option<Pointwise> {
        let (result, others) = call.results.split_first()?;
        let element = Element::of(result.kind)?;
        let order = order(&result.sizes, &result.strides)?;
        if result.offset != 0 || result.storage != 0 {
            return None;
        }
        let (function, arguments, statistics) = if others.is_empty() {
            let (function, arguments) = function(call, element)?;
            (function, arguments, Vec::new())
        } else {
            norm::function(call, result, others)?
        };
        let operands = arguments
            .into_iter()
            .map(|argument| match argument {
                Given::Tensor(view) => {
                    let own =
                        |one: &Argument| matches!(one, Argument::Tensor(own) if std::ptr::eq(own, view.as_ref()));
                    let argument = call.arguments.iter().position(own);
                    let read = read(argument, &view, &order, result.sizes.len())?;
                    (view.is_on_cpu == result.is_on_cpu).then_some(Operand::Tensor(read))
                }
                Given::Number(number) => Some(Operand::Number(number)),
            })
            .collect::<Option<Vec<_>>>()?;
        let count = order.iter().map(|(_, size)| size).product();
        let known = Pointwise { function, operands, element, count, statistics };
        (count > 0 && (!result.is_on_cpu || known.is_known_on_cpu(call))).then_some(known)
    }

    /// Whether parts of it can be computed by libtorch's CPU kernels as the whole is.
    fn is_known_on_cpu(&self, call: &Call) -> bool {
        // One that converts other operands does that first, in another pass.
        let is_of_one_type =
            self.function == Function::Convert || self.reads().all(|read| read.element == self.element);
        // Others are not computed by vectors.
        let is_in_rows = self.reads().all(|read| match &read.layout {
            Layout::Dense | Layout::Constant => true,
            Layout::Strided(dimensions) => dimensions[0].stride <= 1,
        });
        // Parts do not have the dimensions that channels of the memory format are.
        let has_format = self.function == Function::Convert
            && matches!(call.arguments.last(), Some(Argument::Integer(format)) if *format >= CHANNELS_LAST);
        is_of_one_type && is_in_rows && !has_format
    }

    /// The bytes that it reads and writes.
    pub(crate) fn traffic(&self) -> u64 {
        let read = |read: &Read| read.layout.elements(self.count) * read.element.bytes();
        self.reads().map(read).sum::<u64>() + self.count * self.element.bytes()
    }

    /// The tensors that it reads.
    pub(crate) fn reads(&self) -> impl Iterator<Item = &Read> {
        self.operands.iter().filter_map(|operand| match operand {
            Operand::Tensor(read) => Some(read),
            Operand::Number(_) => None,
        })
    }
}

fn read(argument: Option<usize>, view: &View, order: &[(usize, u64)], rank: usize) -> Option<Read> {
    Some(Read {
        argument,
        storage: view.storage,
        element: Element::of(view.kind)?,
        offset: u64::try_from(view.offset).ok()?,
        layout: layout(order, rank, &view.sizes, &view.strides)?,
    })
}

/// The function of a call and its operands.
fn function(call: &Call, element: Element) -> Option<(Function, Vec<Given<'_>>)> {
    let arguments = &call.arguments[..];
    let name = call.name.strip_prefix("aten::")?;
    let unary = |function| match arguments {
        [Argument::Tensor(view)] => Some((function, vec![view.into()])),
        _ => None,
    };
    match (name, call.overload.as_str()) {
        ("_to_copy" | "clone", "") => match arguments.first()? {
            Argument::Tensor(view) => Some((Function::Convert, vec![view.into()])),
            _ => None,
        },
        ("add", "Tensor" | "Scalar") => sum(arguments, 1.0),
        ("sub", "Tensor" | "Scalar") => sum(arguments, -1.0),
        ("rsub", "Tensor" | "Scalar") => match arguments {
            [left, right, alpha] => sum_of(right, left, -number(alpha)?),
            _ => None,
        },
        ("mul", "Tensor" | "Scalar") => match arguments {
            [left, right] => Some((Function::Multiply, vec![given(left)?, given(right)?])),
            _ => None,
        },
        ("div", "Tensor" | "Scalar") => match arguments {
            [Argument::Tensor(left), Argument::Tensor(right)] => {
                Some((Function::Divide, vec![left.into(), right.into()]))
            }
            // As libtorch's kernel.
            [Argument::Tensor(left), right] => {
                Some((Function::Multiply, vec![left.into(), Given::Number(1.0 / number(right)?)]))
            }
            _ => None,
        },
        ("pow", "Tensor_Scalar") => match arguments {
            [Argument::Tensor(view), exponent] if number(exponent)? == 2.0 => {
                Some((Function::Square, vec![view.into()]))
            }
            _ => None,
        },
        ("gelu", "") => match arguments {
            [Argument::Tensor(view), Argument::Text(approximate)] => {
                let function = if approximate == "tanh" { Function::GeluByTangent } else { Function::Gelu };
                Some((function, vec![view.into()]))
            }
            _ => None,
        },
        ("neg", "") => unary(Function::Negate),
        ("abs", "") => unary(Function::Absolute),
        ("reciprocal", "") => unary(Function::Reciprocal),
        ("sqrt", "") => unary(Function::SquareRoot),
        ("rsqrt", "") => unary(Function::ReciprocalRoot),
        ("exp", "") => unary(Function::Exponential),
        ("tanh", "") => unary(Function::HyperbolicTangent),
        ("sigmoid", "") => unary(Function::Sigmoid),
        ("silu", "") => unary(Function::Silu),
        ("relu", "") => unary(Function::Relu),
        _ => None,
    }
    // Operations other than conversions compute in the type of their result; one that converts its operands as well reads them in 32
    // bits or narrower, never the other way around.
    .filter(|(function, given)| *function == Function::Convert || given.iter().all(|one| fits(one, element)))
}

/// Whether an operand takes part in an operation whose result has this type without being rounded first.
fn fits(given: &Given<'_>, element: Element) -> bool {
    match given {
        Given::Tensor(view) => {
            let own = Element::of(view.kind);
            own == Some(element) || (element == Element::Float && own.is_some())
        }
        Given::Number(_) => true,
    }
}

/// `left + sign * alpha * right`.
fn sum(arguments: &[Argument], sign: f32) -> Option<(Function, Vec<Given<'_>>)> {
    match arguments {
        [left, right, alpha] => sum_of(left, right, sign * number(alpha)?),
        _ => None,
    }
}

fn sum_of<'a>(left: &'a Argument, right: &'a Argument, alpha: f32) -> Option<(Function, Vec<Given<'a>>)> {
    Some((Function::Add, vec![given(left)?, given(right)?, Given::Number(alpha)]))
}

fn given(argument: &Argument) -> Option<Given<'_>> {
    match argument {
        Argument::Tensor(view) => Some(view.into()),
        other => number(other).map(Given::Number),
    }
}

/// A number in the type in which kernels compute.
#[expect(clippy::cast_precision_loss, reason = "as libtorch converts it")]
fn number(argument: &Argument) -> Option<f32> {
    match argument {
        Argument::Integer(value) => Some(*value as f32),
        Argument::Real(value) => Some(*value as f32),
        _ => None,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn view(storage: usize, kind: Kind, sizes: &[i64]) -> View {
        let mut strides = vec![1; sizes.len()];
        for dimension in (1..sizes.len()).rev() {
            strides[dimension - 1] = strides[dimension] * sizes[dimension];
        }
        View { storage, kind: Some(kind), is_on_cpu: false, offset: 0, sizes: sizes.to_vec(), strides }
    }

    pub(crate) fn call(name: &'static str, overload: &str, arguments: Vec<Argument>, result: View) -> Call {
        Call { name, overload: overload.to_owned(), arguments, results: vec![result] }
    }

    fn tensor(kind: Kind) -> Argument {
        Argument::Tensor(view(0, kind, &[4, 8]))
    }

    #[test]
    fn a_quotient_by_a_number_is_a_product_with_its_reciprocal() {
        let arguments = vec![tensor(Kind::BFloat16), Argument::Integer(3)];
        let known =
            Pointwise::of(&call("aten::div", "Scalar", arguments, view(0, Kind::BFloat16, &[4, 8]))).unwrap();
        assert_eq!(known.function, Function::Multiply);
        assert_eq!(known.operands[1], Operand::Number(1.0 / 3.0));
        let arguments = vec![tensor(Kind::Float), Argument::Tensor(view(1, Kind::Float, &[8]))];
        let known =
            Pointwise::of(&call("aten::div", "Tensor", arguments, view(0, Kind::Float, &[4, 8]))).unwrap();
        assert_eq!(known.function, Function::Divide);
    }

    #[test]
    fn differences_are_sums_with_a_sign() {
        let arguments = vec![tensor(Kind::Float), tensor(Kind::Float), Argument::Integer(2)];
        let result = || view(0, Kind::Float, &[4, 8]);
        let known = Pointwise::of(&call("aten::sub", "Tensor", arguments, result())).unwrap();
        assert_eq!(known.operands[2], Operand::Number(-2.0));
        let arguments = vec![tensor(Kind::Float), Argument::Real(1.0), Argument::Integer(1)];
        let known = Pointwise::of(&call("aten::rsub", "Scalar", arguments, result())).unwrap();
        assert_eq!(known.operands[0], Operand::Number(1.0));
        assert_eq!(known.operands[2], Operand::Number(-1.0));
    }

    #[test]
    fn on_the_cpu_what_parts_compute_otherwise_is_not_known() {
        let on_cpu = |view: View| View { is_on_cpu: true, ..view };
        let sizes = &[4, 8];
        let known =
            |name, arguments, result| Pointwise::of(&call(name, "", arguments, on_cpu(result))).is_some();
        let own = |kind| Argument::Tensor(on_cpu(view(0, kind, sizes)));
        assert!(known("aten::neg", vec![own(Kind::Half)], view(0, Kind::Half, sizes)));
        // Every second element.
        let strided = View { strides: vec![16, 2], ..on_cpu(view(0, Kind::Half, sizes)) };
        assert!(!known("aten::neg", vec![Argument::Tensor(strided)], view(0, Kind::Half, sizes)));
        // Rows of a wider tensor.
        let rows = View { strides: vec![16, 1], ..on_cpu(view(0, Kind::Half, sizes)) };
        assert!(known("aten::neg", vec![Argument::Tensor(rows)], view(0, Kind::Half, sizes)));
        let convert = |format: Argument| {
            known("aten::_to_copy", vec![own(Kind::Half), format], view(0, Kind::Float, sizes))
        };
        assert!(convert(Argument::None) && convert(Argument::Integer(1)) && !convert(Argument::Integer(2)));
        let product = |right| {
            let arguments = vec![own(Kind::Float), right];
            Pointwise::of(&call("aten::mul", "Tensor", arguments, on_cpu(view(0, Kind::Float, sizes))))
                .is_some()
        };
        assert!(product(own(Kind::Float)) && !product(own(Kind::Half)));
        assert!(!product(tensor(Kind::Float)));
    }

    #[test]
    fn what_is_not_certain_is_not_known() {
        let result = || view(0, Kind::Float, &[4, 8]);
        let refused = |name, overload: &str, arguments, result| {
            assert_eq!(Pointwise::of(&call(name, overload, arguments, result)), None, "{name}");
        };
        refused("aten::sin", "", vec![tensor(Kind::Float)], result());
        refused("aten::neg", "", vec![tensor(Kind::Double)], view(0, Kind::Double, &[4, 8]));
        refused("aten::pow", "Tensor_Scalar", vec![tensor(Kind::Float), Argument::Real(1.5)], result());
        let rounding = vec![tensor(Kind::Float), tensor(Kind::Float), Argument::Text("floor".to_owned())];
        refused("aten::div", "Tensor_mode", rounding, result());
        let on_cpu = View { is_on_cpu: true, ..view(1, Kind::Float, &[]) };
        refused("aten::mul", "Tensor", vec![tensor(Kind::Float), Argument::Tensor(on_cpu)], result());
        // A wide number of the device is rounded before a narrow tensor is multiplied with it.
        let wide = Argument::Tensor(view(1, Kind::Float, &[]));
        refused("aten::mul", "Tensor", vec![tensor(Kind::Half), wide], view(0, Kind::Half, &[4, 8]));
        refused("aten::neg", "", vec![tensor(Kind::Float)], View { offset: 8, ..result() });
    }
}
