//! Checkpoints: the parameters, the optimiser and the position of a run in one safetensors file.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process;

use safetensors::tensor::{self, TensorInfo};
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};
use tch::nn::VarStore;
use tch::{Kind, Tensor, no_grad};

use crate::adamw::AdamW;
use crate::error::{Error, Result};
use crate::model_config::ModelConfig;

/// Our entry in the file's metadata, as JSON.
const METADATA: &str = "ssdtrain";
/// Readers of safetensors refuse longer headers.
const MOST_HEADER_BYTES: usize = 100_000_000;
const EXP_AVG: &str = "optimizer.exp_avg.";
const EXP_AVG_SQ: &str = "optimizer.exp_avg_sq.";

/// The position of a run, apart from its tensors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrainState {
    /// Number of steps taken.
    pub step: u64,
    /// The seed of the run.
    pub seed: u64,
    /// [`RandomBatches::position`](crate::RandomBatches::position) of the training data.
    pub position: u64,
    /// Whatever else the run wants to restore, such as its tokenizer.
    pub notes: BTreeMap<String, String>,
}

/// A checkpoint read from a file.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    bytes: Vec<u8>,
    metadata: Metadata,
}

#[derive(Debug, Serialize, Deserialize)]
struct Metadata {
    config: ModelConfig,
    state: TrainState,
    optimizer_steps: u64,
}

impl Checkpoint {
    /// Writes a checkpoint. The previous contents of `path` stay there until the new checkpoint is completely on the
    /// disk. Until then it is in `PATH.PID.unfinished`. A process that is killed meanwhile leaves such a file in the directory,
    /// and the next save there removes it.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be written, [`Error::Torch`] if a tensor cannot be read.
    pub fn save(
        path: impl AsRef<Path>,
        config: impl Into<ModelConfig>,
        vs: &VarStore,
        optimizer: &AdamW,
        state: &TrainState,
    ) -> Result<()> {
        let path = path.as_ref();
        let mut tensors = Vec::new();
        for (name, tensor) in named_tensors(vs, Some(optimizer)) {
            let dtype = dtype_of(tensor.kind()).ok_or_else(|| {
                Error::argument(format!(
                    "{name} is of kind {:?}, which checkpoints do not hold",
                    tensor.kind()
                ))
            })?;
            tensors.push((name, dtype, tensor));
        }
        let metadata =
            Metadata { config: config.into(), state: state.clone(), optimizer_steps: optimizer.steps() };
        let metadata = serde_json::to_string(&metadata)
            .map_err(|error| Error::argument(format!("the state of the run cannot be saved: {error}")))?;
        let metadata = HashMap::from([(METADATA.to_owned(), metadata)]);

        write_atomically(path, |file| write_tensors(file, path, tensors, metadata))
    }

    /// Reads a checkpoint.
    ///
    /// # Errors
    /// [`Error::Io`] if `path` cannot be read, [`Error::Checkpoint`] if it is damaged or not one of our checkpoints.
    pub fn open(path: impl AsRef<Path>) -> Result<Checkpoint> {
        let path = path.as_ref();
        Checkpoint::parse(path, fs::read(path).map_err(Error::io("read", path))?)
    }

    /// Takes the bytes of the file at `path` for a checkpoint.
    pub(crate) fn parse(path: &Path, bytes: Vec<u8>) -> Result<Checkpoint> {
        let damaged = |message: String| Error::Checkpoint { path: path.to_owned(), message };
        let (_, header) = SafeTensors::read_metadata(&bytes)
            .map_err(|error| damaged(format!("is damaged or no safetensors file ({error})")))?;
        let metadata = header.metadata().as_ref().and_then(|entries| entries.get(METADATA));
        let metadata = metadata.ok_or_else(|| damaged("was not written by ssdtrain".to_owned()))?;
        let metadata = serde_json::from_str(metadata).map_err(|error| {
            damaged(format!("describes its model in a way not understood here ({error})"))
        })?;
        Ok(Checkpoint { path: path.to_owned(), bytes, metadata })
    }

