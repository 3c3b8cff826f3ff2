//! Layers: operations with weights.

use tch::Tensor;

use super::Action::Other;
use super::{Operation, Outcome, exactly};
use crate::draw::{Draft, Draw};
use crate::program::Slot;

pub(super) const LAYERS: &[Operation] = &[
    Operation { name: "layer_norm", action: Other { draw: draw_norm, run: layer_norm } },
    Operation { name: "batch_norm", action: Other { draw: draw_batch_norm, run: batch_norm } },
    Operation { name: "instance_norm", action: Other { draw: draw_norm, run: instance_norm } },
    Operation { name: "group_norm", action: Other { draw: draw_value, run: group_norm } },
    Operation { name: "conv1d", action: Other { draw: draw_conv1d, run: conv1d } },
    Operation { name: "conv2d", action: Other { draw: draw_conv2d, run: conv2d } },
    Operation { name: "max_pool", action: Other { draw: draw_value, run: max_pool } },
    Operation { name: "avg_pool", action: Other { draw: draw_value, run: avg_pool } },
    Operation { name: "gru", action: Other { draw: draw_gru, run: gru } },
    Operation { name: "lstm", action: Other { draw: draw_lstm, run: lstm } },
    Operation { name: "embedding", action: Other { draw: draw_embedding, run: embedding } },
    Operation { name: "cross_entropy", action: Other { draw: draw_value, run: cross_entropy } },
];

fn draw_value(draw: &mut Draw<'_>) -> Option<Draft> {
    Some(Draft::of(vec![draw.value()?], vec![]))
}

fn last(draw: &Draw<'_>, slot: usize) -> Option<i64> {
    draw.values.get(&slot)?.size().last().copied()
}

fn draw_norm(draw: &mut Draw<'_>) -> Option<Draft> {
    let x = draw.value()?;
    let width = last(draw, x)?;
    Some(Draft::of(vec![x, draw.weight(&[width])?, draw.weight(&[width])?], vec![]))
}

fn draw_batch_norm(draw: &mut Draw<'_>) -> Option<Draft> {
    let x = draw.value()?;
    let width = draw.values.get(&x)?.size().get(1).copied()?;
    let weights = [draw.weight(&[width])?, draw.weight(&[width])?];
    let statistics = draw_statistics(draw, width)?;
    let training = draw.random.percent(70);
    Some(Draft::of([&[x], &weights[..], &statistics[..]].concat(), vec![f64::from(u8::from(training))]))
}

/// Running statistics: tensors of their own, or views of one buffer. The buffer may be larger, and the views may overlap.
fn draw_statistics(draw: &mut Draw<'_>, width: i64) -> Option<[Slot; 2]> {
    if draw.random.percent(50) {
        return Some([draw.buffer(&[width])?, draw.buffer(&[width])?]);
    }
    let size = width * *draw.random.of(&[2, 2, 3]);
    let flat = draw.buffer(&[size])?;
    let mut starts = [0, width];
    if draw.random.percent(30) {
        starts = starts.map(|_| draw.random.below((size - width + 1) as usize) as i64);
    }
    Some(starts.map(|start| draw.narrow(flat, start, width)))
}

fn draw_conv1d(draw: &mut Draw<'_>) -> Option<Draft> {
    let x = draw.value()?;
    let size = draw.values.get(&x)?.size();
    let [.., channels, _] = size[..] else { return None };
    Some(Draft::of(vec![x, draw.weight(&[4, channels, 1])?, draw.weight(&[4])?], vec![]))
}

fn draw_conv2d(draw: &mut Draw<'_>) -> Option<Draft> {
    let x = draw.value()?;
    let size = draw.values.get(&x)?.size();
    let [.., channels, _, _] = size[..] else { return None };
    Some(Draft::of(vec![x, draw.weight(&[4, channels, 3, 3])?, draw.weight(&[4])?], vec![]))
}

/// An input, and the weights for all layers and directions of a recurrent network with `gates` gates.
fn draw_recurrent(draw: &mut Draw<'_>, gates: i64) -> Option<Draft> {
    let x = draw.value()?;
    let width = last(draw, x)?;
    let hidden = *draw.random.of(&[2, 4]);
    let layers = 1 + draw.random.below(2) as i64;
    let directions = 1 + draw.random.below(2) as i64;
    let mut inputs = vec![x];
    for layer in 0..layers {
        for _ in 0..directions {
            let input = if layer == 0 { width } else { hidden * directions };
            inputs.push(draw.weight(&[gates * hidden, input])?);
            inputs.push(draw.weight(&[gates * hidden, hidden])?);
            inputs.push(draw.weight(&[gates * hidden])?);
            inputs.push(draw.weight(&[gates * hidden])?);
        }
    }
    Some(Draft::of(inputs, vec![hidden as f64, layers as f64, directions as f64]))
}

fn draw_gru(draw: &mut Draw<'_>) -> Option<Draft> {
    draw_recurrent(draw, 3)
}

fn draw_lstm(draw: &mut Draw<'_>) -> Option<Draft> {
    draw_recurrent(draw, 4)
}

