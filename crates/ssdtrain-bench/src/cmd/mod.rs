//! The subcommands, one per file.

pub(crate) mod compare;
pub(crate) mod doctor;
pub(crate) mod io;
pub(crate) mod plan;
pub(crate) mod plot;
pub(crate) mod project;
pub(crate) mod rok;
pub(crate) mod train;
