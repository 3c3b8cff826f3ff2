//! Draws the arguments of an operation from the existing values.

use std::collections::BTreeMap;

use ssdtrain_libtorch::Storage;
use tch::Tensor;

use crate::program::{Op, Slot};
use crate::random::Random;

/// An operation's arguments.
pub(crate) struct Draft {
    pub(crate) inputs: Vec<Slot>,
    pub(crate) numbers: Vec<f64>,
}

impl Draft {
    pub(crate) fn of(inputs: Vec<Slot>, numbers: Vec<f64>) -> Draft {
        Draft { inputs, numbers }
    }
}

/// The values that arguments are drawn from.
pub(crate) struct Draw<'a> {
    pub(crate) random: &'a mut Random,
    pub(crate) values: &'a BTreeMap<Slot, Tensor>,
    /// Weights that have to be made before the operation.
    pub(crate) before: Vec<Op>,
    /// The next name for a value.
    pub(crate) next: Slot,
    /// Whether new weights may be made.
    pub(crate) may_make: bool,
    /// Only values from this one on are changed in place: those that a segment's function makes itself.
    pub(crate) own_from: Slot,
}

impl Draw<'_> {
    /// Any value; it will be changed without autograd's knowledge.
    pub(crate) fn any(&mut self) -> Option<Slot> {
        self.pick(|this, slot, t| this.is_own(slot, t))
    }

    /// A value to compute with, preferably a recent one.
    pub(crate) fn value(&mut self) -> Option<Slot> {
        let recorded = self.random.percent(80);
        self.pick(|_, _, t| !recorded || t.requires_grad()).or_else(|| self.pick(|_, _, _| true))
    }

    /// A value that may be changed in place, as far as is known.
    pub(crate) fn changeable(&mut self) -> Option<Slot> {
        self.pick(|this, slot, t| this.is_own(slot, t) && !(t.requires_grad() && t.is_leaf()))
    }

    /// A leaf.
    pub(crate) fn leaf(&mut self) -> Option<Slot> {
        self.pick(|this, slot, t| this.is_own(slot, t) && t.requires_grad() && t.is_leaf())
    }

    /// A value of the same shape, another one if there is one.
    pub(crate) fn like(&mut self, slot: Slot) -> Option<Slot> {
        let size = self.values.get(&slot)?.size();
        let others: Vec<Slot> =
            self.values.iter().filter(|(_, t)| t.size() == size).map(|(slot, _)| *slot).collect();
        (!others.is_empty()).then(|| *self.random.of(&others))
    }

    /// A dimension of a value, and its size.
    pub(crate) fn dim(&mut self, slot: Slot) -> Option<(i64, i64)> {
        let size = self.values.get(&slot)?.size();
        let dim = (!size.is_empty()).then(|| self.random.below(size.len()))?;
        (size[dim] > 0).then_some((dim as i64, size[dim]))
    }

    /// A weight of that shape, which is made if there is none.
    pub(crate) fn weight(&mut self, shape: &[i64]) -> Option<Slot> {
        self.leaf_of(shape, "leaf", true)
    }

    /// A tensor of that shape without a gradient, which is made if there is none.
    pub(crate) fn buffer(&mut self, shape: &[i64]) -> Option<Slot> {
        self.leaf_of(shape, "constant", false)
    }

    /// A view of a value's elements, or rows, from `start` on.
    pub(crate) fn narrow(&mut self, slot: Slot, start: i64, length: i64) -> Slot {
        let view = self.next;
        self.next += 1;
        let numbers = vec![0.0, start as f64, length as f64];
        self.before.push(Op {
            name: "narrow",
            outputs: vec![view],
            inputs: vec![slot],
            numbers,
            body: vec![],
        });
        view
    }

    fn leaf_of(&mut self, shape: &[i64], name: &'static str, recorded: bool) -> Option<Slot> {
        let is_one = |t: &Tensor| t.is_leaf() && t.requires_grad() == recorded && t.size() == shape;
        let known: Vec<Slot> = self.values.iter().filter(|(_, t)| is_one(t)).map(|(slot, _)| *slot).collect();
        if !known.is_empty() && self.random.percent(50) {
            return Some(*self.random.of(&known));
        }
        if !self.may_make {
            return (!known.is_empty()).then(|| *self.random.of(&known));
        }
        let seed = self.random.below(1000) as f64;
        let numbers = std::iter::once(seed).chain(shape.iter().map(|size| *size as f64)).collect();
        let slot = self.next;
        self.next += 1;
        self.before.push(Op { name, outputs: vec![slot], inputs: vec![], numbers, body: vec![] });
        Some(slot)
    }

    /// Whether a value may be changed here, and no other one is with it.
    fn is_own(&self, slot: Slot, t: &Tensor) -> bool {
        let id = |t: &Tensor| Storage::of(t).map(|storage| storage.id());
        let mut others = self.values.range(..self.own_from);
        slot >= self.own_from && others.all(|(_, other)| id(other) != id(t))
    }

    fn pick(&mut self, wanted: impl Fn(&Self, Slot, &Tensor) -> bool) -> Option<Slot> {
        let slots: Vec<Slot> =
            self.values.iter().filter(|(slot, t)| wanted(self, **slot, t)).map(|(slot, _)| *slot).collect();
        if slots.is_empty() {
            return None;
        }
        // The later of two is recent more often than not.
        let (one, other) = (self.random.below(slots.len()), self.random.below(slots.len()));
        Some(slots[one.max(other)])
    }
}
