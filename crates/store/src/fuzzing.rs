//! What fuzz targets reach of the books of space and of readers, which nobody else sees.

pub use crate::control_groups::read_texts as read_control_groups;
pub use crate::extent::model::{SpaceStep, compare as compare_space};
pub use crate::history_file::read_bytes as read_history;
pub use crate::mem::{RunsStep, compare_runs};
