//! Results that are computed again together: what several of them need is computed, and what they begin with read, once.

use std::sync::{Arc, Weak};

use ssdtrain_store::sync::Mutex;

use super::node::Node;

/// The results that a part of the program has saved, in the order of saving.
#[derive(Default)]
pub(crate) struct Together(Mutex<Vec<(Weak<Node>, usize)>>);

impl Together {
    pub(super) fn add(&self, node: &Arc<Node>, made: usize) {
        self.0.lock().push((Arc::downgrade(node), made));
    }

    /// The operations of which handles wait for a result on the stream that the calling thread computes on, and whose result is not there.
    pub(super) fn missing(&self) -> Vec<Arc<Node>> {
        let all: Vec<(Arc<Node>, usize)> =
            self.0.lock().iter().filter_map(|(node, made)| Some((node.upgrade()?, *made))).collect();
        let is_missing = |(node, made): &(Arc<Node>, usize)| {
            node.operation.is_on_stream() && node.is_awaited(*made) && node.available(*made).is_none()
        };
        all.into_iter().filter(is_missing).map(|(node, _)| node).collect()
    }
}
