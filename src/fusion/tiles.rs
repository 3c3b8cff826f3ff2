//! Which elements of a chain the CPU computes at once, so that what one operation hands to the next stays in the caches.
//!
//! libtorch's CPU kernels have a vector loop, and other functions for what is left over at the end of a run: of a thread's share of the
//! elements, or of a row, where an operand is expanded or strided. The two may differ in bits. So a tile begins where an element of the
//! whole operation begins a vector of that loop, and ends there too, unless the share or the row ends with it. Then each element is
//! computed by the same function in a tile as in the whole.

use std::collections::BTreeSet;
use std::ops::Range;

use super::chain::{Chain, Input};
use super::layout::{Dimension, Layout};

/// Elements of a turn of the longest vector loop (64 of 16 bits with AVX-512), and as many more.
const TURN: u64 = 128;
/// libtorch divides work by no more elements than this for each thread.
const GRAIN: u64 = 32_768;
/// Beyond, MKL is given a share in pieces.
const MOST: u64 = 1 << 31;
/// With so few elements, none of its kernels has several threads.
const SERIAL: u64 = 2048;

/// How the elements of a chain are divided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tiling {
    /// The sizes of the dimensions that the inputs have, innermost first.
    pub(crate) sizes: Vec<u64>,
    /// How far apart the elements of each input are in each of them, in elements.
    pub(crate) strides: Vec<Vec<u64>>,
    /// The dimension that tiles divide.
    pub(crate) split: usize,
    /// Each thread's tiles: the first element, and how many of that dimension.
    pub(crate) shares: Vec<Vec<(u64, u64)>>,
}

impl Chain {
    /// Tiles for `threads` threads that take about as many bytes each. `None` if it is not certain that the bits are those of the whole, or
    /// if nothing is to be gained.
    pub(crate) fn tiling(&self, count: u64, threads: u64, bytes: u64) -> Option<Tiling> {
        let sizes = self.dimensions(count)?;
        let shares = shares(count, threads)?;
        let wanted = bytes / self.bytes_of_element().max(1);
        let (split, rows) = split(&sizes, &shares, wanted)?;
        let row: u64 = sizes[..split].iter().product();
        let shares: Vec<_> = shares.into_iter().map(|share| tiles(share, row, sizes[split], rows)).collect();
        let is_divided = shares.iter().any(|tiles| tiles.len() > 1);
        let strides = self.inputs.iter().map(|input| strides(input, &sizes)).collect();
        is_divided.then_some(Tiling { sizes, strides, split, shares })
    }

    /// The sizes of the dimensions that all inputs can be passed through in. `None` if they have none in common.
    fn dimensions(&self, count: u64) -> Option<Vec<u64>> {
        let mut ends = BTreeSet::from([count]);
        for input in &self.inputs {
            let Layout::Strided(dimensions) = &input.layout else { continue };
            ends.extend(ends_of(dimensions));
        }
        let mut begin = 1;
        let sizes = ends.into_iter().map(|end| {
            let size = end.is_multiple_of(begin).then_some(end / begin);
            begin = end;
            size
        });
        sizes.collect()
    }

    /// What passing one element through takes.
    fn bytes_of_element(&self) -> u64 {
        let read = self.inputs.iter().filter(|input| input.layout == Layout::Dense);
        let elements = read.map(|input| input.element).chain(self.steps.iter().map(|step| step.element));
        elements.map(super::operation::Element::bytes).sum()
    }
}

/// How many elements there are up to the end of each dimension but the last.
fn ends_of(dimensions: &[Dimension]) -> impl Iterator<Item = u64> {
    dimensions.iter().take_while(|dimension| dimension.size > 0).scan(1, |end, dimension| {
        *end *= dimension.size;
        Some(*end)
    })
}

/// The threads' shares of the elements in libtorch's parallel loops. `None` if they are not the same in those of all kernels, some of which
/// divide less work than others.
fn shares(count: u64, threads: u64) -> Option<Vec<Range<u64>>> {
    let is_serial = threads <= 1 || count <= SERIAL;
    let share = if is_serial { count } else { count.div_ceil(threads) };
    if share == 0 || share >= MOST || (!is_serial && share < GRAIN) {
        return None;
    }
    Some((0..count.div_ceil(share)).map(|number| number * share..count.min((number + 1) * share)).collect())
}

