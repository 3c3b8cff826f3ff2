//! Names for the parts of a step, and what each part saved.

use std::collections::HashMap;

use parking_lot::Mutex;

use ssdtrain_plan::{ScopeId, Tally};

use super::report::ScopeReport;

/// Every scope path a cache has seen. Paths of nested scopes are joined by `/`.
#[derive(Debug, Default)]
pub(crate) struct Scopes(Mutex<Paths>);

#[derive(Debug, Default)]
struct Paths {
    children: HashMap<ScopeId, HashMap<Box<str>, ScopeId>>,
    /// The paths of every scope but the root.
    names: Vec<String>,
}

impl Scopes {
    /// The scope `name` within `parent`.
    pub(crate) fn child(&self, parent: ScopeId, name: &str) -> ScopeId {
        let mut paths = self.0.lock();
        if let Some(&known) = paths.children.get(&parent).and_then(|children| children.get(name)) {
            return known;
        }
        let path = match paths.name(parent) {
            "" => name.to_owned(),
            above => format!("{above}/{name}"),
        };
        paths.names.push(path);
        // Four billion scopes do not fit in memory.
        let id = ScopeId(u32::try_from(paths.names.len()).unwrap_or(u32::MAX));
        paths.children.entry(parent).or_default().insert(name.into(), id);
        id
    }

    /// The path of a scope; empty for the root.
    pub(crate) fn name(&self, id: ScopeId) -> String {
        self.0.lock().name(id).to_owned()
    }
}

impl Paths {
    fn name(&self, id: ScopeId) -> &str {
        (id.0 as usize).checked_sub(1).and_then(|index| self.names.get(index)).map_or("", String::as_str)
    }
}

/// What each scope saved in one step.
#[derive(Debug, Default)]
pub(crate) struct ScopeRecord(Mutex<Record>);

#[derive(Debug, Default)]
struct Record {
    saves: u64,
    scopes: HashMap<ScopeId, ScopeSaves>,
}

#[derive(Debug, Default)]
struct ScopeSaves {
    first: u64,
    last: u64,
    moved: Tally,
    kept: Tally,
}

impl ScopeRecord {
    pub(crate) fn add(&self, scope: ScopeId, bytes: u64, kept: bool) {
        let mut record = self.0.lock();
        record.saves += 1;
        let now = record.saves;
        let saves =
            record.scopes.entry(scope).or_insert_with(|| ScopeSaves { first: now, ..ScopeSaves::default() });
        saves.last = now;
        let tally = if kept { &mut saves.kept } else { &mut saves.moved };
        tally.count += 1;
        tally.bytes += bytes;
    }

    /// The scopes in the order of their last saves.
    pub(crate) fn in_order(&self) -> Vec<ScopeId> {
        let record = self.0.lock();
        let mut rows: Vec<_> = record.scopes.iter().map(|(id, saves)| (saves.last, *id)).collect();
        rows.sort_unstable();
        rows.into_iter().map(|(_, id)| id).collect()
    }

    /// One row per scope, in the order of first use.
    pub(crate) fn report(&self, scopes: &Scopes) -> Vec<ScopeReport> {
        let record = self.0.lock();
        let mut rows: Vec<_> = record.scopes.iter().collect();
        rows.sort_unstable_by_key(|(_, saves)| saves.first);
        rows.into_iter()
            .map(|(id, saves)| ScopeReport { scope: scopes.name(*id), moved: saves.moved, kept: saves.kept })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_scopes_have_joined_paths_and_stable_numbers() {
        let scopes = Scopes::default();
        let block = scopes.child(ScopeId::default(), "block.3");
        let mlp = scopes.child(block, "mlp");
        assert_eq!(scopes.name(mlp), "block.3/mlp");
        assert_eq!(scopes.child(block, "mlp"), mlp);
        assert_eq!(scopes.name(ScopeId::default()), "");
    }

    #[test]
    fn scopes_stand_in_the_order_of_their_last_saves() {
        let scopes = Scopes::default();
        let [a, b, c] = ["a", "b", "c"].map(|name| scopes.child(ScopeId::default(), name));
        let record = ScopeRecord::default();
        for scope in [a, b, c, a] {
            record.add(scope, 1, false);
        }
        assert_eq!(record.in_order(), [b, c, a]);
    }
}