    /// The shape of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.metadata.config
    }

    /// The position of the run.
    pub fn state(&self) -> &TrainState {
        &self.metadata.state
    }

    /// Copies the checkpoint's values into the parameters of a model with shape `config` and, to continue training,
    /// into its optimiser. On an error nothing has been changed.
    ///
    /// # Errors
    /// [`Error::Checkpoint`], naming what differs, if the checkpoint belongs to another model.
    pub fn restore(
        &self,
        config: impl Into<ModelConfig>,
        vs: &VarStore,
        optimizer: Option<&mut AdamW>,
    ) -> Result<()> {
        let config = config.into();
        if config != self.metadata.config {
            return Err(self.error(differences(&self.metadata.config, &config)));
        }
        let tensors = named_tensors(vs, optimizer.as_deref());
        let wanted: Vec<_> = tensors.iter().map(|(name, tensor)| Wanted::new(name, tensor)).collect();
        let stored = self.matching(&wanted)?.into_iter().zip(&wanted);
        let loaded = stored
            .map(|(bytes, wanted)| Tensor::f_from_data_size(bytes, &wanted.shape, wanted.kind))
            .collect::<Result<Vec<_>, _>>()?;

        no_grad(|| {
            tensors.into_iter().zip(&loaded).try_for_each(|((_, mut tensor), value)| tensor.f_copy_(value))
        })?;
        if let Some(optimizer) = optimizer {
            optimizer.steps = self.metadata.optimizer_steps;
        }
        Ok(())
    }

    /// The bytes of each tensor that is wanted. The checkpoint has to have all of these and, besides states of optimisers, no
    /// others.
    pub(crate) fn matching(&self, wanted: &[Wanted<'_>]) -> Result<Vec<&[u8]>> {
        let stored = SafeTensors::deserialize(&self.bytes).map_err(|error| self.error(error.to_string()))?;
        let found = wanted.iter().map(|wanted| self.bytes_of(&stored, wanted)).collect::<Result<_>>()?;
        let known: HashSet<&str> = wanted.iter().map(|wanted| wanted.name).collect();
        let is_foreign = |name: &&str| !known.contains(name) && !is_optimizer_state(name);
        if let Some(name) = stored.names().into_iter().find(is_foreign) {
            return Err(self.error(format!("has a tensor \"{name}\", which the model has not")));
        }
        Ok(found)
    }

    /// The bytes of a stored tensor, if it matches the one that it is meant for.
    fn bytes_of<'a>(&self, stored: &SafeTensors<'a>, wanted: &Wanted<'_>) -> Result<&'a [u8]> {
        let Wanted { name, kind, shape } = wanted;
        let view = stored.tensor(name).map_err(|_| self.error(format!("has no tensor \"{name}\"")))?;
        if dtype_of(*kind) != Some(view.dtype()) {
            let dtype = view.dtype();
            return Err(self.error(format!("holds \"{name}\" as {dtype:?}, and the model as {kind:?}")));
        }
        let found: Vec<i64> = view.shape().iter().map(|&length| length as i64).collect();
        if found != *shape {
            return Err(self.error(format!("holds \"{name}\" as {found:?}, and the model as {shape:?}")));
        }
        Ok(view.data())
    }

    fn error(&self, message: impl Into<String>) -> Error {
        Error::Checkpoint { path: self.path.clone(), message: message.into() }
    }
}

/// A tensor that a checkpoint should have.
pub(crate) struct Wanted<'a> {
    pub(crate) name: &'a str,
    pub(crate) kind: Kind,
    pub(crate) shape: Vec<i64>,
}

impl Wanted<'_> {
    fn new<'a>(name: &'a str, tensor: &Tensor) -> Wanted<'a> {
        Wanted { name, kind: tensor.kind(), shape: tensor.size() }
    }
}

