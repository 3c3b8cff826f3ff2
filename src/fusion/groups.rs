//! Which of the operations that are to run may run as one.

use std::collections::{BTreeSet, HashSet};

/// An operation that is to run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Vertex {
    /// The operations before it whose results it reads.
    pub(crate) reads: Vec<usize>,
    /// How many elements it computes, if it is pointwise.
    pub(crate) count: Option<u64>,
    /// Those of `reads` whose results it reads element by element, in the order of memory, and in no other way.
    pub(crate) follows: Vec<usize>,
}

/// No kernel computes more operations: it would take long to compile.
const MOST: usize = 32;
/// Among more operations none are joined: reruns are seldom longer, and this takes the square of their number.
const LIMIT: usize = 512;

/// Groups of operations that may run as one, in an order in which each comes after those whose results it reads. The operations of a group
/// are in order as well. Each vertex reads only earlier ones, and the last of them needs all others.
pub(crate) fn groups(vertices: &[Vertex]) -> Vec<Vec<usize>> {
    if vertices.len() > LIMIT {
        return (0..vertices.len()).map(|vertex| vec![vertex]).collect();
    }
    let mut joined = Joined { vertices, group: Vec::new(), members: Vec::new() };
    for vertex in 0..vertices.len() {
        joined.add(vertex);
    }
    joined.in_order()
}

struct Joined<'a> {
    vertices: &'a [Vertex],
    /// The group of each vertex so far.
    group: Vec<usize>,
    /// The members of each group, in order; none if it was joined to another.
    members: Vec<Vec<usize>>,
}

