//! The parts of a model.

/// A scope of the model, as a number; 0 is outside every scope. Numbers stay the same for as long as a cache lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ScopeId(pub u32);
