//! Which spans of a track share a line: viewers show spans correctly only if they follow or contain each other.

/// Beginning and end, in nanoseconds.
pub(super) type Extent = (u64, u64);

/// The granularity of a device's times, in nanoseconds. A shorter overlap is not one.
const GRAIN: u64 = 1_000;

/// The spans of a row so far.
#[derive(Default)]
struct Row {
    /// The beginning of its latest span.
    latest: u64,
    /// The ends of the spans that are still open, outermost first.
    ends: Vec<u64>,
}

/// Assigns each span a row, from 0 on, so that no two spans of a row overlap unless `nest` is set and one contains the other. Spans that
/// overlap by no more than the granularity of time are cut to fit.
pub(super) fn arrange(spans: &mut [Extent], nest: bool) -> Vec<usize> {
    let mut order: Vec<usize> = (0..spans.len()).collect();
    order.sort_by_key(|&index| (spans[index].0, u64::MAX - spans[index].1));
    let mut rows: Vec<Row> = Vec::new();
    let mut chosen = vec![0; spans.len()];
    for index in order {
        let fits =
            rows.iter().enumerate().find_map(|(row, filled)| Some((row, filled.fit(spans[index], nest)?)));
        let (row, (span, depth)) = fits.unwrap_or_else(|| {
            rows.push(Row::default());
            (rows.len() - 1, (spans[index], 0))
        });
        rows[row].latest = span.0;
        rows[row].ends.truncate(depth);
        rows[row].ends.push(span.1);
        (spans[index], chosen[index]) = (span, row);
    }
    chosen
}

impl Row {
    /// A span as it fits the row, beginning no earlier than the latest one; and how many of the open spans contain it.
    fn fit(&self, (from, to): Extent, nest: bool) -> Option<(Extent, usize)> {
        let mut from = from.max(self.latest);
        for (outer, &end) in self.ends.iter().enumerate().rev() {
            if nest && to <= end {
                return Some(((from, to.max(from)), outer + 1));
            }
            if end > from + GRAIN {
                return (nest && to <= end + GRAIN).then_some(((from, end), outer + 1));
            }
            from = from.max(end);
        }
        Some(((from, to.max(from)), 0))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_overlaps_goes_to_another_row() {
        let mut spans = [(0, 10_000), (5_000, 20_000), (12_000, 30_000)];
        assert_eq!(arrange(&mut spans, false), [0, 1, 0]);
    }

    #[test]
    fn what_is_contained_stays_in_the_row_if_it_may() {
        let spans = [(0, 10_000), (2_000, 8_000)];
        assert_eq!(arrange(&mut spans.clone(), true), [0, 0]);
        assert_eq!(arrange(&mut spans.clone(), false), [0, 1]);
    }

    #[test]
    fn an_overlap_within_the_grain_of_time_is_cut() {
        let mut spans = [(0, 10_000), (9_900, 20_000), (15_000, 20_100)];
        assert_eq!(arrange(&mut spans, true), [0, 0, 0]);
        assert_eq!(spans, [(0, 10_000), (10_000, 20_000), (15_000, 20_000)]);
    }

    proptest! {
        #[test]
        fn spans_of_a_row_follow_or_contain_each_other(
            spans in prop::collection::vec((0_u64..100_000, 0_u64..20_000), 0..60),
            nest in any::<bool>(),
        ) {
            let mut spans: Vec<Extent> = spans.into_iter().map(|(from, len)| (from, from + len)).collect();
            let rows = arrange(&mut spans, nest);
            for (a, &(from, to)) in spans.iter().enumerate() {
                prop_assert!(from <= to);
                for (b, &(start, end)) in spans.iter().enumerate().skip(a + 1).filter(|(b, _)| rows[*b] == rows[a]) {
                    let apart = to <= start || end <= from;
                    let within = (from <= start && end <= to) || (start <= from && to <= end);
                    prop_assert!(apart || (nest && within), "{a}: {from}-{to}, {b}: {start}-{end}");
                }
            }
        }
    }
}
