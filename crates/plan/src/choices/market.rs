//! The changes on offer, and their prices.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use super::groups::Groups;
use super::{Change, Order};
use crate::graph::Graph;
use crate::{Activation, Role, Workload};

/// The most operations that a result may be computed through if none of their results is saved. Longer chains, such
/// as that of a residual stream, are cut by saving something in between.
const CHAIN: usize = 64;
/// Prices count as equal if they differ by less than this factor: those of the same operation in different layers.
const ALIKE: f64 = 1.25;
/// By how much the price rises if what is dropped is computed again while as much is needed as ever, so that little or
/// nothing is freed then.
const FREES_LITTLE: f64 = 16.0;
/// The share of everything saved that may be recomputed in one go.
const AT_ONCE: f64 = 0.5;

/// A price, and what breaks ties; the lower comes first.
type Key = (i64, usize);

/// The changes on offer, and what their prices depend on.
pub(super) struct Market<'a> {
    activations: &'a [Activation],
    graph: &'a Graph,
    order: Order,
    need: u64,
    most_at_once: u64,
    /// By how much a step with everything kept is higher later in forward, or earlier in backward, than what is saved
    /// up to each activation: recomputing more than that when backward asks for it frees nothing.
    higher: Vec<u64>,
    pub(super) is_held: Vec<bool>,
    /// Saved in place of others, now or earlier.
    was_saved_instead: Vec<bool>,
    groups: Groups,
    /// An activation in whose group a result that is not saved is computed again.
    computed_with: Vec<Option<usize>>,
    offers: BinaryHeap<Reverse<(Key, usize)>>,
    /// The price at which each activation is on offer.
    asked: Vec<Option<Key>>,
    visits: Visits,
}

/// A change on offer.
struct Offer {
    price: f64,
    time: f64,
    bytes: u64,
    /// The first is the one that the offer is about.
    switched: Vec<usize>,
}

/// What was met on the way from an activation to others.
#[derive(Default)]
struct Visits {
    /// The last visit to each.
    seen: Vec<usize>,
    count: usize,
    stack: Vec<usize>,
    /// Results that are not saved, and are computed again on the way.
    through: Vec<usize>,
    /// The groups that it would join.
    joined: Vec<usize>,
    /// Saved activations that are computed from it, and held.
    dependents: Vec<usize>,
}

