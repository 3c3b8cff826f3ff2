//! How saved tensors were made, for the profile.

use std::collections::HashSet;
use std::sync::Arc;

use ssdtrain_libtorch as torch;
use ssdtrain_libtorch::{Recorded, Recording, SavedTensor, Storage};
use ssdtrain_store::sync::Mutex;

use ssdtrain_plan::Position;

use super::chained;
use super::chains::Chains;
use super::saving::Stays;
use crate::profile::{Identity, Operation, Origin, Read};

/// The origins of a step, each operation of which is told once.
pub(super) struct Origins {
    recording: Arc<Recording>,
    /// The numbers of the operations that were told.
    told: Mutex<HashSet<u64>>,
}

impl Origins {
    pub(super) fn new(recording: &Arc<Recording>) -> Origins {
        Origins { recording: Arc::clone(recording), told: Mutex::default() }
    }

    /// How a saved tensor was made, as far as that was not told before.
    pub(super) fn of(
        &self,
        saved: &SavedTensor<'_>,
        stays: &Stays<'_>,
        chains: Option<&Chains>,
    ) -> Option<Origin> {
        let storage = saved.storage()?;
        let Some((operation, result)) = self.recording.maker(&storage) else {
            return Some(Origin { identity: Identity::Outside(storage.id()), operations: Vec::new() });
        };
        let identity = Identity::Result { operation: operation.number(), result };
        Some(Origin { identity, operations: self.tell(vec![operation], stays, chains) })
    }

    /// What these storages of the cache's device are, and the operations that they were made by, as far as that was not told before. What stays where it is, is left out.
    pub(super) fn of_all(
        &self,
        storages: &[Storage],
        stays: &Stays<'_>,
        chains: Option<&Chains>,
    ) -> (Vec<Read>, Vec<Operation>) {
        let (mut reads, mut makers) = (Vec::new(), Vec::new());
        for storage in storages.iter().filter(|storage| !stays.has(storage.id(), storage.bytes())) {
            let identity = match self.recording.maker(storage) {
                Some((operation, result)) => {
                    let identity = Identity::Result { operation: operation.number(), result };
                    makers.push(operation);
                    identity
                }
                None => Identity::Outside(storage.id()),
            };
            reads.push(Read { identity, bytes: storage.bytes(), exists: true });
        }
        (reads, self.tell(makers, stays, chains))
    }

    /// The operations that results of `open` were made by, without those that were told before.
    fn tell(&self, mut open: Vec<Recorded>, stays: &Stays<'_>, chains: Option<&Chains>) -> Vec<Operation> {
        let (mut told, mut operations) = (self.told.lock(), Vec::new());
        while let Some(operation) = open.pop() {
            if !told.insert(operation.number()) {
                continue;
            }
            let mut reads = Vec::new();
            for (index, read) in operation.read().enumerate() {
                let Some(id) = read.id() else { continue };
                let exists = read.unwritten().is_some();
                if exists && stays.has(id, read.bytes()) {
                    continue;
                }
                let identity = match operation.maker(index, &self.recording) {
                    Some((maker, result)) => {
                        let operation = maker.number();
                        open.push(maker);
                        Identity::Result { operation, result }
                    }
                    None => Identity::Outside(id),
                };
                let exists = exists && read.device() == stays.device;
                reads.push(Read { identity, bytes: read.bytes(), exists });
            }
            let pass = chains.and_then(|chains| chained::pass(&operation, chains));
            let torch::Position { strand, index } = operation.position();
            operations.push(Operation {
                number: operation.number(),
                position: Position { strand, index },
                name: operation.name(),
                stamps: operation.stamps(),
                is_shorter: pass.as_ref().is_some_and(|pass| pass.is_shorter),
                traffic: pass.and_then(|pass| pass.traffic),
                reads,
            });
        }
        operations
    }
}
