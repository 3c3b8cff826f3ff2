//! Writes that version counters do not show, or that happen inside another operation.

use ssdtrain_libtorch::Storage;
use tch::{Kind, TchError, Tensor};

use super::Action::Other;
use super::{Operation, Outcome, exactly};
use crate::draw::{Draft, Draw};
use crate::program::Slot;

pub(super) const WRITES: &[Operation] = &[
    Operation { name: "data_fill_", action: Other { draw: draw_any, run: data_fill } },
    Operation { name: "data_scale_", action: Other { draw: draw_any, run: data_scale } },
    Operation { name: "detach_scale_", action: Other { draw: draw_any, run: detach_scale } },
    Operation { name: "no_grad_scale_", action: Other { draw: draw_any, run: no_grad_scale } },
    Operation { name: "descend_", action: Other { draw: draw_leaf, run: descend } },
    Operation { name: "resize_", action: Other { draw: draw_changed, run: resize } },
    Operation { name: "narrow_scale_", action: Other { draw: draw_changed, run: narrow_scale } },
    Operation { name: "select_fill_", action: Other { draw: draw_changed, run: select_fill } },
    Operation { name: "transposed_sigmoid_", action: Other { draw: draw_changed, run: transposed_sigmoid } },
    Operation { name: "index_put", action: Other { draw: draw_row, run: index_put } },
    Operation { name: "index_put_", action: Other { draw: draw_row_to_change, run: index_put_in_place } },
    Operation { name: "index_add", action: Other { draw: draw_row, run: index_add } },
    Operation { name: "index_add_", action: Other { draw: draw_row_to_change, run: index_add_in_place } },
    Operation { name: "index_copy", action: Other { draw: draw_row, run: index_copy } },
    Operation { name: "index_fill", action: Other { draw: draw_row, run: index_fill } },
    Operation { name: "index_select", action: Other { draw: draw_row, run: index_select } },
    Operation { name: "slice_scatter", action: Other { draw: draw_row, run: slice_scatter } },
    Operation { name: "select_scatter", action: Other { draw: draw_row, run: select_scatter } },
    Operation { name: "gather", action: Other { draw: draw_row, run: gather } },
    Operation { name: "scatter", action: Other { draw: draw_row, run: scatter } },
];

fn draw_any(draw: &mut Draw<'_>) -> Option<Draft> {
    Some(Draft::of(vec![draw.any()?], vec![]))
}

fn draw_leaf(draw: &mut Draw<'_>) -> Option<Draft> {
    Some(Draft::of(vec![draw.leaf()?], vec![]))
}

fn draw_changed(draw: &mut Draw<'_>) -> Option<Draft> {
    Some(Draft::of(vec![draw.changeable()?], vec![]))
}

/// Two tensors of the same shape, and the index of a row.
fn draw_row(draw: &mut Draw<'_>) -> Option<Draft> {
    let slot = draw.value()?;
    row_of(draw, slot)
}

fn row_of(draw: &mut Draw<'_>, slot: Slot) -> Option<Draft> {
    let rows = draw.values.get(&slot)?.size().first().copied().filter(|rows| *rows > 0)?;
    let row = draw.random.below(rows as usize);
    Some(Draft::of(vec![slot, draw.like(slot)?], vec![row as f64]))
}

fn draw_row_to_change(draw: &mut Draw<'_>) -> Option<Draft> {
    let slot = draw.changeable()?;
    row_of(draw, slot)
}

fn data_fill(inputs: &[Tensor], _: &[f64]) -> Outcome {
    let [x] = exactly(inputs)?;
    x.f_data()?.f_fill_(0.625).map(|_| vec![])
}

fn data_scale(inputs: &[Tensor], _: &[f64]) -> Outcome {
    let [x] = exactly(inputs)?;
    x.f_data()?.f_mul_scalar_(0.75).map(|_| vec![])
}

fn detach_scale(inputs: &[Tensor], _: &[f64]) -> Outcome {
    let [x] = exactly(inputs)?;
    x.f_detach()?.f_mul_scalar_(0.75).map(|_| vec![])
}

fn no_grad_scale(inputs: &[Tensor], _: &[f64]) -> Outcome {
    let [x] = exactly(inputs)?;
    let _guard = tch::no_grad_guard();
    x.shallow_clone().f_mul_scalar_(0.75).map(|_| vec![])
}

/// An optimizer step, as tch does it.
fn descend(inputs: &[Tensor], _: &[f64]) -> Outcome {
    let [x] = exactly(inputs)?;
    let none = || TchError::Torch("there is no gradient".to_owned());
    let gradient = if x.is_leaf() { x.f_grad()? } else { return Err(none()) };
    if !gradient.defined() {
        return Err(none());
    }
    let _guard = tch::no_grad_guard();
    x.shallow_clone().f_sub_(&gradient.f_tanh()?.f_mul_scalar(0.1)?).map(|_| vec![])
}

