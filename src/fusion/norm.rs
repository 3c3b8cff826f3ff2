//! Norms whose statistics are known: then each element is computed by itself, without another pass for means and deviations.

use std::borrow::Cow;

use ssdtrain_libtorch::{Argument, Call, View};

use super::function::{Function, Given};

/// Whether an operator may be one.
pub(crate) fn is_norm(name: &str) -> bool {
    let names = ["native_layer_norm", "_fused_rms_norm", "cudnn_batch_norm", "native_batch_norm"];
    name.strip_prefix("aten::").is_some_and(|name| names.contains(&name))
}

/// The function of a norm, its operands, and which of its results are the statistics that it computes from. None without weights, or with
/// statistics that it did not compute itself.
pub(super) fn function<'a>(
    call: &'a Call,
    result: &View,
    others: &'a [View],
) -> Option<(Function, Vec<Given<'a>>, Vec<usize>)> {
    use Argument::{Tensor, Truth};
    let arguments = &call.arguments[..];
    let is_alike = |x: &View| x.kind == result.kind && x.sizes == result.sizes;
    // On the CPU, libtorch rounds in other ways.
    if result.is_on_cpu || others.iter().zip(1..).any(|(other, place)| other.storage != place) {
        return None;
    }
    match (call.name.strip_prefix("aten::")?, arguments, others) {
        ("native_layer_norm", [Tensor(x), _, Tensor(weight), Tensor(bias), ..], [mean, root])
            if is_alike(x) =>
        {
            let [means, roots] = [mean, root].map(|view| Cow::Owned(of_results(view, arguments)));
            let given =
                vec![x.into(), Given::Tensor(means), Given::Tensor(roots), weight.into(), bias.into()];
            Some((Function::LayerNorm, given, vec![mean.storage, root.storage]))
        }
        ("_fused_rms_norm", [Tensor(x), _, Tensor(weight), ..], [root]) if is_alike(x) => {
            let roots = Cow::Owned(of_results(root, arguments));
            let given = vec![x.into(), Given::Tensor(roots), weight.into()];
            Some((Function::RootMeanSquareNorm, given, vec![root.storage]))
        }
        (
            "cudnn_batch_norm" | "native_batch_norm",
            [Tensor(x), Tensor(weight), Tensor(bias), _, _, Truth(true), ..],
            [mean, root],
        ) if is_alike(x) => {
            let rank = x.sizes.len();
            let [means, roots] = [mean, root].map(|view| of_channels(&of_results(view, arguments), rank));
            let [weight, bias] = [weight, bias].map(|view| of_channels(view, rank));
            let given = vec![x.into(), means?, roots?, weight?, bias?];
            Some((Function::BatchNorm, given, vec![mean.storage, root.storage]))
        }
        _ => None,
    }
}

/// A result as something that is read: it comes after the storages that the operation read.
fn of_results(result: &View, arguments: &[Argument]) -> View {
    let read = arguments.iter().filter_map(|argument| match argument {
        Argument::Tensor(view) => Some(view.storage + 1),
        _ => None,
    });
    View { storage: read.max().unwrap_or(0) + result.storage - 1, ..result.clone() }
}

