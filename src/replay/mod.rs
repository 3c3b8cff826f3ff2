//! Results that are computed again in backward by the operations that made them, which libtorch's dispatcher has shown (`docs/design.md`,
//! "Operations on record").
//!
//! When autograd saves the result of a recorded operation, the graph can get a handle to a [`Node`](node::Node) instead of the bytes: the
//! operation, and where each storage that it reads comes from. That is another node, or a [`Leaf`](leaf::Leaf): a storage that stays
//! anyway, or one that the cache takes in the result's place. `replays` decides which, `standing` finds those that there are, and
//! `reruns` runs what is needed, in order. On a GPU, runs of pointwise operations become one kernel (`chained`), once it was made and
//! compared (`chains`).

mod chained;
mod chains;
mod leaf;
mod node;
mod origins;
mod replays;
mod rerun;
mod reruns;
mod saving;
mod standing;

pub(crate) use self::chains::Chains;
pub(crate) use self::replays::Replays;
pub(crate) use self::saving::{Saving, Stays};