/// Writes a safetensors file: the length of the header, the header as JSON, and the bytes of one tensor after another. No more than one
/// tensor is in memory twice.
fn write_tensors(
    file: &mut impl Write,
    path: &Path,
    mut tensors: Vec<(String, Dtype, Tensor)>,
    metadata: HashMap<String, String>,
) -> Result<()> {
    // What needs the largest alignment comes first, so everything is aligned.
    tensors.sort_by(|(name, dtype, _), (other, others, _)| {
        (Reverse(dtype), name).cmp(&(Reverse(others), other))
    });
    let mut end = 0;
    let infos = tensors.iter().map(|(name, dtype, tensor)| {
        let shape = tensor.size().iter().map(|&length| length as usize).collect();
        let start = end;
        end += bytes_of(tensor);
        (name.clone(), TensorInfo { dtype: *dtype, shape, data_offsets: (start, end) })
    });
    let invalid = |message: String| Error::Checkpoint { path: path.to_owned(), message };
    let header =
        tensor::Metadata::new(Some(metadata), infos.collect()).map_err(|error| invalid(error.to_string()))?;
    let mut header = serde_json::to_vec(&header).map_err(|error| invalid(error.to_string()))?;
    header.resize(header.len().next_multiple_of(8), b' ');
    if header.len() > MOST_HEADER_BYTES {
        return Err(invalid(format!(
            "its header would have {} bytes, and may have {MOST_HEADER_BYTES}",
            header.len()
        )));
    }

    let failed = || Error::io("write", path);
    file.write_all(&(header.len() as u64).to_le_bytes()).map_err(failed())?;
    file.write_all(&header).map_err(failed())?;
    for (_, _, tensor) in tensors {
        let mut bytes = vec![0; bytes_of(&tensor)];
        tensor.f_copy_data_u8(&mut bytes, tensor.numel())?;
        file.write_all(&bytes).map_err(failed())?;
    }
    Ok(())
}