/// One number for each channel, as a tensor of this rank whose second dimension they are.
fn of_channels<'a>(numbers: &View, rank: usize) -> Option<Given<'a>> {
    let ([channels], [stride]) = (&numbers.sizes[..], &numbers.strides[..]) else { return None };
    let (mut sizes, mut strides) = (vec![1; rank], vec![1; rank]);
    (*sizes.get_mut(1)?, *strides.get_mut(1)?) = (*channels, *stride);
    Some(Given::Tensor(Cow::Owned(View { sizes, strides, ..numbers.clone() })))
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::super::layout::{Dimension, Layout};
    use super::super::operation::tests::{call, view};
    use super::super::operation::{Operand, Pointwise};
    use super::*;

    const X: &[i64] = &[4, 8, 6];

    fn tensor(storage: usize, sizes: &[i64]) -> Argument {
        Argument::Tensor(view(storage, Kind::Float, sizes))
    }

    /// A norm of `X` with these arguments after it, and statistics of these sizes.
    fn norm(name: &'static str, arguments: Vec<Argument>, statistics: &[&[i64]]) -> Call {
        let arguments = std::iter::once(tensor(0, X)).chain(arguments).collect();
        let mut call = call(name, "", arguments, view(0, Kind::Float, X));
        let statistics = statistics.iter().zip(1..).map(|(sizes, made)| view(made, Kind::Float, sizes));
        call.results.extend(statistics);
        call
    }

    /// The function, the storage of each operand and how it is read, and the statistics.
    type Known = (Function, Vec<(usize, Layout)>, Vec<usize>);

    fn reads(call: &Call) -> Option<Known> {
        let known = Pointwise::of(call)?;
        let read = |operand: &Operand| match operand {
            Operand::Tensor(read) => (read.storage, read.layout.clone()),
            Operand::Number(number) => panic!("{number}"),
        };
        Some((known.function, known.operands.iter().map(read).collect(), known.statistics))
    }

    fn strided(dimensions: &[(u64, u64)]) -> Layout {
        let dimensions = dimensions.iter().map(|(size, stride)| Dimension { size: *size, stride: *stride });
        Layout::Strided(dimensions.collect())
    }

    #[test]
    fn rows_have_their_statistics_and_elements_their_weights() {
        let rows: &[i64] = &[4, 8, 1];
        let arguments = vec![Argument::Other, tensor(1, &[6]), tensor(2, &[6]), Argument::Real(1e-5)];
        let layer = norm("aten::native_layer_norm", arguments, &[rows, rows]);
        let (of_rows, of_elements) = (strided(&[(6, 0), (0, 1)]), strided(&[(6, 1), (0, 0)]));
        let read = vec![
            (0, Layout::Dense),
            (3, of_rows.clone()),
            (4, of_rows.clone()),
            (1, of_elements.clone()),
            (2, of_elements.clone()),
        ];
        assert_eq!(reads(&layer), Some((Function::LayerNorm, read, vec![1, 2])));
        let arguments = vec![Argument::Other, tensor(1, &[6]), Argument::Real(1e-5)];
        let root_mean_square = norm("aten::_fused_rms_norm", arguments, &[rows]);
        let read = vec![(0, Layout::Dense), (2, of_rows), (1, of_elements)];
        assert_eq!(reads(&root_mean_square), Some((Function::RootMeanSquareNorm, read, vec![1])));
    }

    /// Those in training, if `trains`.
    fn of_batches(trains: bool) -> Call {
        let numbers = [0.1, 1e-5].map(Argument::Real);
        let given =
            [tensor(1, &[8]), tensor(2, &[8]), Argument::None, Argument::None, Argument::Truth(trains)];
        norm("aten::native_batch_norm", given.into_iter().chain(numbers).collect(), &[&[8], &[8]])
    }

    #[test]
    fn channels_have_their_statistics_and_their_weights() {
        let of_channels = || strided(&[(6, 0), (8, 1), (0, 0)]);
        let read = std::iter::once((0, Layout::Dense)).chain([3, 4, 1, 2].map(|read| (read, of_channels())));
        assert_eq!(reads(&of_batches(true)), Some((Function::BatchNorm, read.collect(), vec![1, 2])));
    }

    #[test]
    fn what_was_not_computed_from_its_own_statistics_is_not_known() {
        assert_eq!(reads(&of_batches(false)), None);
        let without = vec![Argument::Other, Argument::None, Argument::None, Argument::Real(1e-5)];
        assert_eq!(reads(&norm("aten::native_layer_norm", without, &[&[4, 8, 1], &[4, 8, 1]])), None);
    }
}
