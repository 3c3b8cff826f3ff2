//! The text format of Prometheus.

use std::fmt::Write;

use ssdtrain::Metrics;

use super::families::{FAMILIES, Sample, Value};

/// The content type of [`text`].
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The metrics of caches in the text format of Prometheus, version 0.0.4, each cache under its name as the label `cache`. The names must
/// differ. A metric that no cache has is left out.
pub fn text(caches: &[(&str, &Metrics)]) -> String {
    let mut text = String::new();
    for family in FAMILIES {
        let samples = caches.iter().flat_map(|(name, metrics)| {
            let labelled = family.samples(metrics).into_iter();
            labelled.map(move |sample| line(family.name, name, &sample))
        });
        let samples: String = samples.collect();
        if !samples.is_empty() {
            let (name, help, kind) = (family.name, family.help, family.kind);
            // A `String` takes whatever is written to it.
            _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{samples}");
        }
    }
    text
}

fn line(name: &str, cache: &str, Sample { label, value }: &Sample) -> String {
    let cache = escaped(cache);
    let label = label.map(|(name, value)| format!(",{name}=\"{value}\"")).unwrap_or_default();
    let value = match value {
        Value::Integer(value) => value.to_string(),
        Value::Time(time) => time.as_secs_f64().to_string(),
    };
    format!("{name}{{cache=\"{cache}\"{label}}} {value}\n")
}

/// A label's value, as it stands between quotes.
fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_a_metric_stand_together_each_under_its_cache() {
        let mut metrics = [(); 2].map(|()| Metrics::default());
        metrics[1].device_bytes = u64::MAX;
        let text = text(&[("a", &metrics[0]), ("b\"\\\n", &metrics[1])]);
        let lines: Vec<_> = text.lines().collect();
        let place =
            lines.iter().position(|line| line.starts_with("# HELP ssdtrain_activation_bytes ")).unwrap();
        assert_eq!(
            lines[place + 1..place + 4],
            [
                "# TYPE ssdtrain_activation_bytes gauge",
                "ssdtrain_activation_bytes{cache=\"a\",tier=\"device\"} 0",
                "ssdtrain_activation_bytes{cache=\"b\\\"\\\\\\n\",tier=\"device\"} 18446744073709551615",
            ]
        );
    }

    #[test]
    fn what_no_cache_has_is_left_out() {
        let text = text(&[("a", &Metrics::default())]);
        assert!(!text.contains("ssdtrain_disk_") && text.contains("ssdtrain_steps_total"), "{text}");
    }
}