impl<'a> Market<'a> {
    pub(super) fn new(work: &'a Workload, graph: &'a Graph, need: u64, order: Order) -> Market<'a> {
        let activations = &work.activations[..];
        let count = activations.len();
        let is_held: Vec<bool> = activations.iter().map(Activation::is_saved).collect();
        let saved: u64 = activations
            .iter()
            .filter(|activation| activation.is_saved())
            .map(|activation| activation.bytes)
            .sum();
        Market {
            activations,
            graph,
            order,
            need: need.max(1),
            most_at_once: need.max((AT_ONCE * saved as f64) as u64),
            is_held,
            was_saved_instead: vec![false; count],
            higher: higher(work),
            groups: Groups::new(count),
            computed_with: vec![None; count],
            offers: BinaryHeap::new(),
            asked: vec![None; count],
            visits: Visits { seen: vec![0; count], ..Visits::default() },
        }
    }

    /// Makes the cheapest change. `None` if there is nothing left to change.
    pub(super) fn cheapest(&mut self) -> Option<Change> {
        loop {
            let Reverse((key, index)) = self.offers.pop()?;
            if self.asked[index] != Some(key) {
                continue;
            }
            self.asked[index] = None;
            // What was changed in the meantime may have made it dearer.
            let Some(offer) = self.price(index) else { continue };
            let now = self.key(index, &offer);
            if now > key {
                self.asked[index] = Some(now);
                self.offers.push(Reverse((now, index)));
                continue;
            }
            self.make(&offer);
            let time = match self.order {
                Order::Oldest | Order::Newest => Duration::from_secs_f64(offer.time),
                Order::FewestBytes => Duration::ZERO,
            };
            return Some(Change { switched: offer.switched, bytes: offer.bytes, time });
        }
    }

    /// Puts the change of an activation on offer, if there is one, at its price.
    pub(super) fn offer(&mut self, index: usize) {
        let Some(offer) = self.price(index) else { return };
        let key = self.key(index, &offer);
        if self.asked[index].is_none_or(|asked| key < asked) {
            self.asked[index] = Some(key);
            self.offers.push(Reverse((key, index)));
        }
    }

    fn key(&self, index: usize, offer: &Offer) -> Key {
        let tie = match self.order {
            Order::Oldest => index,
            Order::Newest | Order::FewestBytes => self.activations.len() - index,
        };
        ((offer.price.ln() / ALIKE.ln()).floor() as i64, tie)
    }

    fn price(&mut self, index: usize) -> Option<Offer> {
        let activation = &self.activations[index];
        if activation.role == Role::Fleeting {
            return self.price_of_dropping_all(index);
        }
        if activation.bytes == 0 || !activation.is_movable() || !activation.can_be_held() {
            return None;
        }
        match (activation.is_saved(), self.is_held[index]) {
            (true, false) => None,
            (_, true) => self.price_of_dropping(index),
            (false, false) if self.was_saved_instead[index] => None,
            (false, false) => self.price_of_saving_instead(index),
        }
    }

    /// An activation that is held no longer, and is recomputed.
    fn price_of_dropping(&mut self, index: usize) -> Option<Offer> {
        let activation = &self.activations[index];
        if !self.visit_inputs(index, None) {
            return None;
        }
        self.visit_users(index);
        let mut time = self.time(index);
        if !activation.is_saved() {
            // It is computed for each group that reads it.
            self.visits.joined.sort_unstable();
            self.visits.joined.dedup();
            time *= self.visits.joined.len().max(1) as f64;
        }
        let price = self.dearer(index)? * time / activation.bytes as f64;
        Some(Offer { price, time, bytes: activation.bytes, switched: vec![index] })
    }

    /// An activation that is saved in place of others, which are recomputed from it.
    fn price_of_saving_instead(&mut self, index: usize) -> Option<Offer> {
        let own = self.activations[index].bytes;
        let (bytes, time, price, dropped) = self.cheapest_dependents(index, own, (0.0, 0.0))?;
        let switched = std::iter::once(index).chain(dropped).collect();
        Some(Offer { price, time, bytes, switched })
    }

    /// Something that cannot be held, and is computed once for several that are dropped together.
    fn price_of_dropping_all(&mut self, index: usize) -> Option<Offer> {
        if self.graph.users(index).len() < 2 || !self.visit_inputs(index, None) {
            return None;
        }
        self.visit_users(index);
        let (time, dearer) = (self.time(index), self.dearer(index)?);
        let (bytes, time, price, switched) = self.cheapest_dependents(index, 0, (time, dearer * time))?;
        (switched.len() > 1).then_some(Offer { price, time, bytes, switched })
    }

    /// Of the held activations that are computed from `index`, those that are dropped at the lowest price for each byte if it is there
    /// anyway: it has `own` bytes, and `first` are its time and cost. The bytes that this frees, its time, its price, and which they are.
    fn cheapest_dependents(
        &mut self,
        index: usize,
        own: u64,
        first: (f64, f64),
    ) -> Option<(u64, f64, f64, Vec<usize>)> {
        self.visits.begin();
        self.visit_users(index);
        let dependents = std::mem::take(&mut self.visits.dependents);
        let mut priced = Vec::new();
        for &dependent in &dependents {
            let activation = &self.activations[dependent];
            let can_go = activation.bytes > 0 && activation.is_movable() && self.graph.has_recipe(dependent);
            if can_go && self.visit_inputs(dependent, Some(index)) {
                self.visit_users(dependent);
                if let Some(dearer) = self.dearer(dependent) {
                    let time = self.time(dependent);
                    priced.push((dearer * time / activation.bytes as f64, time, dependent));
                }
            }
        }
        self.visits.dependents = dependents;
        priced.sort_by(|left, right| left.0.total_cmp(&right.0));
        let ((mut time, mut cost), mut freed) = (first, 0);
        let mut best = None;
        for (nth, &(price, takes, dependent)) in priced.iter().enumerate() {
            let bytes = self.activations[dependent].bytes;
            cost += price * bytes as f64;
            time += takes;
            freed += bytes;
            if freed <= own {
                continue;
            }
            let price = cost / (freed - own) as f64;
            if best.is_none_or(|(_, _, best, _)| price < best) {
                best = Some((freed - own, time, price, nth + 1));
            }
        }
        let (bytes, time, price, count) = best?;
        let dropped = priced[..count].iter().map(|(_, _, dependent)| *dependent).collect();
        Some((bytes, time, price, dropped))
    }

    /// Visits what has to be computed for an activation, down to what is held, as `instead` may be. False if it cannot
    /// be computed, or through too many results.
    fn visit_inputs(&mut self, index: usize, instead: Option<usize>) -> bool {
        if !self.graph.has_recipe(index) {
            return false;
        }
        self.visits.begin();
        self.visits.visit(index);
        while let Some(at) = self.visits.stack.pop() {
            for &input in self.graph.inputs(at) {
                if self.is_held[input] || instead == Some(input) || !self.visits.is_new(input) {
                    continue;
                }
                if self.activations[input].is_saved() {
                    let group = self.groups.of(input);
                    self.visits.joined.push(group);
                    // Backward has not used it up when it asks for what was saved later.
                    if input < index || !self.activations[index].is_saved() {
                        continue;
                    }
                }
                if !self.graph.has_recipe(input) || self.visits.through.len() == CHAIN {
                    return false;
                }
                self.visits.through.push(input);
                self.visits.stack.push(input);
            }
        }
        true
    }

    /// Visits what is computed from an activation: what is recomputed joins its group, and what is held may be
    /// recomputed.
    fn visit_users(&mut self, index: usize) {
        self.visits.dependents.clear();
        self.visits.stack.clear();
        self.visits.stack.push(index);
        let mut left = CHAIN;
        while let Some(at) = self.visits.stack.pop() {
            for &user in self.graph.users(at) {
                if left == 0 || !self.visits.is_new(user) {
                    continue;
                }
                left -= 1;
                if !self.activations[user].is_saved() {
                    if !self.is_held[user] {
                        self.visits.stack.push(user);
                    }
                } else if self.is_held[user] {
                    self.visits.dependents.push(user);
                } else {
                    let group = self.groups.of(user);
                    self.visits.joined.push(group);
                }
            }
        }
    }

    /// The time to compute an activation through what was visited, without what its group computes anyway. Or what stands for it.
    fn time(&mut self, index: usize) -> f64 {
        let order = self.order;
        let seconds = |activation: &Activation| match order {
            Order::Oldest | Order::Newest => {
                activation.recompute.as_ref().map_or(0.0, |recompute| recompute.time.as_secs_f64())
            }
            Order::FewestBytes => activation.bytes as f64,
        };
        let mut time = seconds(&self.activations[index]);
        for &through in &self.visits.through {
            let group = self.computed_with[through].map(|with| self.groups.of(with));
            if group.is_none_or(|group| !self.visits.joined.contains(&group)) {
                time += seconds(&self.activations[through]);
            }
        }
        time
    }

    /// By how much the price rises with what is computed in one go, if an activation joins the groups that were
    /// visited. `None` if that is too much.
    fn dearer(&mut self, index: usize) -> Option<f64> {
        self.visits.joined.sort_unstable();
        self.visits.joined.dedup();
        let own = Some(index).filter(|index| self.activations[*index].is_saved());
        let mut bytes = own.map_or(0, |own| self.activations[own].bytes);
        let mut first = own;
        for &group in &self.visits.joined {
            bytes += self.groups.bytes(group);
            first = first.max(Some(self.groups.first(group)));
        }
        let frees =
            first.is_none_or(|first| bytes + self.activations[first].backward_extra <= self.higher[first]);
        let dearer = (bytes as f64 / self.need as f64).max(1.0) * if frees { 1.0 } else { FREES_LITTLE };
        (bytes <= self.most_at_once).then_some(dearer)
    }

    fn make(&mut self, offer: &Offer) {
        for &index in &offer.switched {
            self.is_held[index] = !self.is_held[index];
            if self.is_held[index] {
                self.was_saved_instead[index] = true;
            }
        }
        for &index in &offer.switched {
            if !self.is_held[index] {
                self.join(index);
            }
        }
        // Others may be cheaper with what is computed again, or saved instead, now.
        let about = offer.switched[0];
        let had_others = !self.visits.through.is_empty() || self.is_held[about];
        self.offer(about);
        if had_others {
            self.visits.begin();
            self.visit_users(about);
            let dependents = std::mem::take(&mut self.visits.dependents);
            dependents.iter().for_each(|&dependent| self.offer(dependent));
            self.visits.dependents = dependents;
        }
    }

    /// Puts an activation that is recomputed from here on into the group that it is computed with.
    fn join(&mut self, index: usize) {
        if self.activations[index].is_saved() {
            self.groups.add(index, self.activations[index].bytes);
        }
        self.visit_inputs(index, None);
        self.visit_users(index);
        for &group in &self.visits.joined {
            self.groups.merge(index, group);
        }
        for &through in &self.visits.through {
            self.computed_with[through] = Some(index);
        }
    }
}

impl Visits {
    fn begin(&mut self) {
        self.count += 1;
        self.stack.clear();
        self.through.clear();
        self.joined.clear();
        self.dependents.clear();
    }

    fn visit(&mut self, index: usize) {
        self.seen[index] = self.count;
        self.stack.push(index);
    }

    fn is_new(&mut self, index: usize) -> bool {
        std::mem::replace(&mut self.seen[index], self.count) != self.count
    }
}

/// For each activation, by how much a step with everything kept is higher after it is saved, and before backward asks
/// for it, than everything saved up to it.
fn higher(work: &Workload) -> Vec<u64> {
    let saved = |one: &Activation| if one.is_saved() { one.bytes } else { 0 };
    let mut upto: u64 = work.activations.iter().map(saved).sum();
    let mut highest = upto + work.turn_extra;
    let mut higher: Vec<u64> = work
        .activations
        .iter()
        .rev()
        .map(|one| {
            let above = highest - upto;
            highest = highest.max(upto + one.forward_extra.max(one.backward_extra));
            upto -= saved(one);
            above
        })
        .collect();
    higher.reverse();
    higher
}
