//! The file of a sweep: its settings and points, as CSV or JSON. It is rewritten after each micro-batch size, so that
//! an interrupted sweep continues where it stopped.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::point::Point;
use crate::common::file::replace;

/// What a sweep has measured so far. In a CSV file everything except the points is on the first line, as a comment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// What was measured, in words.
    pub(crate) title: String,
    pub(crate) settings: Settings,
    /// By micro-batch size; points of the same size are in the order of measurement. Not in a CSV file's first line.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) points: Vec<Point>,
}

/// Everything, by name, that points must have in common to be on one curve.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Settings(BTreeMap<String, String>);

/// A file name that ends in `.csv` or `.json`; for clap.
pub(crate) fn parse_file(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("csv" | "json") => Ok(path),
        _ => Err("give a file whose name ends in .csv or .json".to_owned()),
    }
}

impl Record {
    /// A new sweep, or the continuation of the one in the file `path`.
    ///
    /// # Errors
    /// If the file exists and is not a sweep's, or belongs to a sweep with other settings.
    pub(crate) fn resume(path: &Path, title: String, settings: Settings) -> Result<Record> {
        if !path.try_exists().with_context(|| format!("cannot look for {}", path.display()))? {
            return Ok(Record::new(title, settings));
        }
        let advice = "give another --out, or --fresh to measure all of it anew";
        let record =
            Record::read(path).with_context(|| format!("--out goes on from what is there: {advice}"))?;
        let differences = record.settings.differences(&settings);
        ensure!(
            differences.is_empty(),
            "{} was measured with other settings: {}; {advice}",
            path.display(),
            differences.join(", ")
        );
        Ok(record)
    }

    /// A record without points.
    pub(crate) fn new(title: String, settings: Settings) -> Record {
        Record { title, settings, points: Vec::new() }
    }

    /// # Errors
    /// If the file cannot be read, or is not a sweep's.
    pub(crate) fn read(path: &Path) -> Result<Record> {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let record =
            if is_json(path) { serde_json::from_str(&text).map_err(Into::into) } else { from_csv(&text) };
        record.with_context(|| format!("{} is not a file of `rok`", path.display()))
    }

    /// Replaces the file atomically: whenever the program ends, the file has either the old contents or the new.
    ///
    /// # Errors
    /// If that is not possible.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let text = if is_json(path) { serde_json::to_string_pretty(self)? + "\n" } else { self.to_csv()? };
        replace(path, &text)
    }

    /// The point of a strategy at a micro-batch size.
    pub(crate) fn point(&self, micro_batch: usize, strategy: &str) -> Option<&Point> {
        self.points.iter().find(|point| point.micro_batch == micro_batch && point.strategy == strategy)
    }

    /// Adds the points that it does not have yet.
    pub(crate) fn add(&mut self, points: impl IntoIterator<Item = Point>) {
        self.points.extend(points);
        self.points.sort_by_key(|point| point.micro_batch);
    }

    fn to_csv(&self) -> Result<String> {
        let head = Record::new(self.title.clone(), self.settings.clone());
        let mut writer = csv::Writer::from_writer(Vec::new());
        self.points.iter().try_for_each(|point| writer.serialize(point))?;
        let body = String::from_utf8(writer.into_inner()?)?;
        Ok(format!("# {}\n{body}", serde_json::to_string(&head)?))
    }
}

fn from_csv(text: &str) -> Result<Record> {
    let (first, body) = text.split_once('\n').unwrap_or((text, ""));
    let head = first.strip_prefix("# ").context("its first line is not a comment with the settings")?;
    let mut record: Record = serde_json::from_str(head)?;
    record.points = csv::Reader::from_reader(body.as_bytes()).deserialize().collect::<Result<_, _>>()?;
    Ok(record)
}

fn is_json(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "json")
}

impl Settings {
    /// The settings in `object`; nested ones get names such as `model.layers`. Null values are left out.
    ///
    /// # Errors
    /// If something in it has no form in JSON, such as a path that is not text.
    pub(crate) fn of(object: &impl Serialize) -> Result<Settings> {
        let mut settings = Settings::default();
        let value = serde_json::to_value(object)
            .context("rok saves its settings as text, so --data and --spill-dir must be valid UTF-8")?;
        settings.insert("", value);
        Ok(settings)
    }

