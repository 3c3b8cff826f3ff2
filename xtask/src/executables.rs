//! The executables that a cargo command builds.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use crate::process;

/// Runs `build`, a cargo command that builds, and returns the executables of its targets of this kind: "bin" or "test".
pub(crate) fn build(build: &mut Command, kind: &str) -> Result<Vec<PathBuf>> {
    let messages = process::output(build.arg("--message-format=json-render-diagnostics"))?;
    Ok(executables(&messages, kind))
}

/// The paths of the executables in cargo's JSON messages.
fn executables(messages: &str, kind: &str) -> Vec<PathBuf> {
    const KEY: &str = "\"executable\":\"";
    let kind = format!("\"kind\":[\"{kind}\"]");
    messages
        .lines()
        .filter(|message| message.contains(&kind))
        .filter_map(|message| message.split_once(KEY))
        .filter_map(|(_, rest)| rest.split_once('"'))
        .map(|(path, _)| PathBuf::from(path))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_messages_with_an_executable_of_the_kind_count() {
        let messages = r#"{"reason":"compiler-artifact","target":{"kind":["bin"]},"executable":null}
{"reason":"compiler-artifact","target":{"kind":["bin"]},"executable":"/t/a b","fresh":true}
{"reason":"compiler-artifact","target":{"kind":["test"]},"executable":"/t/c","fresh":true}
{"reason":"build-finished","success":true}"#;
        assert_eq!(executables(messages, "bin"), [PathBuf::from("/t/a b")]);
        assert_eq!(executables(messages, "test"), [PathBuf::from("/t/c")]);
    }
}
