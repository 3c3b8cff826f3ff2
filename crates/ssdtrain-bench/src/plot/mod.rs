//! `plot`: a picture of earlier measurements.

use std::path::PathBuf;

use anyhow::Result;

use crate::common::drawing::DrawingArgs;
use crate::rok::{Record, RokPicture, parse_file};

/// Draw what rok has measured, without measuring
///
/// FILE is what `rok --out FILE` wrote; its sweep need not be complete.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, mut_arg("plot", |arg| arg.required(true)))]
pub(crate) struct Args {
    /// The file of a sweep, CSV or JSON
    #[arg(value_name = "FILE", value_parser = parse_file)]
    file: PathBuf,
    #[command(flatten)]
    drawing: DrawingArgs,
}

const EXAMPLES: &str = "\
Examples:
  ssdtrain-bench plot rok.csv --plot rok.svg --plot rok.png";

pub(crate) fn run(args: &Args) -> Result<()> {
    let record = Record::read(&args.file)?;
    args.drawing.draw(&RokPicture(&record))?.iter().for_each(|line| println!("{line}"));
    Ok(())
}
