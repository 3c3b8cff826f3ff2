//! Results that are computed again in backward by the operations that made them, which libtorch's dispatcher has shown (`docs/design.md`,
//! "Operations on record").
//!
//! When autograd saves the result of a recorded operation, the graph can get a handle to a [`Node`](node::Node) instead of the bytes: the
//! operation, and where each storage that it reads comes from. That is another node, or a [`Leaf`](leaf::Leaf): a storage that stays
//! anyway, or one that the cache takes in the result's place. `replays` decides which, `standing` finds those that there are, and
//! `reruns` runs what is needed, in order; `demand` tells when nothing more will be computed from a leaf. Runs of pointwise operations
//! become one (`chained`), once its bits were compared with theirs (`chains`): a kernel on a GPU (`kernels`), and tiles that stay in
//! the caches on the CPU.

mod chained;
mod chains;
mod demand;
mod kernels;
mod leaf;
mod near;
mod node;
mod origins;
mod replays;
mod rerun;
mod reruns;
mod saving;
mod stand;
mod standing;
mod together;

pub(crate) use self::chains::Chains;
pub(crate) use self::replays::Replays;
pub(crate) use self::saving::{Bounds, Given, Makers, Saving, Stays};
pub(crate) use self::stand::Stand;
pub(crate) use self::together::Together;
