//! What a policy's instructions mean for each save: pure functions of what is known. The policies themselves are in `ssdtrain-plan`.

mod cursor;
mod decision;

pub(crate) use self::cursor::{Cursor, Placed};
pub(crate) use self::decision::{
    Decision, Facts, Instruction, KeepReason, Place, Recipes, Segments, decide, segments, stays, unplanned,
};
