//! Trains, compares and measures with ssdtrain from the command line.
//!
//! Each command has a folder of its own; what several of them share is in `common`.

mod command_line;
mod common;
mod compare;
mod doctor;
mod io;
mod plan;
mod plot;
mod project;
mod rok;
mod train;

pub use command_line::main;
