//! From the notes of a step to what it computes. Pure.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::Alive;
use crate::plan::{Entry, Recompute, Workload};
use crate::telemetry::ScopeId;
use crate::trace::{Moves, Reached};

/// One save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Save {
    /// The entry's number in the cache. Saved again, it has the same.
    pub(crate) entry: u64,
    pub(crate) bytes: u64,
    pub(crate) scope: ScopeId,
}

/// What was noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Note {
    Saved(Save),
    Asked(u64),
    /// The first backward was over.
    Ended,
}

/// A note, when the device had come to it, and the memory around it.
#[derive(Debug)]
pub(super) struct Notes {
    pub(super) note: Note,
    /// When the device had come to where it was waited for.
    pub(super) before: Option<Reached>,
    pub(super) reached: Reached,
    /// Most allocated bytes since the note before it, those at the step's beginning left out.
    pub(super) peak: u64,
    /// What of saved storages was on the device when it was done with.
    pub(super) alive: Alive,
    /// If it was saved with a recipe: the time of that, and the note of its first input.
    pub(super) recipe: Option<(Duration, usize)>,
}

/// All notes of a step.
pub(super) struct Step {
    pub(super) begun: Reached,
    pub(super) notes: Vec<Notes>,
    pub(super) rest: Duration,
    pub(super) moves: Moves,
}

/// What a step showed.
#[derive(Clone, Debug)]
pub(crate) struct Profile {
    /// One micro-batch, and its share of the rest of the step.
    pub(crate) work: Workload,
    /// Its saves in their order, and the entry of each by its place in the workload.
    pub(crate) saves: Vec<(Save, usize)>,
    pub(crate) micro_batches: u32,
    pub(crate) moves: Moves,
}

impl Step {
    /// None if nothing was saved, or there was no backward.
    pub(super) fn profile(self, micro_batches: u32) -> Option<Profile> {
        let stalls = self.stalls();
        let mut entries: Vec<Entry> = Vec::new();
        let mut places: HashMap<u64, usize> = HashMap::new();
        let mut saves = Vec::new();
        let (mut turn, mut turn_extra) = (Duration::ZERO, 0);
        // What the time and the memory up to the next note belong to.
        let mut asked: Option<usize> = None;
        let (mut since, mut held, mut lasted, mut most) = (self.begun.at, 0, Duration::ZERO, 0);
        for (index, notes) in self.notes.iter().enumerate() {
            let Notes { note, reached, peak, recipe, .. } = *notes;
            lasted += computed(since, reached.at, &stalls);
            most = most.max(peak.saturating_sub(held));
            (since, held) = (reached.at, notes.alive.bytes);
            match note {
                Note::Saved(save) => {
                    let place = entries.len();
                    let known = *places.entry(save.entry).or_insert(place);
                    saves.push((save, known));
                    // The next entry, which is computed while what is in use now still is.
                    let next = place + usize::from(known == place);
                    let in_use = notes.alive.in_use.iter().filter_map(|other| places.get(other));
                    in_use
                        .filter(|other| **other < place)
                        .for_each(|other| entries[*other].in_use_until = next);
                    if known < place {
                        continue;
                    }
                    let since = recipe.and_then(|(_, input)| self.saved_at(input, index, &places));
                    entries.push(Entry {
                        bytes: save.bytes,
                        forward: lasted,
                        forward_extra: most.saturating_sub(save.bytes),
                        recompute: recipe.map(|(time, _)| Recompute { time, since: since.unwrap_or(place) }),
                        in_use_until: next,
                        ..Entry::default()
                    });
                }
                Note::Asked(entry) => {
                    let Some(&place) = places.get(&entry).filter(|&&place| asked != Some(place)) else {
                        continue;
                    };
                    match asked {
                        Some(before) => add(&mut entries[before], lasted, most),
                        None => (turn, turn_extra) = (lasted, most),
                    }
                    asked = Some(place);
                }
                Note::Ended => {
                    if let Some(last) = asked {
                        add(&mut entries[last], lasted, most);
                    }
                }
            }
            (lasted, most) = (Duration::ZERO, 0);
        }
        asked?;
        let work = Workload { entries, turn, turn_extra, rest: self.rest };
        Some(Profile { work, saves, micro_batches, moves: self.moves })
    }

    /// The entry that was saved at `input`, if it was before `index`.
    fn saved_at(&self, input: usize, index: usize, places: &HashMap<u64, usize>) -> Option<usize> {
        match self.notes[..index].get(input)?.note {
            Note::Saved(save) => places.get(&save.entry).copied(),
            Note::Asked(_) | Note::Ended => None,
        }
    }

    /// When the device, or else the thread, did nothing but wait. The device still computes what it was given before the thread
    /// began to.
    fn stalls(&self) -> Vec<(Instant, Instant)> {
        let Moves { device_stalls, host_stalls, .. } = &self.moves;
        let points: Vec<Reached> =
            self.notes.iter().flat_map(|notes| notes.before.into_iter().chain([notes.reached])).collect();
        let idle = host_stalls.iter().filter_map(|&(from, to)| {
            let before = points.partition_point(|point| point.host <= from);
            let busy = points[..before].last().map_or(from, |point| point.at.max(from));
            (busy < to).then_some((busy, to))
        });
        let mut stalls: Vec<_> = device_stalls.iter().copied().chain(idle).collect();
        stalls.sort_unstable();
        let mut apart: Vec<(Instant, Instant)> = Vec::new();
        for (from, to) in stalls {
            match apart.last_mut().filter(|(_, until)| from <= *until) {
                Some((_, until)) => *until = to.max(*until),
                None => apart.push((from, to)),
            }
        }
        apart
    }
}

fn add(entry: &mut Entry, lasted: Duration, most: u64) {
    entry.backward += lasted;
    entry.backward_extra = entry.backward_extra.max(most);
}

/// Time from one instant to another outside of the stalls, which are in order and apart.
fn computed(from: Instant, to: Instant, stalls: &[(Instant, Instant)]) -> Duration {
    let first = stalls.partition_point(|(_, until)| *until <= from);
    let waited = stalls[first..].iter().take_while(|(begin, _)| *begin < to);
    let waited: Duration = waited.map(|(begin, end)| (*end).min(to) - (*begin).max(from)).sum();
    to.saturating_duration_since(from).saturating_sub(waited)
}
