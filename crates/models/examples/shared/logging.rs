//! What the library tells while a program runs.

use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Prints what `RUST_LOG` asks for to the standard error, as `ssdtrain-bench` does.
pub(crate) fn start() -> Result<(), String> {
    if let Ok(shown) = std::env::var("RUST_LOG") {
        let shown: Targets = shown.parse().map_err(|error| format!("RUST_LOG: {error}"))?;
        let printed = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false);
        tracing_subscriber::registry().with(shown).with(printed).init();
    }
    Ok(())
}