fn draw_embedding(draw: &mut Draw<'_>) -> Option<Draft> {
    Some(Draft::of(vec![draw.weight(&[4, 4])?], vec![draw.random.below(4) as f64]))
}

fn layer_norm(inputs: &[Tensor], _: &[f64]) -> Outcome {
    let [x, weight, bias] = exactly(inputs)?;
    Ok(vec![x.f_layer_norm(weight.size().as_slice(), Some(weight), Some(bias), 1e-5, true)?])
}

fn batch_norm(inputs: &[Tensor], numbers: &[f64]) -> Outcome {
    let ([x, weight, bias, mean, variance], [training]) = (exactly(inputs)?, exactly(numbers)?);
    let training = *training != 0.0;
    // The variance is not made positive: that is up to the program.
    let variance = Some(variance);
    Ok(vec![x.f_batch_norm(Some(weight), Some(bias), Some(mean), variance, training, 0.1, 1.0, true)?])
}

fn instance_norm(inputs: &[Tensor], _: &[f64]) -> Outcome {
    let [x, _, _] = exactly(inputs)?;
    let none = || None::<&Tensor>;
    Ok(vec![x.f_instance_norm(none(), none(), none(), none(), true, 0.1, 1e-3, true)?])
}

fn group_norm(inputs: &[Tensor], _: &[f64]) -> Outcome {
    let [x] = exactly(inputs)?;
    Ok(vec![x.f_group_norm(2, None::<&Tensor>, None::<&Tensor>, 1e-3, true)?])
}

fn conv1d(inputs: &[Tensor], _: &[f64]) -> Outcome {
    let [x, weight, bias] = exactly(inputs)?;
    Ok(vec![x.f_conv1d(weight, Some(bias), 1, 0, 1, 1)?])
}

fn conv2d(inputs: &[Tensor], _: &[f64]) -> Outcome {
    let [x, weight, bias] = exactly(inputs)?;
    Ok(vec![x.f_conv2d(weight, Some(bias), [1, 1], [1, 1], [1, 1], 1)?])
}

fn max_pool(inputs: &[Tensor], _: &[f64]) -> Outcome {
    let [x] = exactly(inputs)?;
    Ok(vec![x.f_max_pool1d([2_i64], [2_i64], [0_i64], [1_i64], false)?])
}

fn avg_pool(inputs: &[Tensor], _: &[f64]) -> Outcome {
    let [x] = exactly(inputs)?;
    Ok(vec![x.f_avg_pool2d([2_i64, 2], [2_i64, 2], [0_i64, 0], false, true, None::<i64>)?])
}

/// The initial state of a recurrent network.
fn zeros(x: &Tensor, numbers: &[f64; 3]) -> Result<Tensor, tch::TchError> {
    let [hidden, layers, directions] = numbers.map(|number| number as i64);
    let size = x.size();
    let batch: Vec<i64> = if size.len() == 3 { vec![size[0]] } else { vec![] };
    let size = [&[layers * directions], &batch[..], &[hidden]].concat();
    Tensor::f_zeros(size.as_slice(), (x.kind(), x.device()))
}

fn gru(inputs: &[Tensor], numbers: &[f64]) -> Outcome {
    let (x, weights) = (&inputs[0], &inputs[1..]);
    let numbers = exactly::<_, 3>(numbers)?;
    let state = zeros(x, numbers)?;
    let (output, _) =
        x.f_gru(&state, weights, true, numbers[1] as i64, 0.0, true, numbers[2] == 2.0, true)?;
    Ok(vec![output])
}

fn lstm(inputs: &[Tensor], numbers: &[f64]) -> Outcome {
    let (x, weights) = (&inputs[0], &inputs[1..]);
    let numbers = exactly::<_, 3>(numbers)?;
    let state = [zeros(x, numbers)?, zeros(x, numbers)?];
    let (output, _, cell) =
        x.f_lstm(&state, weights, true, numbers[1] as i64, 0.2, true, numbers[2] == 2.0, true)?;
    Ok(vec![output, cell])
}

fn embedding(inputs: &[Tensor], numbers: &[f64]) -> Outcome {
    let ([weight], [row]) = (exactly(inputs)?, exactly(numbers)?);
    let row = *row as i64;
    let indices = Tensor::f_from_slice(&[row, 0, 1, row])?.f_to_device(weight.device())?;
    Ok(vec![Tensor::f_embedding(weight, &indices, -1, false, false)?])
}

/// The cross-entropy where the last class is correct everywhere.
fn cross_entropy(inputs: &[Tensor], _: &[f64]) -> Outcome {
    let [x] = exactly(inputs)?;
    let size = x.size();
    let [rows, classes] = size[..] else { return Err(tch::TchError::Torch("not a matrix".to_owned())) };
    let target = Tensor::f_full([rows], classes - 1, (tch::Kind::Int64, x.device()))?;
    let none = None::<&Tensor>;
    Ok(vec![x.f_cross_entropy_loss(&target, none, tch::Reduction::None, -100, 0.0)?])
}