fn bytes_of(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

/// All tensors of a checkpoint, with their names in it.
fn named_tensors(vs: &VarStore, optimizer: Option<&AdamW>) -> Vec<(String, Tensor)> {
    let mut tensors: Vec<_> = vs.variables().into_iter().collect();
    for slot in optimizer.iter().flat_map(|optimizer| &optimizer.slots) {
        tensors.push((format!("{EXP_AVG}{}", slot.name), slot.exp_avg.shallow_clone()));
        tensors.push((format!("{EXP_AVG_SQ}{}", slot.name), slot.exp_avg_sq.shallow_clone()));
    }
    tensors
}

fn is_optimizer_state(name: &str) -> bool {
    name.starts_with(EXP_AVG) || name.starts_with(EXP_AVG_SQ)
}

fn dtype_of(kind: Kind) -> Option<Dtype> {
    match kind {
        Kind::Float => Some(Dtype::F32),
        Kind::Double => Some(Dtype::F64),
        Kind::BFloat16 => Some(Dtype::BF16),
        Kind::Half => Some(Dtype::F16),
        _ => None,
    }
}

/// The fields in which two shapes differ, in a form such as "is of a model with layers 2; this one has layers 4".
fn differences(stored: &ModelConfig, wanted: &ModelConfig) -> String {
    if stored.family() != wanted.family() {
        return format!("is of a {}; this one is a {}", stored.family(), wanted.family());
    }
    let fields = |config| serde_json::to_value(config).unwrap_or_default();
    let (stored, wanted) = (fields(stored), fields(wanted));
    let list = |config: &serde_json::Value| {
        let fields = config.as_object().into_iter().flatten();
        let differing = fields.filter(|(name, _)| stored.get(name) != wanted.get(name));
        differing.map(|(name, value)| format!("{name} {value}")).collect::<Vec<_>>().join(", ")
    };
    format!("is of a model with {}; this one has {}", list(&stored), list(&wanted))
}

/// How the names of files end that are not yet what they are to be; before it comes the number of the process that writes.
const UNFINISHED: &str = ".unfinished";

/// Lets `write` fill a file next to `path`, and moves it to `path` once it is on the disk.
fn write_atomically(path: &Path, write: impl FnOnce(&mut BufWriter<&File>) -> Result<()>) -> Result<()> {
    let directory =
        path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    let Some(name) = path.file_name() else {
        return Err(Error::argument(format!(
            "a checkpoint cannot be written to {}: it names no file",
            path.display()
        )));
    };
    remove_abandoned(directory);
    let mut unfinished = name.to_owned();
    unfinished.push(format!(".{}{UNFINISHED}", process::id()));
    let unfinished = directory.join(unfinished);

    let failed = || Error::io("write", path);
    // All goes through this one open file: it is the one that is locked, on the disk in the end, and renamed.
    let file = create_locked(&unfinished).map_err(failed())?;
    let mut buffered = BufWriter::with_capacity(1 << 20, &file);
    let written = write(&mut buffered).and_then(|()| {
        buffered
            .flush()
            .and_then(|()| file.sync_all())
            .and_then(|()| fs::rename(&unfinished, path))
            .map_err(failed())
    });
    if written.is_err() {
        // Best effort: the error at hand matters more.
        fs::remove_file(&unfinished).ok();
        return written;
    }
    File::open(directory).and_then(|directory| directory.sync_all()).map_err(failed())
}

/// An empty file that stays locked as long as it is open: whoever can lock it later knows that nobody writes to it.
fn create_locked(path: &Path) -> io::Result<File> {
    loop {
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(path)?;
        // Where files have no locks, nobody will take this one for abandoned. Where they have, whoever had the lock before may have
        // removed or renamed the file.
        if file.lock().is_err() || is_at(&file, path) {
            file.set_len(0)?;
            return Ok(file);
        }
    }
}

/// Whether the path leads to this very file.
fn is_at(file: &File, path: &Path) -> bool {
    let number = |of: io::Result<fs::Metadata>| of.ok().map(|of| (of.dev(), of.ino()));
    number(file.metadata()).is_some_and(|own| number(fs::metadata(path)) == Some(own))
}

/// Removes what processes that are gone were writing in `directory`. Best effort: a file that cannot be removed only takes room.
fn remove_abandoned(directory: &Path) {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    for path in entries.map(|entry| entry.path()).filter(|path| is_unfinished(path.file_name())) {
        if OpenOptions::new().write(true).open(&path).is_ok_and(|file| is_abandoned(&file, &path)) {
            fs::remove_file(&path).ok();
        }
    }
}

/// Whether nobody writes to the file any longer, and the path still leads to it: it may have been finished and renamed since it was
/// opened, and another may be there.
fn is_abandoned(file: &File, path: &Path) -> bool {
    // A process number says nothing about processes on other hosts, or in other containers. A lock does: it ends with its owner.
    file.try_lock().is_ok() && is_at(file, path)
}

/// Whether a file's name is of the form `NAME.PID.unfinished`.
fn is_unfinished(name: Option<&OsStr>) -> bool {
    let stem = name.and_then(OsStr::to_str).and_then(|name| name.strip_suffix(UNFINISHED));
    let process = stem.and_then(|stem| stem.rsplit_once('.'));
    process.is_some_and(|(name, process)| !name.is_empty() && process.parse::<u32>().is_ok())
}

#[cfg(test)]
mod tests {
    use std::error::Error;
    use std::fs::TryLockError;

    use super::*;

    #[test]
    fn the_file_that_is_locked_is_the_one_that_is_written_and_renamed() -> Result<(), Box<dyn Error>> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("run.safetensors");
        let mut written = None;
        write_atomically(&path, |file| {
            let unfinished = directory.path().join(format!("run.safetensors.{}.unfinished", process::id()));
            assert!(is_at(file.get_ref(), &unfinished));
            let lock = File::open(&unfinished).map(|other| other.try_lock());
            assert!(matches!(lock, Ok(Err(TryLockError::WouldBlock))), "{lock:?}");
            written = file.get_ref().try_clone().ok();
            file.write_all(b"all of it").map_err(crate::Error::io("write", &path))
        })?;
        assert!(is_at(&written.ok_or("it is not open")?, &path));
        assert_eq!(fs::read(&path)?, b"all of it");
        Ok(())
    }

    #[test]
    fn a_file_that_took_the_place_of_a_finished_one_is_not_abandoned() -> Result<(), Box<dyn Error>> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("run.safetensors.1.unfinished");
        let writer = create_locked(&path)?;
        let seen = File::open(&path)?;
        assert!(!is_abandoned(&seen, &path), "somebody writes to it");
        fs::rename(&path, directory.path().join("run.safetensors"))?;
        drop(writer);
        assert!(!is_abandoned(&seen, &path), "nothing is there");
        let _next = create_locked(&path)?;
        assert!(!is_abandoned(&seen, &path), "somebody writes to the next one");
        Ok(())
    }
}
