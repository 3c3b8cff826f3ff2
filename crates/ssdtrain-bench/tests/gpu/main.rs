//! The cache on a GPU. `cargo x gpu-test` runs these tests on a machine with a GPU; `cargo x bundle` packs them to
//! take to one.
//!
//! Tests under `on_the_gpu` are ignored unless asked for, and fail if there is no GPU. Most have a twin under
//! `simulated`, the same function on a device made of threads, which shows that the test itself is right. The tests
//! that `small_` selects are small enough for `compute-sanitizer`.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

/// Makes each of these functions two tests: on the GPU, and on a device made of threads.
macro_rules! on_both {
    ($($name:ident),+ $(,)?) => {
        mod on_the_gpu {
            $(
                #[test]
                #[ignore = "needs a GPU"]
                fn $name() {
                    super::$name(&crate::lab::Lab::gpu());
                }
            )+
        }
        mod simulated {
            $(
                #[test]
                fn $name() {
                    super::$name(&crate::lab::Lab::simulated());
                }
            )+
        }
    };
}

/// Makes each of these functions a test on the GPU.
macro_rules! on_the_gpu_only {
    ($($name:ident),+ $(,)?) => {
        mod only_on_the_gpu {
            $(
                #[test]
                #[ignore = "needs a GPU"]
                fn $name() {
                    super::$name(&crate::lab::Lab::gpu());
                }
            )+
        }
    };
}

mod bad_days;
mod chains;
mod cost;
mod direct;
mod graph_life;
mod killed;
mod lab;
mod memory;
mod order;
mod parity;
mod recompute;
mod shortage;
mod threads;
mod training;
mod waiting;
