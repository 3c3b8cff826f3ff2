//! `train`: trains a model from scratch, or from a checkpoint.

mod averages;
mod optimizer;
mod output;
mod stopping;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::value_parser;
use ssdtrain::{StepReport, TensorCache};
use ssdtrain_metrics::{Address, Server};
use ssdtrain_models::{AdamW, Checkpoint, RandomBatches, SequentialBatches, TrainState, evaluate, seed_step};
use tch::Device;
use tch::nn::VarStore;

use self::averages::StepAverages;
use self::optimizer::OptimizerArgs;
use self::output::{Event, whereabouts};
use self::stopping::StoppingRule;
use crate::common::data::Data;
use crate::common::interrupt::{self, Interrupted};
use crate::common::learner::{Learner, Outcome, Update};
use crate::common::model::Family;
use crate::common::model_device::ModelDevice;
use crate::common::progress::Progress;
use crate::common::setup::SetupArgs;
use crate::common::shape::Shape;
use crate::common::spill::RUNS;
use crate::common::strategy::Strategy;
use crate::common::table::OutputArgs;
use crate::common::{defaults, float};

const CHECKPOINT: &str = "checkpoint.safetensors";
/// The checkpoint with the lowest held-out loss.
const BEST: &str = "best-checkpoint.safetensors";
/// Evaluations during the run use this fraction of the final evaluation's tokens.
const PART_OF_EVALUATION: usize = 8;

/// Train a GPT or a Llama with activations that leave the device
///
/// Without options it trains on a GPU if there is one, else on the processor, a model that suits it, on the Rust sources that cargo has
/// downloaded, for three minutes. On a GPU, what leaves it is planned (auto: the lowest peak for steps that are at most two percent longer);
/// on the processor, all but a little moves to the disk (offload). At the end come the loss on held-out data, a sample, and a table of
/// the step beside the same step with all activations on the device.
///
/// The checkpoint of the lowest held-out loss on the way is kept beside the latest, as best-checkpoint.safetensors.
///
/// Ctrl-C, or kill, ends the step under way, saves a checkpoint and stops; --resume goes on from it. Give --resume the options of the
/// run it continues; the model's shape, the tokenizer and the seed need not be repeated. A run limited by --steps takes the same steps
/// whether it was interrupted or not. After the last step a signal leaves out what is still to come, or ends the table with the
/// steps measured so far. The exit code is that of the signal (130, 143).
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Stop after so many steps in all, those before --resume included
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..=1 << 40))]
    steps: Option<u64>,
    /// Stop after so many minutes; 3 if there is no --steps
    #[arg(long, value_name = "MINUTES", value_parser = float::positive)]
    minutes: Option<f64>,
    /// What becomes of activations. Default: auto on a GPU or with a flag of auto, and else offload: on the processor, where the cache and
    /// the program share it, two percent of a step are hardly enough to move anything
    #[arg(long, value_enum)]
    strategy: Option<Strategy>,
    /// Directory of the run: its checkpoint is kept there
    #[arg(long, value_name = "DIR", default_value_os_t = Path::new(RUNS).join("default"))]
    out: PathBuf,
    /// Go on from the checkpoint in --out. Without it, a checkpoint found there is renamed, and training begins anew
    #[arg(long)]
    resume: bool,
    #[command(flatten)]
    output: OutputArgs,
    /// Steps from one line to the next
    #[arg(long, value_name = "STEPS", default_value = "10", value_parser = value_parser!(u64).range(1..))]
    log_every: u64,
    /// Steps from one evaluation and checkpoint to the next
    #[arg(long, value_name = "STEPS", default_value = "100", value_parser = value_parser!(u64).range(1..))]
    eval_every: u64,
    /// Most held-out tokens of the evaluation at the end; those on the way take an eighth of it. They come from everywhere in the held-out data
    #[arg(long, value_name = "TOKENS", default_value = defaults::EVAL_TOKENS, value_parser = value_parser!(u64).range(1..))]
    eval_tokens: u64,
    /// Length of the sample at the end
    #[arg(long, value_name = "TOKENS", default_value = "200", value_parser = value_parser!(u32).range(0..=1 << 20))]
    sample_tokens: u32,
    /// What the sample begins with
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Steps to compare offload with keep at the end; 0 leaves the table out
    #[arg(long, value_name = "STEPS", default_value = defaults::CLOSING_STEPS, value_parser = value_parser!(u32).range(0..=100_000))]
    compare_steps: u32,
    /// Serve the cache's metrics at /metrics for Prometheus while training goes on. A port alone (9464) is of this machine only,
    /// 0.0.0.0:9464 of all its networks, with no password; port 0 is any that is free
    #[arg(long, value_name = "ADDR")]
    metrics: Option<Address>,
    #[command(flatten)]
    setup: SetupArgs,
    #[command(flatten)]
    optimizer: OptimizerArgs,
}