/// Which dimension tiles divide, and how many of it they have, for about `wanted` elements.
fn split(sizes: &[u64], shares: &[Range<u64>], wanted: u64) -> Option<(usize, u64)> {
    let mut row = 1;
    for (dimension, size) in sizes.iter().enumerate() {
        let end = row * size;
        let is_last = dimension + 1 == sizes.len();
        let begins_with = |unit: u64| shares.iter().all(|share| share.start.is_multiple_of(unit));
        // Tiles that end with a dimension end with a turn, as all those before them.
        let is_even = is_last || (end.is_multiple_of(TURN) && begins_with(TURN));
        if (end > wanted || is_last) && begins_with(row) && is_even {
            let step = TURN / gcd(row, TURN);
            return Some((dimension, (wanted / row / step * step).max(step)));
        }
        row = end;
    }
    None
}

/// A share in tiles of so many rows. None of them has rows of two turns of the dimension that they divide.
fn tiles(share: Range<u64>, row: u64, size: u64, rows: u64) -> Vec<(u64, u64)> {
    let mut tiles = Vec::new();
    let mut first = share.start;
    while first < share.end {
        let rows = rows.min(size - first / row % size).min((share.end - first) / row);
        tiles.push((first, rows));
        first += rows * row;
    }
    tiles
}