impl Joined<'_> {
    /// Gives the next vertex its group: those that it follows, as far as they can be joined.
    fn add(&mut self, vertex: usize) {
        let own = self.members.len();
        self.group.push(own);
        self.members.push(vec![vertex]);
        let Some(count) = self.vertices[vertex].count else { return };
        // The latest ones first: their results are most likely to be read by nobody else.
        let followed: BTreeSet<usize> =
            self.vertices[vertex].follows.iter().map(|followed| self.group[*followed]).collect();
        for group in followed.into_iter().rev() {
            let first = self.members[group][0];
            let size = self.members[group].len() + self.members[own].len();
            if self.vertices[first].count == Some(count) && size <= MOST && self.can_join(own, group) {
                self.join(own, group);
            }
        }
    }

    fn join(&mut self, own: usize, other: usize) {
        let gone = std::mem::take(&mut self.members[other]);
        for member in &gone {
            self.group[*member] = own;
        }
        self.members[own].extend(gone);
        self.members[own].sort_unstable();
    }

    /// Whether one group may be both: each result that a member reads of another is read element by element, and nothing outside of them
    /// lies between.
    fn can_join(&self, own: usize, other: usize) -> bool {
        let is_within = |vertex: usize| [own, other].contains(&self.group[vertex]);
        let members = || self.members[own].iter().chain(&self.members[other]);
        let follow = members().all(|member| {
            let Vertex { reads, follows, .. } = &self.vertices[*member];
            reads.iter().all(|read| !is_within(*read) || follows.contains(read))
        });
        if !follow {
            return false;
        }
        let mut seen = HashSet::new();
        let outside =
            |member: &usize| self.vertices[*member].reads.iter().copied().filter(|read| !is_within(*read));
        let mut open: Vec<usize> = members().flat_map(outside).collect();
        while let Some(vertex) = open.pop() {
            let group = self.group[vertex];
            if !seen.insert(group) {
                continue;
            }
            for member in &self.members[group] {
                for read in &self.vertices[*member].reads {
                    if is_within(*read) {
                        return false;
                    }
                    open.push(*read);
                }
            }
        }
        true
    }

    /// The groups, each after those that it reads from.
    fn in_order(mut self) -> Vec<Vec<usize>> {
        let mut ordered = Vec::new();
        let mut is_placed = vec![false; self.members.len()];
        // Groups on the way, each with what is still to be placed before it.
        let mut path: Vec<(usize, Vec<usize>)> = Vec::new();
        let before = |of: &Joined<'_>, group: usize| -> Vec<usize> {
            let reads =
                of.members[group].iter().rev().flat_map(|member| of.vertices[*member].reads.iter().rev());
            reads.map(|read| of.group[*read]).filter(|other| *other != group).collect()
        };
        for vertex in 0..self.vertices.len() {
            let group = self.group[vertex];
            // Members that were joined wait for the last of them.
            if self.members[group].last() == Some(&vertex) && !is_placed[group] {
                path.push((group, before(&self, group)));
            }
            while let Some((group, open)) = path.last_mut() {
                match open.pop() {
                    Some(next) if !is_placed[next] => {
                        let more = before(&self, next);
                        path.push((next, more));
                    }
                    Some(_) => {}
                    None => {
                        let group = *group;
                        path.pop();
                        if !is_placed[group] {
                            is_placed[group] = true;
                            ordered.push(group);
                        }
                    }
                }
            }
        }
        ordered.into_iter().map(|group| std::mem::take(&mut self.members[group])).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A pointwise operation that follows others.
    fn after(follows: &[usize]) -> Vertex {
        Vertex { reads: follows.to_vec(), count: Some(8), follows: follows.to_vec() }
    }

    /// One of another kind.
    fn other(reads: &[usize]) -> Vertex {
        Vertex { reads: reads.to_vec(), ..Vertex::default() }
    }

    #[test]
    fn a_chain_is_one_group_and_so_are_branches_that_meet() {
        assert_eq!(groups(&[after(&[]), after(&[0]), after(&[1])]), [[0, 1, 2]]);
        assert_eq!(groups(&[after(&[]), after(&[]), after(&[0, 1])]), [[0, 1, 2]]);
        assert_eq!(
            groups(&[other(&[]), after(&[0]), other(&[]), after(&[2]), after(&[1, 3])]),
            [vec![0], vec![2], vec![1, 3, 4]]
        );
    }

    #[test]
    fn what_is_needed_in_between_is_computed_in_between() {
        // As in a norm: the square, its mean, and the product of both.
        assert_eq!(
            groups(&[
                after(&[]),
                after(&[0]),
                other(&[1]),
                Vertex { reads: vec![0, 2], count: Some(8), follows: vec![0] }
            ]),
            [vec![0, 1], vec![2], vec![3]]
        );
    }

    #[test]
    fn groups_never_wait_for_each_other() {
        // 0 and 3 could be joined, and so could 1 and 2, but not both: 2 needs 0, and 3 needs 1.
        let vertices = [
            after(&[]),
            after(&[]),
            Vertex { reads: vec![0, 1], follows: vec![1], count: Some(8) },
            Vertex { reads: vec![0, 1], follows: vec![0], count: Some(8) },
            other(&[2, 3]),
        ];
        let groups = groups(&vertices);
        assert!(groups.iter().filter(|group| group.len() > 1).count() <= 1, "{groups:?}");
    }

    #[test]
    fn other_numbers_of_elements_and_other_orders_end_a_chain() {
        let fewer = Vertex { count: Some(4), ..after(&[]) };
        assert_eq!(groups(&[fewer, after(&[0])]), [[0], [1]]);
        let turned = Vertex { follows: Vec::new(), ..after(&[0]) };
        assert_eq!(groups(&[after(&[]), turned]), [[0], [1]]);
    }

    #[test]
    fn kernels_stay_small() {
        let vertices: Vec<_> =
            (0..100).map(|vertex: usize| after(vertex.checked_sub(1).as_slice())).collect();
        let groups = groups(&vertices);
        assert!(groups.iter().all(|group| group.len() <= MOST), "{groups:?}");
        assert_eq!(groups.iter().map(Vec::len).sum::<usize>(), 100);
    }

    proptest! {
        #[test]
        fn each_operation_runs_once_and_after_what_it_reads(
            shapes in prop::collection::vec((prop::collection::vec((0usize..1000, any::<bool>()), 0..3), 0u64..3), 1..40)
        ) {
            let mut vertices: Vec<Vertex> = Vec::new();
            for (edges, count) in shapes {
                let number = vertices.len();
                let mut vertex = Vertex { count: (count > 0).then_some(count), ..Vertex::default() };
                for (from, follows) in edges.into_iter().filter(|_| number > 0) {
                    let from = from % number;
                    if !vertex.reads.contains(&from) {
                        vertex.reads.push(from);
                        let same = vertices[from].count == vertex.count && vertex.count.is_some();
                        if follows && same {
                            vertex.follows.push(from);
                        }
                    }
                }
                vertices.push(vertex);
            }
            let groups = groups(&vertices);
            let mut done: HashSet<usize> = HashSet::new();
            for group in &groups {
                for member in group {
                    for read in &vertices[*member].reads {
                        let is_within = group.contains(read);
                        prop_assert!(is_within || done.contains(read), "{:?}", groups);
                        prop_assert!(!is_within || vertices[*member].follows.contains(read) && read < member);
                    }
                }
                prop_assert!(group.is_sorted());
                done.extend(group);
            }
            prop_assert_eq!(done.len(), vertices.len());
        }
    }
}
