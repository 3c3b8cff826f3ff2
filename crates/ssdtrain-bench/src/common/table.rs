//! Tables for people and lines for programs.

use anyhow::Result;
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use serde::Serialize;

use super::output::print;

/// The argument that says what a command prints.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct OutputArgs {
    /// Print JSON instead of text: one object on each line, with the fields that are told below
    #[arg(long)]
    pub(crate) json: bool,
}

/// The argument that has a plan explained.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct ExplainArgs {
    /// Print auto's plan: what goes where, by scope, and what it counts on; which operations are computed again, for how many bytes and
    /// how much time; and who holds the peak
    #[arg(long)]
    pub(crate) explain: bool,
}

/// A table with the first column to the left and numbers to the right.
pub(crate) fn render<const N: usize>(
    header: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header);
    for row in rows {
        table.add_row(row);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// Prints one JSON object on one line.
pub(crate) fn print_json(object: &impl Serialize) -> Result<()> {
    print(&serde_json::to_string(object)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_flush_right() {
        let table =
            render(["name", "n"], [["a".to_owned(), "1".to_owned()], ["b".to_owned(), "100".to_owned()]]);
        assert!(table.lines().any(|line| line == "| a    |   1 |"), "{table}");
    }
}
