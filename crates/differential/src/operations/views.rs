//! Views, and pieces of a tensor.

use tch::Tensor;

use super::Action::Other;
use super::{Operation, Outcome, exactly};
use crate::draw::{Draft, Draw};

pub(super) const VIEWS: &[Operation] = &[
    Operation { name: "narrow", action: Other { draw: draw_narrow, run: narrow } },
    Operation { name: "select", action: Other { draw: draw_position, run: select } },
    Operation { name: "transpose", action: Other { draw: draw_two_dims, run: transpose } },
    Operation { name: "flatten", action: Other { draw: draw_value, run: flatten } },
    Operation { name: "view", action: Other { draw: draw_value, run: view } },
    Operation { name: "unsqueeze", action: Other { draw: draw_value, run: unsqueeze } },
    Operation { name: "expand", action: Other { draw: draw_value, run: expand } },
    Operation { name: "as_strided", action: Other { draw: draw_value, run: as_strided } },
    Operation { name: "diagonal", action: Other { draw: draw_value, run: diagonal } },
    Operation { name: "unfold", action: Other { draw: draw_value, run: unfold } },
    Operation { name: "chunk", action: Other { draw: draw_pieces, run: chunk } },
    Operation { name: "split", action: Other { draw: draw_pieces, run: split } },
    Operation { name: "unbind", action: Other { draw: draw_value, run: unbind } },
    Operation { name: "unsafe_chunk", action: Other { draw: draw_pieces, run: unsafe_chunk } },
    Operation { name: "unsafe_split", action: Other { draw: draw_pieces, run: unsafe_split } },
    Operation {
        name: "unsafe_split_with_sizes",
        action: Other { draw: draw_pieces, run: unsafe_split_with_sizes },
    },
];

fn draw_value(draw: &mut Draw<'_>) -> Option<Draft> {
    Some(Draft::of(vec![draw.value()?], vec![]))
}

fn draw_narrow(draw: &mut Draw<'_>) -> Option<Draft> {
    let slot = draw.value()?;
    let (dim, size) = draw.dim(slot)?;
    let start = draw.random.below(size as usize) as i64;
    let length = 1 + draw.random.below((size - start) as usize) as i64;
    Some(Draft::of(vec![slot], vec![dim as f64, start as f64, length as f64]))
}

fn draw_position(draw: &mut Draw<'_>) -> Option<Draft> {
    let slot = draw.value()?;
    let (dim, size) = draw.dim(slot)?;
    let index = draw.random.below(size as usize);
    Some(Draft::of(vec![slot], vec![dim as f64, index as f64]))
}

fn draw_two_dims(draw: &mut Draw<'_>) -> Option<Draft> {
    let slot = draw.value()?;
    let (one, other) = (draw.dim(slot)?.0, draw.dim(slot)?.0);
    Some(Draft::of(vec![slot], vec![one as f64, other as f64]))
}

fn draw_pieces(draw: &mut Draw<'_>) -> Option<Draft> {
    let slot = draw.value()?;
    let (dim, _) = draw.dim(slot)?;
    Some(Draft::of(vec![slot], vec![(2 + draw.random.below(2)) as f64, dim as f64]))
}

fn narrow(inputs: &[Tensor], numbers: &[f64]) -> Outcome {
    let ([x], [dim, start, length]) = (exactly(inputs)?, exactly(numbers)?);
    Ok(vec![x.f_narrow(*dim as i64, *start as i64, *length as i64)?])
}

fn select(inputs: &[Tensor], numbers: &[f64]) -> Outcome {
    let ([x], [dim, index]) = (exactly(inputs)?, exactly(numbers)?);
    Ok(vec![x.f_select(*dim as i64, *index as i64)?])
}

fn transpose(inputs: &[Tensor], numbers: &[f64]) -> Outcome {
    let ([x], [one, other]) = (exactly(inputs)?, exactly(numbers)?);
    Ok(vec![x.f_transpose(*one as i64, *other as i64)?])
}

fn flatten(inputs: &[Tensor], _: &[f64]) -> Outcome {
    let [x] = exactly(inputs)?;
    Ok(vec![x.f_flatten(0, -1)?])
}

/// Splits the last dimension in two halves, like heads of attention.
fn view(inputs: &[Tensor], _: &[f64]) -> Outcome {
    let [x] = exactly(inputs)?;
    let mut size = x.size();
    if let Some(last) = size.pop() {
        size.extend([2, last / 2]);
    }
    Ok(vec![x.f_view(size.as_slice())?])
}

fn unsqueeze(inputs: &[Tensor], _: &[f64]) -> Outcome {
    let [x] = exactly(inputs)?;
    Ok(vec![x.f_unsqueeze(0)?])
}

fn expand(inputs: &[Tensor], _: &[f64]) -> Outcome {
    let [x] = exactly(inputs)?;
    let size: Vec<i64> = std::iter::once(2).chain(x.size()).collect();
    Ok(vec![x.f_expand(size.as_slice(), false)?])
}

/// Windows of two rows, which overlap.
fn as_strided(inputs: &[Tensor], _: &[f64]) -> Outcome {
    let [x] = exactly(inputs)?;
    let rows = x.size().first().map_or(0, |rows| rows - 1);
    let row = x.stride().first().copied().unwrap_or(1);
    Ok(vec![x.f_as_strided([rows, 2], [row, row], None::<i64>)?])
}

fn diagonal(inputs: &[Tensor], _: &[f64]) -> Outcome {
    let [x] = exactly(inputs)?;
    Ok(vec![x.f_diagonal(0, 0, 1)?])
}

fn unfold(inputs: &[Tensor], _: &[f64]) -> Outcome {
    let [x] = exactly(inputs)?;
    Ok(vec![x.f_unfold(0, 2, 1)?])
}

fn chunk(inputs: &[Tensor], numbers: &[f64]) -> Outcome {
    let ([x], [pieces, dim]) = (exactly(inputs)?, exactly(numbers)?);
    x.f_chunk(*pieces as i64, *dim as i64)
}

fn split(inputs: &[Tensor], numbers: &[f64]) -> Outcome {
    let ([x], [size, dim]) = (exactly(inputs)?, exactly(numbers)?);
    x.f_split(*size as i64, *dim as i64)
}

fn unbind(inputs: &[Tensor], _: &[f64]) -> Outcome {
    let [x] = exactly(inputs)?;
    x.f_unbind(0)
}

fn unsafe_chunk(inputs: &[Tensor], numbers: &[f64]) -> Outcome {
    let ([x], [pieces, dim]) = (exactly(inputs)?, exactly(numbers)?);
    x.f_unsafe_chunk(*pieces as i64, *dim as i64)
}

fn unsafe_split(inputs: &[Tensor], numbers: &[f64]) -> Outcome {
    let ([x], [size, dim]) = (exactly(inputs)?, exactly(numbers)?);
    x.f_unsafe_split(*size as i64, *dim as i64)
}

fn unsafe_split_with_sizes(inputs: &[Tensor], numbers: &[f64]) -> Outcome {
    let ([x], [first, dim]) = (exactly(inputs)?, exactly(numbers)?);
    let (first, dim) = (*first as i64 - 1, *dim as i64);
    let size = x.size().get(dim as usize).copied().unwrap_or(0);
    x.f_unsafe_split_with_sizes([first, size - first], dim)
}
