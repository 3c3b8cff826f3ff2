//! What the graph holds for a result that is computed again.

use std::sync::Arc;

use ssdtrain_libtorch::{Handle, Recording, Storage};

use super::node::{Node, Profiled, Share};
use super::reruns::Reruns;
use super::standing::Standing;
use super::together::Together;
use crate::cache::{Cache, TapeKey};
use crate::profile::Probe;

/// The graph's handle to a result that is computed again.
pub(crate) struct Stand {
    pub(super) cache: Arc<Cache>,
    pub(super) recording: Arc<Recording>,
    pub(super) reruns: Arc<Reruns>,
    /// What tells of writes, also when the step is gone.
    pub(super) _standing: Arc<Standing>,
    pub(super) node: Arc<Node>,
    pub(super) share: Share,
    /// What is computed again with it.
    pub(super) together: Option<Arc<Together>>,
    /// The number of the thread that saved it.
    pub(super) strand: u32,
    /// Where it would be among what was saved.
    pub(super) place: (TapeKey, usize),
    /// What takes notes, and how it knows the result.
    pub(super) profiled: Option<(Arc<Probe>, u64, Arc<Profiled>)>,
}

impl Stand {
    /// `probe` takes notes of when it is asked for. Returns the number by which it knows the result.
    pub(crate) fn is_profiled_by(&mut self, probe: &Arc<Probe>) -> Option<u64> {
        let (number, profiled) = Node::profiled_by(&self.node, self.share.made, probe)?;
        self.profiled = Some((Arc::clone(probe), number, profiled));
        Some(number)
    }

    fn serve(&self) -> Result<Storage, String> {
        let (tape, position) = self.place;
        self.cache.comes_to(tape, position);
        let (node, made) = (&self.node, self.share.made);
        let storage = match node.changed(made).or_else(|| node.available(made)) {
            Some(storage) => storage,
            None => self.reruns.run(node, made, self.together.as_deref())?,
        };
        node.serve(&self.share);
        Ok(storage)
    }
}

impl Handle for Stand {
    fn unpack(&self) -> Result<Storage, String> {
        // If the program runs backward by itself, this shows that a micro-batch was saved.
        self.recording.clear(Some(self.strand));
        let Some((probe, number, profiled)) = &self.profiled else { return self.serve() };
        let begun = probe.asks(self.strand);
        let served = self.serve();
        served.iter().for_each(|storage| profiled.is_served(storage));
        if let Some(begun) = begun {
            probe.computed(begun, *number, self.cache.alive());
        }
        served
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        self.node.drop_handle(&self.share);
    }
}