/// Enlarges the storage, and gives the tensor its old shape again.
fn resize(inputs: &[Tensor], _: &[f64]) -> Outcome {
    let [x] = exactly(inputs)?;
    let (size, mut x) = (x.size(), x.shallow_clone());
    let elements = x.numel() as i64;
    let bytes = (x.numel() * x.kind().elt_size_in_bytes()) as u64;
    if !x.is_contiguous() || Storage::of(&x).is_none_or(|storage| storage.bytes() < bytes) {
        return Err(TchError::Torch("it would not be what it was".to_owned()));
    }
    let _larger = x.f_resize_([4 * elements + 5000])?;
    x.f_resize_(size.as_slice()).map(|_| vec![])
}

fn narrow_scale(inputs: &[Tensor], _: &[f64]) -> Outcome {
    let [x] = exactly(inputs)?;
    let half = (x.size().first().copied().unwrap_or(0) / 2).max(1);
    x.f_narrow(0, 0, half)?.f_mul_scalar_(0.75).map(|_| vec![])
}

fn select_fill(inputs: &[Tensor], _: &[f64]) -> Outcome {
    let [x] = exactly(inputs)?;
    x.f_select(-1, 0)?.f_fill_(0.625).map(|_| vec![])
}

fn transposed_sigmoid(inputs: &[Tensor], _: &[f64]) -> Outcome {
    let [x] = exactly(inputs)?;
    x.f_transpose(0, -1)?.f_sigmoid_().map(|_| vec![])
}

/// The row that `numbers` names, as an index into the first tensor.
fn row(inputs: &[Tensor], numbers: &[f64]) -> Result<Tensor, TchError> {
    let [row] = exactly(numbers)?;
    Tensor::f_full([1], *row as i64, (Kind::Int64, inputs[0].device()))
}

/// The row of the second tensor that `numbers` names.
fn source(inputs: &[Tensor], numbers: &[f64]) -> Result<Tensor, TchError> {
    let ([_, y], [row]) = (exactly(inputs)?, exactly(numbers)?);
    y.f_narrow(0, *row as i64, 1)
}

fn index_put(inputs: &[Tensor], numbers: &[f64]) -> Outcome {
    Ok(vec![inputs[0].f_index_put(&[Some(row(inputs, numbers)?)], &source(inputs, numbers)?, false)?])
}

fn index_put_in_place(inputs: &[Tensor], numbers: &[f64]) -> Outcome {
    let source = source(inputs, numbers)?;
    inputs[0].shallow_clone().f_index_put_(&[Some(row(inputs, numbers)?)], &source, true).map(|_| vec![])
}

fn index_add(inputs: &[Tensor], numbers: &[f64]) -> Outcome {
    Ok(vec![inputs[0].f_index_add(0, &row(inputs, numbers)?, &source(inputs, numbers)?)?])
}

fn index_add_in_place(inputs: &[Tensor], numbers: &[f64]) -> Outcome {
    let source = source(inputs, numbers)?;
    inputs[0].shallow_clone().f_index_add_(0, &row(inputs, numbers)?, &source).map(|_| vec![])
}

fn index_copy(inputs: &[Tensor], numbers: &[f64]) -> Outcome {
    Ok(vec![inputs[0].f_index_copy(0, &row(inputs, numbers)?, &source(inputs, numbers)?)?])
}

fn index_fill(inputs: &[Tensor], numbers: &[f64]) -> Outcome {
    Ok(vec![inputs[0].f_index_fill(0, &row(inputs, numbers)?, 0.5)?])
}

fn index_select(inputs: &[Tensor], numbers: &[f64]) -> Outcome {
    Ok(vec![inputs[0].f_index_select(0, &row(inputs, numbers)?)?])
}

fn slice_scatter(inputs: &[Tensor], numbers: &[f64]) -> Outcome {
    let ([x, _], [row]) = (exactly(inputs)?, exactly(numbers)?);
    let row = *row as i64;
    Ok(vec![x.f_slice_scatter(&source(inputs, numbers)?, 0, row, row + 1, 1)?])
}

fn select_scatter(inputs: &[Tensor], numbers: &[f64]) -> Outcome {
    let ([x, y], [row]) = (exactly(inputs)?, exactly(numbers)?);
    Ok(vec![x.f_select_scatter(&y.f_select(0, *row as i64)?, 0, *row as i64)?])
}

/// An index for each element, all to the same row.
fn indices(x: &Tensor, numbers: &[f64]) -> Result<Tensor, TchError> {
    let [row] = exactly(numbers)?;
    Tensor::f_full(x.size().as_slice(), *row as i64, (Kind::Int64, x.device()))
}

fn gather(inputs: &[Tensor], numbers: &[f64]) -> Outcome {
    let [x, _] = exactly(inputs)?;
    Ok(vec![x.f_gather(0, &indices(x, numbers)?, false)?])
}

fn scatter(inputs: &[Tensor], numbers: &[f64]) -> Outcome {
    let [x, _] = exactly(inputs)?;
    let source = source(inputs, numbers)?;
    Ok(vec![x.f_scatter(0, &indices(&source, numbers)?, &source)?])
}
