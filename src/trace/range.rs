//! A named part of what a thread does.

use std::sync::Arc;
use std::time::Instant;

use ssdtrain_libtorch as torch;

use super::{Moment, Name, Span, Trace, Track, thread_number};

/// A named part of what the calling thread does, and of what the device does for it, until this is dropped. It appears in the trace, if
/// there is one, and in NVIDIA's tools.
pub(crate) struct Range {
    begun: Option<Begun>,
    _shown: Option<torch::Range>,
}

struct Begun {
    trace: Arc<Trace>,
    name: Name,
    from: Instant,
    device: Option<Moment>,
}

impl Range {
    /// `shown` is its name in NVIDIA's tools; `None` if they show it already.
    pub(crate) fn open<'a>(
        trace: Option<Arc<Trace>>,
        name: Name,
        shown: impl Into<Option<&'a str>>,
    ) -> Range {
        let begun = trace.map(|trace| {
            let device = if name.computes() { trace.compute() } else { None };
            Begun { name, from: Instant::now(), device, trace }
        });
        Range { begun, _shown: shown.into().and_then(torch::range) }
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        let Some(Begun { trace, name, from, device }) = self.begun.take() else { return };
        trace.record(Span::on_host(Track::Thread(thread_number()), name, from, Instant::now(), None));
        if let Some((from, to)) = device.and_then(|from| Some((from, trace.compute()?))) {
            let track = Track::Device(crate::device::Lane::Compute);
            trace.record(Span { track, name, from, to, bytes: None });
        }
    }
}

impl Name {
    /// Whether the device computes in the meantime.
    fn computes(self) -> bool {
        matches!(self, Name::Step(_) | Name::Backward | Name::Scope(_))
    }
}