/// How far apart the elements of an input are in each dimension.
fn strides(input: &Input, sizes: &[u64]) -> Vec<u64> {
    let mut begin = 1;
    let each = sizes.iter().map(|size| {
        let stride = match &input.layout {
            Layout::Dense => begin,
            Layout::Constant => 0,
            Layout::Strided(dimensions) => {
                // The last of its dimensions that begin here or further within.
                let begins = std::iter::once(1).chain(ends_of(dimensions));
                let within = begins.zip(dimensions).take_while(|(own, _)| *own <= begin).last();
                within.map_or(0, |(own, dimension)| begin / own * dimension.stride)
            }
        };
        begin *= size;
        stride
    });
    each.collect()
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::chain::{Step, Value};
    use super::super::function::Function;
    use super::super::operation::Element;
    use super::*;

    fn chain(layouts: Vec<Layout>) -> Chain {
        let element = Element::Float;
        let inputs: Vec<_> =
            layouts.into_iter().map(|layout| Input { element, layout, is_aligned: true }).collect();
        let operands = (0..inputs.len()).map(Value::Input).collect();
        let steps = vec![Step { function: Function::Multiply, operands, element }];
        Chain { inputs, steps, numbers: 0, outputs: vec![0], is_wide: false, is_table: false }
    }

    fn strided(dimensions: &[(u64, u64)]) -> Layout {
        let dimensions = dimensions.iter().map(|(size, stride)| Dimension { size: *size, stride: *stride });
        Layout::Strided(dimensions.collect())
    }

    /// Whether an element is computed in the vector loop of a run, if that computes `turn` elements at a time.
    fn is_in_vector(element: u64, run: &Range<u64>, turn: u64) -> bool {
        element - run.start < (run.end - run.start) / turn * turn
    }

    #[test]
    fn shares_of_any_number_of_elements_are_divided_from_their_beginnings() {
        let tiling = chain(vec![Layout::Dense]).tiling(200_001, 2, 64 << 10).unwrap();
        assert_eq!((&tiling.sizes[..], tiling.split), (&[200_001][..], 0));
        // Eight bytes an element.
        assert_eq!(tiling.shares[0][..2], [(0, 8192), (8192, 8192)]);
        assert_eq!(tiling.shares[1][0], (100_001, 8192));
        assert_eq!(tiling.shares[1].last(), Some(&(100_001 + 12 * 8192, 1696)));
    }

    #[test]
    fn tiles_are_whole_rows_where_something_has_rows() {
        let columns = strided(&[(1000, 0), (0, 1)]);
        let tiling = chain(vec![Layout::Dense, columns]).tiling(1_000_000, 2, 512 << 10).unwrap();
        assert_eq!((&tiling.sizes[..], tiling.split), (&[1000, 1000][..], 1));
        assert_eq!(tiling.strides, [[1, 1000], [0, 1]]);
        // 16 rows end with a turn.
        assert_eq!(tiling.shares[0][..2], [(0, 64), (64_000, 64)]);
    }

    #[test]
    fn inputs_have_the_dimensions_of_all() {
        let rotation = strided(&[(64, 1), (8, 0), (128, 64), (0, 0)]);
        let heads = strided(&[(512, 1), (0, 1536)]);
        let tiling = chain(vec![rotation, heads]).tiling(1 << 20, 1, 64 << 10).unwrap();
        assert_eq!(tiling.sizes, [64, 8, 128, 16]);
        assert_eq!(tiling.strides, [[1, 0, 64, 0], [1, 64, 1536, 128 * 1536]]);
    }

    #[test]
    fn what_is_not_certain_is_not_divided() {
        let dense = || chain(vec![Layout::Dense]);
        // Some kernels would have one thread, and others two.
        assert_eq!(dense().tiling(40_000, 2, 1024), None);
        assert!(dense().tiling(40_000, 1, 1024).is_some());
        assert!(dense().tiling(2048, 2, 1024).is_some());
        // A thread begins within a row.
        let rows = || chain(vec![strided(&[(1000, 1), (0, 0)]), Layout::Dense]);
        assert_eq!(rows().tiling(101_000, 2, 1024), None);
        assert!(rows().tiling(100_000, 2, 1024).is_some());
        // Rows of two shapes.
        let both = chain(vec![strided(&[(64, 1), (0, 0)]), strided(&[(96, 1), (0, 0)])]);
        assert_eq!(both.tiling(64 * 96 * 10, 1, 1024), None);
    }

    #[test]
    fn what_fits_as_a_whole_is_not_divided() {
        assert_eq!(chain(vec![Layout::Dense]).tiling(100_000, 1, 1 << 20), None);
    }

    proptest! {
        #[test]
        fn each_element_is_computed_as_in_the_whole(
            inner in prop_oneof![Just(1u64), 1u64..300, (1u64..5).prop_map(|n| 64 * n)],
            middle in 1u64..20,
            outer in 1u64..400,
            threads in 1u64..5,
            bytes in 1u64..200_000,
        ) {
            let count = inner * middle * outer;
            let layouts = vec![
                Layout::Dense,
                strided(&[(inner, 1), (0, 0)]),
                strided(&[(inner, 1), (middle, 0), (0, inner)]),
            ];
            let Some(tiling) = chain(layouts).tiling(count, threads, bytes) else { return Ok(()) };
            prop_assert_eq!(tiling.sizes.iter().product::<u64>(), count);
            let row: u64 = tiling.sizes[..tiling.split].iter().product();
            let mut next = 0;
            // Runs of operations are of as many elements as some of the dimensions have.
            let runs: Vec<u64> = tiling.sizes.iter().scan(1, |end, size| {
                *end *= size;
                Some(*end)
            }).collect();
            let share = if threads == 1 || count <= SERIAL { count } else { count.div_ceil(threads) };
            for (number, tiles) in tiling.shares.iter().enumerate() {
                let share = number as u64 * share..count.min((number as u64 + 1) * share);
                for (first, rows) in tiles {
                    let tile = *first..first + rows * row;
                    prop_assert_eq!(tile.start, next);
                    let size = tiling.sizes[tiling.split];
                    prop_assert!(tile.end <= share.end && rows + first / row % size <= size);
                    next = tile.end;
                    let near = (tile.start + TURN).min(tile.end - 1);
                    let far = tile.end.saturating_sub(TURN).max(tile.start);
                    for element in [tile.start, near, far, tile.end - 1] {
                        for run in &runs {
                            let begin = element / run * run;
                            let whole = begin.max(share.start)..(begin + run).min(share.end);
                            let part = begin.max(tile.start)..(begin + run).min(tile.end);
                            for turn in [8, 16, 32, 64, 128] {
                                let is_in = |run| is_in_vector(element, run, turn);
                                prop_assert_eq!(is_in(&whole), is_in(&part), "{:?}", tiling);
                            }
                        }
                    }
                }
            }
            prop_assert_eq!(next, count);
        }
    }
}
