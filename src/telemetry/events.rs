//! What `tracing` events have in common; docs/watching.md lists them.

/// Begins and ends of steps.
pub(crate) const STEP: &str = "ssdtrain::step";
/// What becomes of plans.
pub(crate) const PLAN: &str = "ssdtrain::plan";
/// Single stores, loads and reruns.
pub(crate) const TRANSFER: &str = "ssdtrain::transfer";

/// As `tracing::warn!` the first time in this process, and later as `tracing::debug!`: what fails once may fail in every step.
macro_rules! warn_once {
    ($($event:tt)*) => {{
        static TOLD: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
        if TOLD.swap(true, std::sync::atomic::Ordering::Relaxed) {
            tracing::debug!($($event)*);
        } else {
            tracing::warn!($($event)*);
        }
    }};
}

pub(crate) use warn_once;
