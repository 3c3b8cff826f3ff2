//! Which activations are computed from which.

use crate::Activation;

/// Operations that have at least this share of the rate of pointwise ones, in bytes, wait for the memory as these do.
const MEMORY_BOUND: f64 = 0.25;

/// The operations of forward, as far as activations can be recomputed by them.
#[derive(Clone, Debug)]
pub(crate) struct Graph {
    inputs: Edges,
    users: Edges,
    /// All activations, each after those that it is computed from.
    order: Vec<usize>,
    has_recipe: Vec<bool>,
    is_memory_bound: Vec<bool>,
}

/// Something about a recipe that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// The recipe of this activation reads one that does not exist.
    Missing(usize),
    /// This activation is computed from itself.
    Cycle(usize),
}

/// For each activation, the others that it has an edge to.
#[derive(Clone, Debug)]
struct Edges {
    /// Where the edges of each begin, and where those of the last one end.
    starts: Vec<usize>,
    to: Vec<usize>,
}

impl Graph {
    /// Recipes with a flaw are left out, and so are those of whatever depends on a cycle.
    pub(crate) fn new(activations: &[Activation]) -> Graph {
        let known = |activation: &Activation| {
            let recompute = activation.recompute.as_ref();
            recompute.is_some_and(|recompute| recompute.inputs.iter().all(|input| *input < activations.len()))
        };
        let graph = Graph::of(activations, activations.iter().map(known).collect());
        if graph.order.len() == activations.len() {
            return graph;
        }
        let mut has_recipe = vec![false; activations.len()];
        graph.order.iter().for_each(|&index| has_recipe[index] = graph.has_recipe[index]);
        Graph::of(activations, has_recipe)
    }

    fn of(activations: &[Activation], has_recipe: Vec<bool>) -> Graph {
        let recipes = activations.iter().zip(&has_recipe).map(|(activation, has_recipe)| {
            let inputs = activation.recompute.as_ref().map_or(&[][..], |recompute| &recompute.inputs);
            if *has_recipe { inputs } else { &[] }
        });
        let inputs = Edges::new(recipes);
        let users = inputs.reversed();
        let mut missing: Vec<usize> = (0..activations.len()).map(|index| inputs.of(index).len()).collect();
        let mut order: Vec<usize> = (0..activations.len()).filter(|&index| missing[index] == 0).collect();
        let mut next = 0;
        while let Some(&index) = order.get(next) {
            next += 1;
            for &user in users.of(index) {
                missing[user] -= 1;
                if missing[user] == 0 {
                    order.push(user);
                }
            }
        }
        let is_memory_bound = memory_bound(activations, &inputs);
        Graph { inputs, users, order, has_recipe, is_memory_bound }
    }

    /// The first thing that is wrong with the recipes.
    pub(crate) fn flaw(activations: &[Activation]) -> Option<Flaw> {
        let exists = |input: &usize| *input < activations.len();
        let missing = activations.iter().position(|activation| {
            activation.recompute.as_ref().is_some_and(|recompute| !recompute.inputs.iter().all(exists))
        });
        if let Some(missing) = missing {
            return Some(Flaw::Missing(missing));
        }
        let recipes = activations.iter().map(|activation| activation.recompute.is_some()).collect();
        let graph = Graph::of(activations, recipes);
        let mut is_ordered = vec![false; activations.len()];
        graph.order.iter().for_each(|&index| is_ordered[index] = true);
        // From what depends on a cycle, a walk against the edges ends in one.
        let mut at = is_ordered.iter().position(|ordered| !ordered)?;
        for _ in activations {
            at = graph.inputs(at).iter().copied().find(|input| !is_ordered[*input]).unwrap_or(at);
        }
        Some(Flaw::Cycle(at))
    }

    /// What an activation is computed from.
    pub(crate) fn inputs(&self, index: usize) -> &[usize] {
        self.inputs.of(index)
    }

    /// What is computed from an activation.
    pub(crate) fn users(&self, index: usize) -> &[usize] {
        self.users.of(index)
    }

    /// All activations, each after those that it is computed from.
    pub(crate) fn order(&self) -> &[usize] {
        &self.order
    }

    /// Whether there is a way to compute an activation from others.
    pub(crate) fn has_recipe(&self, index: usize) -> bool {
        self.has_recipe[index]
    }

    /// Whether computing an activation takes about as long as its bytes and those of its inputs take through memory.
    pub(crate) fn is_memory_bound(&self, index: usize) -> bool {
        self.is_memory_bound[index]
    }
}

/// Which activations' operations are memory-bound: the pointwise ones, and those that are about as fast.
fn memory_bound(activations: &[Activation], inputs: &Edges) -> Vec<bool> {
    let least = pointwise_rate(activations).map_or(f64::INFINITY, |rate| MEMORY_BOUND * rate);
    let is_fast = |(index, one): (usize, &Activation)| {
        let read: f64 = inputs.of(index).iter().map(|input| activations[*input].bytes as f64).sum();
        one.traffic.is_some() || read + one.bytes as f64 >= least * seconds(one)
    };
    activations.iter().enumerate().map(is_fast).collect()
}

