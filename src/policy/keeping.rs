//! Which scopes keep their tensors on the device.

use std::collections::HashSet;

use super::paper::{Decision, Profile, Stay};
use crate::telemetry::{AdaptiveReport, ScopeId, Scopes};

/// The first step does work that later ones need not repeat, so the second is the first to be profiled.
const FIRST_PROFILED: u64 = 2;
/// If a profiled step shows nothing, the next one is profiled too, up to this one.
const LAST_PROFILED: u64 = 8;

/// Which scopes the next step keeps, learned from earlier ones.
#[derive(Debug)]
pub(crate) struct Keeping {
    rule: Rule,
    kept: HashSet<ScopeId>,
}

/// How the kept scopes are chosen.
#[derive(Clone, Debug)]
pub(crate) enum Rule {
    /// This many of those that saved last, chosen anew in each step.
    Last(usize),
    /// Those after the last scope that is worth moving, decided once.
    Paper { stay: Stay, decided: Option<(Profile, Decision)> },
}

impl Rule {
    /// The paper's rule, before anything is decided.
    pub(crate) fn paper(stay: Stay) -> Rule {
        Rule::Paper { stay, decided: None }
    }
}

impl Keeping {
    pub(crate) fn new(rule: Rule) -> Keeping {
        Keeping { rule, kept: HashSet::new() }
    }

    /// The scopes that are kept now.
    pub(crate) fn kept(&self) -> HashSet<ScopeId> {
        self.kept.clone()
    }

    /// Whether any step is to be profiled.
    pub(crate) fn may_profile(&self) -> bool {
        matches!(self.rule, Rule::Paper { .. })
    }

    /// Whether nothing remains to be decided.
    pub(crate) fn is_settled(&self) -> bool {
        !matches!(self.rule, Rule::Paper { decided: None, .. })
    }

    /// Whether this step is to be profiled.
    pub(crate) fn profiles(&self, step: u64) -> bool {
        matches!(self.rule, Rule::Paper { decided: None, .. })
            && (FIRST_PROFILED..=LAST_PROFILED).contains(&step)
    }

    /// A step has ended; `in_order` returns the scopes that saved something, in the order of their last saves.
    pub(crate) fn learn_last(&mut self, in_order: impl FnOnce() -> Vec<ScopeId>) {
        if let Rule::Last(scopes) = self.rule
            && scopes > 0
        {
            self.kept = in_order().into_iter().rev().take(scopes).collect();
        }
    }

    /// A step was profiled: decides by its profile.
    pub(crate) fn learn(&mut self, profile: Profile) {
        let Rule::Paper { stay, decided } = &mut self.rule else { return };
        let decision = profile.decide(*stay);
        self.kept = profile.modules[decision.offloaded..].iter().map(|module| module.scope).collect();
        *decided = Some((profile, decision));
    }

    /// The decision, once it is made.
    pub(crate) fn report(&self, scopes: &Scopes) -> Option<AdaptiveReport> {
        let Rule::Paper { decided: Some((profile, decision)), .. } = &self.rule else { return None };
        let last = decision.offloaded.checked_sub(1).map(|last| scopes.name(profile.modules[last].scope));
        Some(AdaptiveReport {
            scopes: profile.modules.len(),
            offloaded: decision.offloaded,
            last,
            required_bytes_per_s: decision.required,
            measured_bytes_per_s: profile.bandwidth,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::paper::Module;
    use super::*;

    fn ids<const N: usize>() -> [ScopeId; N] {
        let scopes = Scopes::default();
        std::array::from_fn(|index| scopes.child(ScopeId::default(), &index.to_string()))
    }

    #[test]
    fn the_last_scopes_of_the_step_before_are_kept() {
        let [a, b, c] = ids();
        let mut keeping = Keeping::new(Rule::Last(2));
        assert!(keeping.kept().is_empty());
        keeping.learn_last(|| vec![a, b, c]);
        assert_eq!(keeping.kept(), [b, c].into());
        keeping.learn_last(|| vec![b, c, a]);
        assert_eq!(keeping.kept(), [c, a].into());
    }

    #[test]
    fn steps_are_profiled_until_one_of_them_decides() {
        let [a, b] = ids();
        let mut keeping = Keeping::new(Rule::paper(Stay { modules: 0, bytes: u64::MAX }));
        assert_eq!([1, 2, 3, 9].map(|step| keeping.profiles(step)), [false, true, true, false]);
        let modules = [a, b].map(|scope| Module { scope, forward: Duration::from_secs(1), bytes: 100 });
        // The first has 2 + 2 s for 2 · 100 bytes, the second 2 s for 100 + 2 · 100.
        keeping.learn(Profile { modules: modules.into(), forward: Duration::from_secs(2), bandwidth: 60.0 });
        assert!(!keeping.profiles(3));
        assert_eq!(keeping.kept(), [b].into());
        keeping.learn_last(|| vec![a, b]);
        assert_eq!(keeping.kept(), [b].into());
    }
}
