//! Names for the parts of a step, and what each part saved.

use std::collections::HashMap;

use ssdtrain_store::sync::Mutex;

use ssdtrain_plan::{ScopeId, Tally};

use super::report::ScopeReport;

/// Every scope path a cache has seen. Paths of nested scopes are joined by `/`.
#[derive(Debug, Default)]
pub(crate) struct Scopes(Mutex<Paths>);

#[derive(Debug, Default)]
struct Paths {
    children: HashMap<ScopeId, HashMap<Box<str>, ScopeId>>,
    /// Each scope by its path, without the root.
    by_path: HashMap<String, ScopeId>,
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
        let id = paths.at(path);
        paths.children.entry(parent).or_default().insert(name.into(), id);
        id
    }

    /// The scope with this path.
    pub(crate) fn at(&self, path: &str) -> ScopeId {
        self.0.lock().at(path.to_owned())
    }

    /// The path of a scope; empty for the root.
    pub(crate) fn name(&self, id: ScopeId) -> String {
        self.0.lock().name(id).to_owned()
    }
}

impl Paths {
    fn at(&mut self, path: String) -> ScopeId {
        if path.is_empty() {
            return ScopeId::default();
        }
        if let Some(&known) = self.by_path.get(&path) {
            return known;
        }
        self.names.push(path.clone());
        // Four billion scopes do not fit in memory.
        let id = ScopeId(u32::try_from(self.names.len()).unwrap_or(u32::MAX));
        self.by_path.insert(path, id);
        id
    }

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
    fn a_scope_is_known_by_its_path_before_it_is_entered() {
        let scopes = Scopes::default();
        let mlp = scopes.at("block.3/mlp");
        let block = scopes.child(ScopeId::default(), "block.3");
        assert_eq!((scopes.child(block, "mlp"), scopes.at("block.3")), (mlp, block));
        assert_eq!((scopes.name(mlp), scopes.at("")), ("block.3/mlp".to_owned(), ScopeId::default()));
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
