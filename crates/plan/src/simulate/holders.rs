//! What is on the device at the peak.

use std::time::Duration;

use super::{At, Bounds, Run};
use crate::graph::Graph;
use crate::reruns::Reruns;
use crate::{Budgets, Holder, Holding, Machine, Moment, Peak, Placement, Sample, Workload};

/// Waits for the moment when this many bytes are on the device.
#[derive(Debug)]
pub(super) struct Watch {
    bytes: u64,
    seen: Option<Peak>,
}

/// Simulates the step up to its peak, which a first simulation finds.
pub(crate) fn peak(
    work: &Workload,
    graph: &Graph,
    placements: &[Placement],
    reruns: &Reruns,
    machine: &Machine,
    budgets: &Budgets,
) -> Peak {
    let Bounds { peak, step, .. } = Bounds::NONE;
    let mut first = Run::new(work, placements, reruns, machine, budgets);
    first.through(work, peak, step);
    let mut again = Run::new(work, placements, reruns, machine, budgets);
    again.watch = Some(Watch { bytes: first.prediction.peak(), seen: None });
    again.through(work, peak, step);
    let mut peak = again.watch.and_then(|watch| watch.seen).unwrap_or_default();
    let computed = match peak.moment {
        Moment::Forward(_) | Moment::Turn => Vec::new(),
        Moment::Rerun(asked) => reruns.widest(&work.activations, graph, asked),
        Moment::Backward(asked) => reruns.here(&work.activations, graph, asked),
    };
    let computed = computed.into_iter().map(|activation| Holder { activation, holding: Holding::Recomputed });
    peak.holders.extend(computed);
    peak.holders.sort_by_key(|holder| holder.activation);
    peak
}

/// Simulates the step, and tells what is on the device at each moment.
pub(crate) fn samples(
    work: &Workload,
    placements: &[Placement],
    reruns: &Reruns,
    machine: &Machine,
    budgets: &Budgets,
) -> Vec<Sample> {
    let Bounds { peak, step, .. } = Bounds::NONE;
    let mut run = Run::new(work, placements, reruns, machine, budgets);
    run.samples = Some(Vec::new());
    run.through(work, peak, step);
    run.samples.unwrap_or_default()
}

impl Run<'_> {
    /// Notes that `bytes` are on the device, `extra` of them besides activations.
    pub(super) fn note_bytes(&mut self, moment: Moment, bytes: u64, extra: u64) {
        let highest = match moment {
            Moment::Forward(_) => &mut self.prediction.forward_peak,
            Moment::Turn | Moment::Rerun(_) | Moment::Backward(_) => &mut self.prediction.backward_peak,
        };
        *highest = bytes.max(*highest);
        if self.samples.is_some() {
            let sample = self.sample(moment, bytes, extra);
            self.samples.iter_mut().for_each(|samples| samples.push(sample));
        }
        if self.watch.as_ref().is_some_and(|watch| watch.bytes == bytes && watch.seen.is_none()) {
            let seen = Some(Peak { moment, bytes, extra, holders: self.holders(moment) });
            self.watch = Some(Watch { bytes, seen });
        }
    }

    fn sample(&self, moment: Moment, bytes: u64, extra: u64) -> Sample {
        let at = Duration::from_secs_f64(self.now);
        let mut sample = Sample { moment, at, bytes, extra, kept: 0, moving: 0 };
        for (index, place) in self.places.iter().enumerate() {
            let bytes = self.activations[index].bytes;
            match place.at {
                At::Nowhere | At::Below => {}
                At::Device if self.placement(index) == Placement::Keep => sample.kept += bytes,
                At::Device | At::Loading(_) => sample.moving += bytes,
            }
        }
        sample
    }

    /// What is on the device, without what was computed again before.
    fn holders(&self, moment: Moment) -> Vec<Holder> {
        let (still, now) = match moment {
            Moment::Forward(index) => (&self.in_use, Some(index)),
            Moment::Turn | Moment::Rerun(_) => (&self.used, None),
            Moment::Backward(index) => (&self.used, Some(index)),
        };
        let in_use = still.iter().copied().chain(now);
        let in_use = in_use.map(|activation| Holder { activation, holding: Holding::InUse });
        let places = self.places.iter().enumerate().filter(|(index, _)| Some(*index) != now);
        let stored = places.filter_map(|(activation, place)| {
            let holding = match place.at {
                At::Nowhere | At::Below => return None,
                At::Loading(_) => Holding::Loaded,
                At::Device if self.placement(activation) == Placement::Keep => Holding::Kept,
                At::Device => Holding::Leaving,
            };
            Some(Holder { activation, holding })
        });
        in_use.chain(stored).collect()
    }
}
