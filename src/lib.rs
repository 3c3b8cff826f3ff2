//! A tensor cache that moves the activations of a training run off the device onto NVMe SSDs and loads them back before backward asks for
//! them. Training keeps its speed, and its results are the same bit for bit. It implements SSDTrain for `tch`.
//!
//! ```no_run
//! use ssdtrain::{MIB, Offload, TensorCache};
//! use tch::{Device, Kind, Tensor, nn, nn::Module, nn::OptimizerConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let vs = nn::VarStore::new(Device::Cpu);
//! let model = nn::seq().add(nn::linear(vs.root(), 512, 512, Default::default())).add_fn(|x| x.gelu("tanh"));
//! let mut opt = nn::Sgd::default().build(&vs, 0.1)?;
//! let policy = Offload::default().device_budget(256 * MIB);
//! let cache = TensorCache::builder().spill_to("/mnt/nvme").policy(policy).parameters(&vs).build()?;
//! for _ in 0..10 {
//!     let x = Tensor::randn([4096, 512], (Kind::Float, Device::Cpu));
//!     let step = cache.step(); // saved tensors of this thread now go through the cache
//!     let loss = model.forward(&x).square().mean(Kind::Float);
//!     opt.zero_grad();
//!     step.backward(&loss)?; // errors come out here, never as wrong numbers
//!     opt.step();
//!     println!("{}", step.finish()?); // what moved, what it cost, which I/O path ran
//! }
//! # Ok(())
//! # }
//! ```
//!
//! A package that depends on this one must name the same release of tch, `=0.24.0`, and needs a build script that tells its programs
//! where libtorch is. Copy `examples/outside` from the repository.

mod cache;
mod config;
mod device;
mod digest;
mod endurance;
mod error;
mod fusion;
mod math;
mod mem;
mod policy;
mod processes;
mod profile;
mod recompute;
mod replay;
mod route;
mod session;
mod step;
mod switch;
mod sync;
mod telemetry;
mod tier;
mod trace;
mod units;
mod verify;

pub use config::TensorCacheBuilder;
#[doc(hidden)]
pub use device::{DeviceCall, DeviceFaults};
pub use error::{Error, ErrorKind, Result};
pub use math::resolve_math_kernels;
pub use recompute::{Inputs, remat, segment};
pub use route::{IoPath, PathRates, PathTrial, Route, Way};
pub use session::{Backward, Entered, GivenBack, Held, Meter, Step, StepHandle, TensorCache, write_traces};
pub use ssdtrain_libtorch::{load_cuda, trim};
pub use ssdtrain_plan as plan;
pub use ssdtrain_plan::{
    Adaptive, AdaptiveReport, Auto, Baseline, Keep, Offload, OperationRow, PeakPhase, PeakReport, PeakRow,
    PlanReport, PlanRow, Planning, Policy, SavedPlan, Tally,
};
pub use ssdtrain_store as store;
pub use ssdtrain_store::BackendKind;
pub use step::{Scope, scope};
pub use telemetry::{
    Activity, DecisionCounts, DiskReport, HostPoolMetrics, KeptReport, LastStep, Metrics, PlanMetrics,
    ScopeReport, StallReport, StepCounts, StepReport,
};
pub use units::{GIB, KIB, MIB};
pub use verify::Verify;
