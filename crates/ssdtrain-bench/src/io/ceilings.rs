//! What each path between device, host and disk can carry, alone and together with the others.

use std::sync::Arc;

use anyhow::{Context, Result};
use serde::Serialize;

use super::raw::{Mode, RawFiles};
use super::raw_gpu::{Direction, RawCopies};
use crate::common::gpu::Gpu;
use crate::common::stats::median;
use crate::common::{size, table};

/// The ceilings of one GPU and of the disks beside it.
pub(crate) struct Ceilings {
    copies: RawCopies,
    size: u64,
    samples: [Vec<Rates>; Load::ALL.len()],
}

/// Which transfers are measured at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Load {
    CopyOut,
    CopyIn,
    CopyBoth,
    /// Both copies, with writes and reads alternating.
    All,
}

/// Bytes per second of each path that is in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Rates {
    pub(crate) out_bytes_per_s: Option<f64>,
    pub(crate) in_bytes_per_s: Option<f64>,
    pub(crate) write_bytes_per_s: Option<f64>,
    pub(crate) read_bytes_per_s: Option<f64>,
}

impl Load {
    pub(crate) const ALL: [Load; 4] = [Load::CopyOut, Load::CopyIn, Load::CopyBoth, Load::All];

    fn name(self) -> &'static str {
        match self {
            Load::CopyOut => "copies out",
            Load::CopyIn => "copies in",
            Load::CopyBoth => "copies, both at once",
            Load::All => "everything at once",
        }
    }
}

impl Ceilings {
    /// Prepares passes of `size` bytes in copies of `copy_bytes`, with `depth` of them in flight at once in each
    /// direction.
    pub(crate) fn create(gpu: &Arc<Gpu>, size: u64, copy_bytes: u64, depth: usize) -> Result<Ceilings> {
        let copies = RawCopies::create(gpu, usize::try_from(copy_bytes)?, depth)
            .context("the memory for --copy-bytes and --copy-depth")?;
        Ok(Ceilings { copies, size, samples: Default::default() })
    }

    /// Measures each load once. The load of everything at once lasts as long as the disks take for a pass.
    pub(crate) fn measure(&mut self, raw: &mut RawFiles) -> Result<()> {
        for (load, samples) in Load::ALL.into_iter().zip(&mut self.samples) {
            samples.push(sample(&self.copies, self.size, load, raw)?);
        }
        Ok(())
    }

    /// The medians.
    pub(crate) fn rates(&self) -> impl Iterator<Item = (Load, Rates)> {
        Load::ALL.into_iter().zip(self.samples.iter().map(|samples| medians(samples)))
    }
}

fn sample(copies: &RawCopies, size: u64, load: Load, raw: &mut RawFiles) -> Result<Rates> {
    Ok(match load {
        Load::CopyOut => {
            Rates { out_bytes_per_s: Some(copies.alone(Direction::Out, size)?), ..Rates::default() }
        }
        Load::CopyIn => {
            Rates { in_bytes_per_s: Some(copies.alone(Direction::In, size)?), ..Rates::default() }
        }
        Load::CopyBoth => {
            let [out, back] = copies.both(size)?;
            Rates { out_bytes_per_s: Some(out), in_bytes_per_s: Some(back), ..Rates::default() }
        }
        Load::All => {
            let (pass, [out, back]) = copies.beside(|| raw.pass(Mode::Both))?;
            let disks = Rates::of_disks(raw, Mode::Both, pass?.as_secs_f64());
            Rates { out_bytes_per_s: Some(out), in_bytes_per_s: Some(back), ..disks }
        }
    })
}

impl Rates {
    /// The rates of a pass over the files that took so many seconds.
    pub(crate) fn of_disks(raw: &RawFiles, mode: Mode, seconds: f64) -> Rates {
        let [written, read] = raw.moved(mode).map(|bytes| (bytes > 0).then(|| bytes as f64 / seconds));
        Rates { write_bytes_per_s: written, read_bytes_per_s: read, ..Rates::default() }
    }
}

fn medians(samples: &[Rates]) -> Rates {
    let of = |rate: fn(&Rates) -> Option<f64>| {
        let rates: Vec<_> = samples.iter().filter_map(rate).collect();
        (!rates.is_empty()).then(|| median(&rates))
    };
    Rates {
        out_bytes_per_s: of(|rates| rates.out_bytes_per_s),
        in_bytes_per_s: of(|rates| rates.in_bytes_per_s),
        write_bytes_per_s: of(|rates| rates.write_bytes_per_s),
        read_bytes_per_s: of(|rates| rates.read_bytes_per_s),
    }
}

/// One row per load and one column per path; the loads of the disks follow those of the copies.
pub(crate) fn render(copies: impl Iterator<Item = (Load, Rates)>, disks: &[(Mode, Rates)]) -> String {
    let shown = |rate: Option<f64>| {
        rate.map_or_else(String::new, |bytes_per_s| format!("{}/s", size::format(bytes_per_s as u64)))
    };
    let row = |name: &str, rates: Rates| {
        [
            name.to_owned(),
            shown(rates.out_bytes_per_s),
            shown(rates.in_bytes_per_s),
            shown(rates.write_bytes_per_s),
            shown(rates.read_bytes_per_s),
        ]
    };
    let (all, copies): (Vec<_>, Vec<_>) = copies.partition(|(load, _)| *load == Load::All);
    let named = |(load, rates): (Load, Rates)| row(load.name(), rates);
    let disks = disks.iter().map(|(mode, rates)| row(&format!("disk, {}", mode.name()), *rates));
    table::render(
        ["ceilings", "device -> host", "host -> device", "host -> disk", "disk -> host"],
        copies.into_iter().map(named).chain(disks).chain(all.into_iter().map(named)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_has_the_median_of_where_it_was_in_use() {
        let sample =
            |out, write| Rates { out_bytes_per_s: Some(out), write_bytes_per_s: write, ..Rates::default() };
        let rates = medians(&[sample(3.0, None), sample(1.0, Some(5.0)), sample(2.0, Some(5.0))]);
        assert_eq!(rates, sample(2.0, Some(5.0)));
        assert_eq!(medians(&[]), Rates::default());
    }

    #[test]
    fn a_row_shows_the_rates_of_its_load_alone() {
        let gib = f64::from(1 << 30);
        let out = Rates { out_bytes_per_s: Some(50.0 * gib), ..Rates::default() };
        let write = Rates { write_bytes_per_s: Some(2.0 * gib), ..Rates::default() };
        let all = Rates {
            out_bytes_per_s: Some(48.0 * gib),
            in_bytes_per_s: Some(47.0 * gib),
            write_bytes_per_s: Some(gib),
            read_bytes_per_s: Some(gib),
        };
        let table = render([(Load::CopyOut, out), (Load::All, all)].into_iter(), &[(Mode::Write, write)]);
        let cells: Vec<Vec<_>> =
            table.lines().skip(2).map(|line| line.split('|').map(str::trim).collect()).collect();
        assert_eq!(cells[0], ["", "copies out", "50.0 GiB/s", "", "", "", ""]);
        assert_eq!(cells[1], ["", "disk, write", "", "", "2.0 GiB/s", "", ""]);
        assert_eq!(
            cells[2],
            ["", "everything at once", "48.0 GiB/s", "47.0 GiB/s", "1.0 GiB/s", "1.0 GiB/s", ""]
        );
    }
}
