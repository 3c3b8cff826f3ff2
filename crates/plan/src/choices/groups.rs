//! What is computed in one go.

/// Recomputed activations that backward computes in one go, because they are computed from each other.
pub(super) struct Groups {
    parent: Vec<usize>,
    bytes: Vec<u64>,
    /// The one that backward asks for first.
    first: Vec<usize>,
}

impl Groups {
    /// Each activation is in a group of its own, with no bytes.
    pub(super) fn new(count: usize) -> Groups {
        Groups { parent: (0..count).collect(), bytes: vec![0; count], first: (0..count).collect() }
    }

    /// An activation is recomputed, with this many bytes.
    pub(super) fn add(&mut self, index: usize, bytes: u64) {
        let group = self.of(index);
        self.bytes[group] += bytes;
    }

    /// The bytes of a group.
    pub(super) fn bytes(&self, group: usize) -> u64 {
        self.bytes[group]
    }

    /// The activation of a group that backward asks for first.
    pub(super) fn first(&self, group: usize) -> usize {
        self.first[group]
    }

    /// The group of an activation.
    pub(super) fn of(&mut self, index: usize) -> usize {
        let mut at = index;
        while self.parent[at] != at {
            self.parent[at] = self.parent[self.parent[at]];
            at = self.parent[at];
        }
        at
    }

    /// Puts the groups of two activations together.
    pub(super) fn merge(&mut self, one: usize, other: usize) {
        let (one, other) = (self.of(one), self.of(other));
        if one != other {
            self.parent[other] = one;
            self.bytes[one] += std::mem::take(&mut self.bytes[other]);
            self.first[one] = self.first[one].max(self.first[other]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_that_are_put_together_count_once() {
        let mut groups = Groups::new(4);
        (0..4).for_each(|index| groups.add(index, 10));
        groups.merge(0, 2);
        groups.merge(2, 3);
        groups.merge(3, 0);
        let group = groups.of(3);
        assert_eq!((groups.bytes(group), groups.first(group)), (30, 3));
        assert_ne!(groups.of(1), group);
    }
}
