//! Which element of an operand belongs to which element of a result.

/// How the elements of a result, in the order in which they lie in memory, map to elements of an operand.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Layout {
    /// Each to the one at the same position.
    Dense,
    /// All to the first.
    Constant,
    /// By dimensions, innermost first. The size of the last one is not stated: it is as large as the result.
    Strided(Vec<Dimension>),
}

/// One dimension, or several that can be passed through as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Dimension {
    /// 0 for the outermost.
    pub(crate) size: u64,
    /// In elements of the operand.
    pub(crate) stride: u64,
}

impl Layout {
    /// How many different elements of the operand are read for `count` elements of the result.
    pub(crate) fn elements(&self, count: u64) -> u64 {
        match self {
            Layout::Dense => count,
            Layout::Constant => 1,
            Layout::Strided(dimensions) => {
                let inner: u64 = dimensions.iter().map(|dimension| dimension.size.max(1)).product();
                let sizes = dimensions.iter().map(|dimension| match dimension {
                    Dimension { stride: 0, .. } => 1,
                    Dimension { size: 0, .. } => count / inner,
                    Dimension { size, .. } => *size,
                });
                sizes.product()
            }
        }
    }
}

/// The dimensions of a result in the order of memory, innermost first: which of the tensor's it is, and its size. `None` if its elements do
/// not lie side by side.
pub(super) fn order(sizes: &[i64], strides: &[i64]) -> Option<Vec<(usize, u64)>> {
    let mut dimensions: Vec<usize> = (0..sizes.len()).filter(|dimension| sizes[*dimension] != 1).collect();
    dimensions.sort_by_key(|dimension| strides[*dimension]);
    let mut dense = 1;
    for dimension in &dimensions {
        if strides[*dimension] != dense {
            return None;
        }
        dense *= sizes[*dimension];
    }
    dimensions.into_iter().map(|dimension| Some((dimension, u64::try_from(sizes[dimension]).ok()?))).collect()
}

/// How an operand of these sizes and strides is read for a result whose dimensions are in this `order`, of `rank` in all. `None` if it is
/// not of a shape that is expanded to the result's.
pub(super) fn layout(order: &[(usize, u64)], rank: usize, sizes: &[i64], strides: &[i64]) -> Option<Layout> {
    let missing = rank.checked_sub(sizes.len())?;
    let mut dimensions: Vec<Dimension> = Vec::new();
    for (dimension, size) in order {
        let own = dimension.checked_sub(missing).map(|own| (sizes[own], strides[own]));
        let stride = match own {
            None | Some((1, _)) => 0,
            Some((own, stride)) if u64::try_from(own).ok()? == *size => u64::try_from(stride).ok()?,
            Some(_) => return None,
        };
        match dimensions.last_mut() {
            Some(inner) if stride == inner.stride * inner.size => inner.size *= size,
            _ => dimensions.push(Dimension { size: *size, stride }),
        }
    }
    Some(match dimensions.last_mut() {
        None => Layout::Constant,
        Some(outermost) => {
            outermost.size = 0;
            match dimensions[..] {
                [Dimension { stride: 0, .. }] => Layout::Constant,
                [Dimension { stride: 1, .. }] => Layout::Dense,
                _ => Layout::Strided(dimensions),
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(result: (&[i64], &[i64]), operand: (&[i64], &[i64])) -> Option<Layout> {
        layout(&order(result.0, result.1)?, result.0.len(), operand.0, operand.1)
    }

    fn strided(dimensions: &[(u64, u64)]) -> Option<Layout> {
        let dimensions = dimensions.iter().map(|(size, stride)| Dimension { size: *size, stride: *stride });
        Some(Layout::Strided(dimensions.collect()))
    }

    const RESULT: (&[i64], &[i64]) = (&[2, 3, 4], &[12, 4, 1]);

    #[test]
    fn elements_side_by_side_are_dense_in_any_number_of_dimensions() {
        assert_eq!(of(RESULT, RESULT), Some(Layout::Dense));
        let transposed: (&[i64], &[i64]) = (&[2, 3, 4], &[12, 1, 3]);
        assert_eq!(of(transposed, transposed), Some(Layout::Dense));
    }

    #[test]
    fn what_is_expanded_stands_still_in_the_dimensions_that_it_lacks() {
        assert_eq!(of(RESULT, (&[4], &[1])), strided(&[(4, 1), (0, 0)]));
        assert_eq!(of(RESULT, (&[2, 3, 1], &[3, 1, 1])), strided(&[(4, 0), (0, 1)]));
        assert_eq!(of(RESULT, (&[2, 1, 4], &[4, 4, 1])), strided(&[(4, 1), (3, 0), (0, 4)]));
        assert_eq!(of(RESULT, (&[], &[])), Some(Layout::Constant));
        assert_eq!(of(RESULT, (&[1, 1], &[1, 1])), Some(Layout::Constant));
    }

    #[test]
    fn other_orders_of_memory_are_strides() {
        assert_eq!(of(RESULT, (&[2, 3, 4], &[12, 1, 3])), strided(&[(4, 3), (3, 1), (0, 12)]));
        assert_eq!(of(RESULT, (&[2, 3, 4], &[24, 8, 2])), strided(&[(0, 2)]));
    }

    #[test]
    fn results_with_gaps_and_operands_of_other_shapes_have_none() {
        assert_eq!(of((&[2, 3], &[4, 1]), (&[2, 3], &[3, 1])), None);
        assert_eq!(of(RESULT, (&[3], &[1])), None);
        assert_eq!(of(RESULT, (&[1, 2, 3, 4], &[24, 12, 4, 1])), None);
    }

    #[test]
    fn what_is_expanded_is_read_once() {
        let elements = |operand: (&[i64], &[i64])| of(RESULT, operand).unwrap().elements(24);
        assert_eq!(
            [elements((&[4], &[1])), elements((&[2, 3, 1], &[3, 1, 1])), elements((&[], &[]))],
            [4, 6, 1]
        );
        assert_eq!([elements(RESULT), elements((&[2, 3, 4], &[12, 1, 3]))], [24, 24]);
    }

    #[test]
    fn one_element_is_constant() {
        assert_eq!(of((&[1, 1], &[1, 1]), (&[1], &[1])), Some(Layout::Constant));
    }
}
