//! Resuming a run. It is alone in its file, because dropout draws from the process's only generator.

mod support;

use support::{Run, tiny};
use tch::Kind;

#[test]
fn a_resumed_run_has_the_bits_of_an_uninterrupted_one() -> Result<(), Box<dyn std::error::Error>> {
    for kind in [Kind::Float, Kind::BFloat16] {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("run.safetensors");
        let mut whole = Run::new(tiny(), kind)?;
        whole.train(2)?;
        whole.save(&path)?;
        whole.train(2)?;

        let mut resumed = Run::new(tiny(), kind)?;
        assert_ne!(resumed.bits(), whole.bits(), "a new model starts elsewhere");
        resumed.restore(&path)?;
        resumed.train(2)?;
        assert_eq!(resumed.optimizer.steps(), 4);
        assert_eq!(resumed.bits(), whole.bits(), "{kind:?}");
    }
    Ok(())
}
