//! `plot`: a picture of what was measured before.

use std::path::PathBuf;

use anyhow::Result;

use crate::common::drawing;
use crate::rok::{Record, RokPicture, parse_file};

/// Draw what rok has measured, without measuring
///
/// FILE is what `rok --out FILE` wrote; its sweep need not be complete.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The file of a sweep, CSV or JSON
    #[arg(value_name = "FILE", value_parser = parse_file)]
    file: PathBuf,
    /// Draw into OUT, an SVG or a PNG; repeat it for more
    #[arg(long, value_name = "OUT", required = true, num_args = 1.., value_parser = drawing::parse_file)]
    plot: Vec<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  ssdtrain-bench plot rok.csv --plot rok.svg --plot rok.png";

pub(crate) fn run(args: &Args) -> Result<()> {
    let record = Record::read(&args.file)?;
    for path in &args.plot {
        drawing::write(path, &RokPicture(&record))?;
        println!("plot   {}", path.display());
    }
    Ok(())
}