/// How many bytes pointwise operations read and write in a second, if any of them tells.
pub(crate) fn pointwise_rate(activations: &[Activation]) -> Option<f64> {
    let told = activations.iter().filter_map(|one| Some((one.traffic? as f64, seconds(one))));
    // Further results of an operation have its bytes, and not its time.
    let told = told.filter(|(bytes, time)| *bytes > 0.0 && *time > 0.0);
    let (bytes, time) = told.fold((0.0, 0.0), |(bytes, time), (more, longer)| (bytes + more, time + longer));
    (time > 0.0).then(|| bytes / time)
}

fn seconds(activation: &Activation) -> f64 {
    activation.recompute.as_ref().map_or(0.0, |recompute| recompute.time.as_secs_f64())
}

impl Edges {
    fn new<'a>(of_each: impl Iterator<Item = &'a [usize]>) -> Edges {
        let (mut starts, mut to) = (vec![0], Vec::new());
        for edges in of_each {
            to.extend_from_slice(edges);
            starts.push(to.len());
        }
        Edges { starts, to }
    }

    fn of(&self, index: usize) -> &[usize] {
        &self.to[self.starts[index]..self.starts[index + 1]]
    }

    fn reversed(&self) -> Edges {
        let count = self.starts.len() - 1;
        let mut starts = vec![0; count + 1];
        self.to.iter().for_each(|&to| starts[to + 1] += 1);
        for index in 0..count {
            starts[index + 1] += starts[index];
        }
        let (mut free, mut to) = (starts.clone(), vec![0; self.to.len()]);
        for index in 0..count {
            for &other in self.of(index) {
                to[free[other]] = index;
                free[other] += 1;
            }
        }
        Edges { starts, to }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::Recompute;

    fn activations(inputs: &[Option<&[usize]>]) -> Vec<Activation> {
        let recompute = |inputs: &[usize]| Recompute { inputs: inputs.to_vec(), ..Recompute::default() };
        let activation = |inputs: &Option<&[usize]>| Activation {
            recompute: inputs.map(recompute),
            ..Activation::default()
        };
        inputs.iter().map(activation).collect()
    }

    #[test]
    fn inputs_come_before_what_is_computed_from_them() {
        let graph = Graph::new(&activations(&[Some(&[2]), Some(&[0, 2, 2]), None]));
        assert_eq!(graph.order(), [2, 0, 1]);
        assert_eq!((graph.inputs(1), graph.users(2)), (&[0, 2, 2][..], &[0, 1, 1][..]));
    }

    #[test]
    fn operations_about_as_fast_as_pointwise_ones_are_memory_bound() {
        let from = |bytes, seconds, inputs: &[usize]| Activation {
            bytes,
            recompute: Some(Recompute { time: Duration::from_secs(seconds), inputs: inputs.to_vec() }),
            ..Activation::default()
        };
        let pointwise = Activation { traffic: Some(100), ..from(50, 1, &[0]) };
        let product = from(50, 20, &[0]);
        let [norm, sum] = [from(50, 3, &[0]), from(1, 2, &[0])];
        let all = [from(50, 1000, &[]), pointwise, product.clone(), norm, sum];
        let graph = Graph::new(&all);
        assert_eq!(
            [0, 1, 2, 3, 4].map(|index| graph.is_memory_bound(index)),
            [false, true, false, true, true]
        );
        let statistic = |traffic| Activation { bytes: 1, traffic, ..Activation::default() };
        let with_statistics = [all.as_slice(), &[statistic(Some(100)), statistic(Some(0))]].concat();
        assert!(Graph::new(&with_statistics).is_memory_bound(3), "they were made in the same time");
        let nothing = Activation { traffic: Some(0), ..from(50, 1, &[0]) };
        assert!(!Graph::new(&[from(50, 1, &[]), nothing, product.clone()]).is_memory_bound(2));
        let graph = Graph::new(&[from(50, 1, &[]), product]);
        assert!(
            ![0, 1].iter().any(|index| graph.is_memory_bound(*index)),
            "nothing tells how fast memory is"
        );
    }

    #[test]
    fn recipes_that_cannot_be_are_found_and_left_out() {
        let cycle = activations(&[None, Some(&[3]), Some(&[1]), Some(&[2]), Some(&[3]), Some(&[0])]);
        assert!(matches!(Graph::flaw(&cycle), Some(Flaw::Cycle(1..=3))));
        let graph = Graph::new(&cycle);
        assert_eq!(
            [0, 1, 2, 3, 4, 5].map(|index| graph.has_recipe(index)),
            [false, false, false, false, false, true]
        );
        let missing = activations(&[None, Some(&[7])]);
        assert_eq!(Graph::flaw(&missing), Some(Flaw::Missing(1)));
        assert!(!Graph::new(&missing).has_recipe(1));
        assert_eq!(Graph::flaw(&activations(&[None, Some(&[0])])), None);
    }
}