const EXAMPLES: &str = "\
Examples:
  ssdtrain-bench train                                       three minutes, Rust sources
  ssdtrain-bench train --data book.txt --minutes 30 --out runs/book
  ssdtrain-bench train --data book.txt --minutes 30 --out runs/book --resume
  ssdtrain-bench train --preset gpt2-small --device cuda --loss-chunk 2048
  ssdtrain-bench train --model llama --steps 500
  ssdtrain-bench train --data book.txt --minutes 10000 --metrics 9464
  ssdtrain-bench train --preset gpt2-small --save-plan plan.json
  ssdtrain-bench train --preset gpt2-small --plan plan.json
  ssdtrain-bench train --preset gpt2-small --accumulate 8 --spill-dir /mnt/nvme0 --spill-dir /mnt/nvme1

nanoGPT's recipe for a CPU, on its Shakespeare text:
  ssdtrain-bench train --data input.txt --tokens chars --layers 4 --heads 4 --hidden 128 --block 64 --batch 12 \\
      --steps 2000 --dropout 0 --no-bias --lr 1e-3 --min-lr 1e-4 --warmup-steps 100 --beta2 0.99 --weight-decay 0.1

JSON: an event on each line. step: step, loss, learning_rate, step_ms, tokens_per_s, act_peak_bytes, step_peak_bytes, stall_ms (of the steps
since the last such line: means and highest peaks), report (of the last step: the fields of the library's StepReport; null without a cache).
eval: step, held_out_loss. checkpoint: step, path. sample: text. Then the strategies of the table at the end, as compare has them.";

impl Args {
    fn strategy(&self, device: Device) -> Strategy {
        let cache = &self.setup.cache;
        let is_planned = !cache.has_budget() && (device.is_cuda() || cache.has_goal());
        self.strategy.unwrap_or(if is_planned { Strategy::Auto } else { Strategy::Offload })
    }
}

pub(crate) fn run(args: Args) -> Result<()> {
    interrupt::listen()?;
    let mut run = Run::prepare(args)?;
    run.train()?;
    run.show_disks();
    run.write_trace()?;
    let saved = run.save_profile().and_then(|()| run.save_plan());
    let closed = run.close();
    // A file that could not be written matters more than where the run was stopped.
    saved.and(closed)
}

/// A run in progress.
struct Run {
    args: Args,
    strategy: Strategy,
    model_device: ModelDevice,
    shape: Shape,
    data: Data,
    prompt: Vec<u16>,
    learner: Learner<AdamW>,
    batches: RandomBatches,
    evaluation: SequentialBatches,
    stopping: StoppingRule,
    progress: Progress,
    seed: u64,
    /// Number of steps taken.
    step: u64,
    best: Option<Best>,
    last_report: Option<StepReport>,
    /// Serves the metrics, if they were asked for.
    _server: Option<Server>,
}

/// The lowest held-out loss so far.
#[derive(Clone, Copy)]
struct Best {
    loss: f64,
    step: u64,
}

impl Best {
    /// The best loss as recorded in a checkpoint's notes.
    fn of(notes: &BTreeMap<String, String>) -> Option<Best> {
        let note = |name| notes.get(name);
        Some(Best { loss: note("best_loss")?.parse().ok()?, step: note("best_step")?.parse().ok()? })
    }

    fn notes(self) -> [(String, String); 2] {
        [("best_loss".to_owned(), self.loss.to_string()), ("best_step".to_owned(), self.step.to_string())]
    }
}

impl Run {
    /// Reads everything that the run needs, so that problems are reported before training begins.
    fn prepare(args: Args) -> Result<Run> {
        let model_device = args.setup.place()?;
        let strategy = args.strategy(model_device.device);
        args.setup.cache.prepare(&[strategy])?;
        ensure!(
            args.metrics.is_none() || strategy != Strategy::Plain,
            "--metrics shows what a cache does, and plain has none: take another strategy"
        );
        let progress = Progress::new(args.output.json);
        let path = args.out.join(CHECKPOINT);
        let checkpoint = args.resume.then(|| Checkpoint::open(&path)).transpose().context("--resume")?;
        let mut shape = args
            .setup
            .shape
            .resolve(|family| base_shape(checkpoint.as_ref(), family, model_device.device))?;
        if let (Some(checkpoint), None) = (&checkpoint, args.setup.shape.tokens()) {
            shape.tokens = note(checkpoint, "tokenizer")?.to_owned();
        }
        let data = args.setup.data.load(&shape.tokens)?;
        data.require(shape.block())?;
        shape.model.set_vocab(data.tokenizer.vocab() as i64);
        let prompt = data.prompt(args.prompt.as_deref())?;
        let state = checkpoint.as_ref().map(Checkpoint::state).cloned().unwrap_or_default();
        let seed = match &checkpoint {
            Some(found) => args.setup.seed_or(found.state().seed),
            None => args.setup.seed(),
        };
        let stopping = StoppingRule::new(args.steps, args.minutes, state.step);
        args.optimizer.update(&stopping, state.step, Duration::ZERO)?;

        let config = args.optimizer.adamw(model_device.kind());
        let optimizer = |vs: &VarStore| Ok(AdamW::new(vs, config)?);
        let mut learner = Learner::new(strategy, &shape, model_device, &args.setup.cache, optimizer, seed)?;
        let served = args.metrics.zip(learner.cache());
        let serve = |(address, cache)| Server::start(address, &[(strategy.name(), cache)]);
        let server = served.map(serve).transpose().context("--metrics")?;
        if let Some(checkpoint) = &checkpoint {
            checkpoint.restore(&shape.model, &learner.vs, Some(&mut learner.optimizer))?;
        }
        let mut batches =
            data.train.random_batches(shape.rows(), shape.block(), seed, model_device.device)?;
        batches.seek(state.position);
        let evaluation = data.held_out.sequential_batches(shape.batch, shape.block(), model_device.device)?;

        fs::create_dir_all(&args.out).with_context(|| format!("cannot make --out {}", args.out.display()))?;
        progress.line(&format!("data   {}", data.describe()));
        progress.line(&format!("model  {}, {model_device}", shape.describe()));
        match strategy {
            Strategy::Offload | Strategy::OffloadDisk | Strategy::AdaptivePaper | Strategy::Auto => {
                progress.line(&format!(
                    "spill  {}, through {}",
                    args.setup.cache.describe()?,
                    learner.io_path()
                ));
            }
            Strategy::OffloadHost => progress.line(&format!("spill  none: {}", learner.io_path())),
            Strategy::Plain | Strategy::Keep | Strategy::Recompute => {
                progress.line("spill  none: activations stay on the device");
            }
        }
        if let Some(server) = &server {
            progress.line(&format!("metrics {}", server.url()));
        }
        match &checkpoint {
            Some(_) => progress.line(&format!("run    {}, from step {} on", path.display(), state.step)),
            None => progress.line(&format!("run    {}", path.display())),
        }
        let run = Run {
            strategy,
            model_device,
            shape,
            data,
            prompt,
            learner,
            batches,
            evaluation,
            stopping,
            progress,
            seed,
            step: state.step,
            best: Best::of(&state.notes),
            last_report: None,
            _server: server,
            args,
        };
        if checkpoint.is_none() {
            run.set_aside(CHECKPOINT)?;
            run.set_aside(BEST)?;
        }
        Ok(run)
    }

    /// Takes steps until the run is over or the user asks it to stop. The checkpoint of the last step is saved in
    /// both cases.
    fn train(&mut self) -> Result<()> {
        let start = Instant::now();
        let mut averages = StepAverages::default();
        let mut saved = None;
        self.progress.start();
        while !interrupt::requested() && !self.stopping.is_over(self.step, start.elapsed()) {
            let update = self.args.optimizer.update(&self.stopping, self.step, start.elapsed())?;
            let outcome = self.take_step(update)?;
            averages.add(&outcome);
            self.progress.at(self.stopping.share(self.step, start.elapsed()));
            let logged = self.step.is_multiple_of(self.args.log_every) || self.step == 1;
            if logged || self.progress.is_live() {
                self.show(&averages, &outcome);
            }
            if logged {
                self.log(&averages, &outcome, update.learning_rate)?;
                averages = StepAverages::default();
            }
            self.last_report = outcome.report;
            if self.step.is_multiple_of(self.args.eval_every) {
                self.judge()?;
                saved = Some(self.step);
            }
        }
        self.progress.clear();
        if saved == Some(self.step) {
            return Ok(());
        }
        self.judge()
    }

    /// Evaluates on a part of the held-out data, unless the run was stopped, and saves: the best checkpoint
    /// separately from the latest. Only then is anything printed.
    fn judge(&mut self) -> Result<()> {
        let part = self.eval_batches().div_ceil(PART_OF_EVALUATION);
        // Whoever stops a run should not have to wait for its evaluation.
        let loss = self.evaluate(part)?;
        let lowest = self.best.map_or(f64::INFINITY, |best| best.loss);
        let best = loss.filter(|&loss| loss < lowest).map(|loss| Best { loss, step: self.step });
        self.best = best.or(self.best);
        let names = best.map(|_| BEST).into_iter().chain([CHECKPOINT]);
        let saved = names.map(|name| self.save(name)).collect::<Result<Vec<_>>>()?;
        if let Some(loss) = loss {
            self.show_held_out(loss)?;
            self.progress.line(&format!("step {:>6}  held-out loss {loss:.4}", self.step));
        }
        saved.iter().try_for_each(|path| self.progress.event(&Event::Checkpoint { step: self.step, path }))
    }

    fn show_held_out(&self, loss: f64) -> Result<()> {
        self.progress.event(&Event::Eval { step: self.step, held_out_loss: loss })
    }

    fn take_step(&mut self, update: Update) -> Result<Outcome> {
        seed_step(self.seed, self.step);
        let micro_batches = self.batches.draw()?.split(self.shape.accumulate)?;
        let outcome = self.learner.step(&micro_batches, update)?;
        self.step += 1;
        Ok(outcome)
    }

    fn write_trace(&self) -> Result<()> {
        let cache = self.learner.cache().map(|cache| (self.strategy.name(), cache));
        self.args.setup.cache.write_trace(cache.as_slice(), &self.progress)
    }

    fn save_profile(&self) -> Result<()> {
        let seen = self.learner.cache().and_then(TensorCache::profile);
        self.args.setup.cache.profile.save(seen, &self.shape, self.model_device, &self.progress)
    }

    fn save_plan(&self) -> Result<()> {
        let plan = self.learner.cache().and_then(TensorCache::saved_plan);
        self.args.setup.cache.policy.saved.save(plan.as_ref(), &self.progress)
    }

    /// Ends the run: unless it was stopped, with the held-out loss, a sample, and a comparison of its strategy with
    /// keep.
    fn close(self) -> Result<()> {
        if interrupt::requested() {
            return Err(self.interrupted());
        }
        if let Some(report) = &self.last_report {
            self.progress.line(&format!("\nThe last step {}", whereabouts(report)));
        }
        let Some(loss) = self.evaluate(self.eval_batches())? else { return Err(self.interrupted()) };
        self.show_held_out(loss)?;
        self.progress.line(&format!("\nHeld-out loss after {} steps: {loss:.4} nats per token", self.step));
        if let Some(Best { loss, step }) = self.best {
            let path = self.args.out.join(BEST);
            self.progress
                .line(&format!("Best on the way: {loss:.4} after step {step}, in {}", path.display()));
        }
        self.show_sample()?;
        if interrupt::requested() { Err(self.interrupted()) } else { self.show_comparison() }
    }

    fn interrupted(&self) -> anyhow::Error {
        let path = self.args.out.join(CHECKPOINT);
        let (step, path) = (self.step, path.display());
        Interrupted::new(format!(
            "interrupted after step {step}; {path} has it, and --resume goes on from there"
        ))
        .into()
    }

    /// Number of batches of the evaluation at the end.
    fn eval_batches(&self) -> usize {
        let tokens = self.shape.batch * self.shape.block();
        usize::try_from(self.args.eval_tokens).unwrap_or(usize::MAX).div_ceil(tokens)
    }

    /// The loss on this many batches of the held-out data; `None` if the user asked to stop meanwhile.
    fn evaluate(&self, batches: usize) -> Result<Option<f64>> {
        if interrupt::requested() {
            return Ok(None);
        }
        let mut begun = false;
        let batches = self.evaluation.clone().spread(batches);
        // At least one batch, since no batches have no loss.
        let batches = batches.take_while(|_| !std::mem::replace(&mut begun, true) || !interrupt::requested());
        let loss = evaluate(self.learner.model.as_ref(), batches)?;
        Ok(Some(loss).filter(|_| !interrupt::requested()))
    }

    /// Saves a checkpoint in the run's directory; returns its path.
    fn save(&self, name: &str) -> Result<PathBuf> {
        let path = self.args.out.join(name);
        let mut notes = BTreeMap::from([
            ("tokenizer".to_owned(), self.data.tokenizer.to_string()),
            ("batch".to_owned(), self.shape.batch.to_string()),
        ]);
        notes.extend(self.best.into_iter().flat_map(Best::notes));
        let state = TrainState { step: self.step, seed: self.seed, position: self.batches.position(), notes };
        Checkpoint::save(&path, &self.shape.model, &self.learner.vs, &self.learner.optimizer, &state)?;
        Ok(path)
    }

    /// Renames an older checkpoint instead of overwriting it.
    fn set_aside(&self, name: &str) -> Result<()> {
        let path = self.args.out.join(name);
        if !path.exists() {
            return Ok(());
        }
        let previous = path.with_file_name(format!("previous-{name}"));
        fs::rename(&path, &previous).with_context(|| format!("cannot rename {}", path.display()))?;
        self.progress.line(&format!("       the checkpoint of an earlier run is now {}", previous.display()));
        Ok(())
    }
}

/// The shape that a run starts from if its options say nothing else.
fn base_shape(checkpoint: Option<&Checkpoint>, family: Family, device: Device) -> Result<Shape> {
    let quick = Shape::quick(family, device)?;
    let Some(checkpoint) = checkpoint else { return Ok(quick) };
    let batch = note(checkpoint, "batch")?.parse().context("the checkpoint's batch")?;
    Ok(Shape { model: checkpoint.config().clone(), batch, ..quick })
}

/// A note about its run in one of our checkpoints.
fn note<'a>(checkpoint: &'a Checkpoint, name: &str) -> Result<&'a str> {
    let note = checkpoint.state().notes.get(name).map(String::as_str);
    note.with_context(|| format!("the checkpoint does not say its {name}; it was not saved by train"))
}