    fn insert(&mut self, name: &str, value: Value) {
        let text = match value {
            Value::Object(parts) => {
                let dot = if name.is_empty() { "" } else { "." };
                return parts
                    .into_iter()
                    .for_each(|(part, value)| self.insert(&format!("{name}{dot}{part}"), value));
            }
            Value::Null => return,
            Value::String(text) => text,
            other => other.to_string(),
        };
        self.0.insert(name.to_owned(), text);
    }

    /// The differences from `now`, in words.
    fn differences(&self, now: &Settings) -> Vec<String> {
        let mut names: Vec<_> = self.0.keys().chain(now.0.keys()).collect();
        names.sort_unstable();
        names.dedup();
        let shown =
            |settings: &Settings, name| settings.0.get(name).cloned().unwrap_or_else(|| "not set".to_owned());
        let differing = names.into_iter().filter(|&name| self.0.get(name) != now.0.get(name));
        differing
            .map(|name| format!("{name} ({} there, {} here)", shown(self, name), shown(now, name)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::point::tests::point;
    use super::*;

    fn settings(steps: u32) -> Settings {
        let spill: Option<&str> = None;
        Settings::of(&json!({ "steps": steps, "model": { "layers": 2, "dropout": 0.1 }, "spill": spill }))
            .unwrap()
    }

    fn record() -> Record {
        let mut record = Record::new("2 layers, \"odd\"".to_owned(), settings(3));
        record.add([point(4, "offload", 1 << 40, 0.1 + 0.2), point(2, "keep", 7, 1e-9)]);
        record.add([Point::failed(4, "keep", "out of memory: \"9\" bytes, # not there".to_owned())]);
        record
    }

    #[test]
    fn a_file_has_what_was_written() {
        let place = tempfile::tempdir().unwrap();
        for name in ["a.csv", "a.json"] {
            let path = place.path().join(name);
            for record in [Record::new("nothing yet".to_owned(), settings(1)), record()] {
                record.write(&path).unwrap();
                assert_eq!(Record::read(&path).unwrap(), record, "{name}");
            }
        }
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 2, "no temporary file is left behind");
    }

    #[test]
    fn points_are_in_the_order_of_their_sizes_and_are_found() {
        let record = record();
        let order: Vec<_> =
            record.points.iter().map(|point| (point.micro_batch, point.strategy.as_str())).collect();
        assert_eq!(order, [(2, "keep"), (4, "offload"), (4, "keep")]);
        assert!(record.point(4, "keep").is_some_and(|point| point.failed.is_some()));
        assert!(record.point(2, "offload").is_none());
    }

    #[test]
    fn a_sweep_goes_on_with_the_same_settings_only() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("a.csv");
        let resume = |settings| Record::resume(&path, String::new(), settings);
        assert!(resume(settings(3)).unwrap().points.is_empty(), "there is no file yet");
        record().write(&path).unwrap();
        assert_eq!(resume(settings(3)).unwrap(), record());
        let error = resume(settings(4)).unwrap_err().to_string();
        for part in ["a.csv", "steps (3 there, 4 here)", "--out", "--fresh"] {
            assert!(error.contains(part), "{error}");
        }
        assert!(!error.contains("layers"), "{error}");
    }

    #[test]
    fn what_is_not_set_differs_from_what_is() {
        let (without, with) = (json!({ "budget": null }), json!({ "budget": 3 }));
        let differences = Settings::of(&without).unwrap().differences(&Settings::of(&with).unwrap());
        assert_eq!(differences, ["budget (not set there, 3 here)"]);
    }

    #[test]
    fn other_files_are_told_apart_and_named() {
        let place = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("a.csv", "x,y\n1,2\n"),
            ("b.csv", "# {\"title\":\"\",\"settings\":{}}\nx\n1\n"),
            ("c.json", "{}"),
            ("d.csv", ""),
        ] {
            let path = place.path().join(name);
            fs::write(&path, text).unwrap();
            let error = format!("{:#}", Record::read(&path).unwrap_err());
            assert!(error.contains(name) && error.contains("`rok`"), "{error}");
        }
        assert!(
            parse_file("a.csv").is_ok() && parse_file("b/a.json").is_ok() && parse_file("a.txt").is_err()
        );
        assert!(
            record().write(Path::new("/nowhere/a.csv")).unwrap_err().to_string().contains("/nowhere/a.csv")
        );
    }
}
