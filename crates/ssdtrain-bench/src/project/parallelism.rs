//! How a model is distributed over GPUs, and on how many sequences at a time it is trained.

use anyhow::{Result, ensure};

use super::model::{Architecture, Model};

/// How a model is distributed over GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parallelism {
    /// GPUs that share each layer.
    pub(crate) tensor: u64,
    /// Stages that share the layers.
    pub(crate) pipeline: u64,
    /// All GPUs; what `tensor` and `pipeline` do not use is data parallelism.
    pub(crate) gpus: u64,
    /// Whether the GPUs that share a layer also split what each would otherwise keep a copy of: norms and dropout.
    pub(crate) sequence_parallel: bool,
    /// Whether weights, gradients and optimizer states are spread over all replicas (ZeRO stage 3).
    pub(crate) zero: bool,
}

/// How many sequences are trained on at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Batch {
    /// Sequences of one forward pass.
    pub(crate) micro: u64,
    /// Sequences of a step, over all replicas.
    pub(crate) global: u64,
}

impl Parallelism {
    /// Copies of the model that are trained side by side.
    pub(crate) fn replicas(&self) -> u64 {
        self.gpus / (self.tensor * self.pipeline)
    }

    /// Checks that everything divides evenly.
    ///
    /// # Errors
    /// Names the arguments that do not.
    pub(crate) fn check(&self, model: &Model, batch: &Batch) -> Result<()> {
        let Parallelism { tensor, pipeline, gpus, .. } = *self;
        let shared = tensor * pipeline;
        ensure!(
            model.heads.is_multiple_of(tensor),
            "--tensor-parallel {tensor} does not divide the model's {} attention heads",
            model.heads
        );
        if let Architecture::Llama { kv_heads, mlp } = model.architecture {
            ensure!(
                kv_heads.is_multiple_of(tensor),
                "--tensor-parallel {tensor} does not divide the model's {kv_heads} heads of keys and values"
            );
            ensure!(
                mlp.is_multiple_of(tensor),
                "--tensor-parallel {tensor} does not divide the width {mlp} of the model's MLP"
            );
        }
        ensure!(
            model.layers.is_multiple_of(pipeline),
            "--pipeline-parallel {pipeline} does not divide the model's {} layers",
            model.layers
        );
        ensure!(
            gpus.is_multiple_of(shared) && gpus > 0,
            "--gpus {gpus} is not a multiple of --tensor-parallel {tensor} times --pipeline-parallel {pipeline}"
        );
        let each = batch.micro * self.replicas();
        ensure!(
            batch.global.is_multiple_of(each) && batch.global > 0,
            "--batch {} is not a multiple of --micro-batch {} times the {} replicas of the model",
            batch.global,
            batch.micro,
            self.replicas()
        );
        Ok(())
    }
}

impl Batch {
    /// Sequences that each replica is trained on in a step.
    pub(crate) fn per_replica(&self, parallelism: &Parallelism) -> f64 {
        self.global as f64 / parallelism.replicas() as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> Model {
        let architecture = Architecture::Gpt;
        Model { name: String::new(), architecture, layers: 4, hidden: 64, heads: 8, vocab: 100, sequence: 16 }
    }

    fn spread(tensor: u64, pipeline: u64, gpus: u64) -> Parallelism {
        Parallelism { tensor, pipeline, gpus, sequence_parallel: false, zero: false }
    }

    #[test]
    fn what_does_not_divide_is_named() {
        let batch = Batch { micro: 2, global: 8 };
        let wrong = [
            (spread(3, 1, 3), "--tensor-parallel 3"),
            (spread(1, 3, 3), "--pipeline-parallel 3"),
            (spread(2, 2, 6), "--gpus 6"),
            (spread(2, 2, 0), "--gpus 0"),
            (spread(1, 1, 3), "--micro-batch 2"),
        ];
        for (parallelism, expected) in wrong {
            let error = parallelism.check(&model(), &batch).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        assert!(spread(2, 2, 8).check(&model(), &batch).is_ok());
    }

    #[test]
    fn grouped_queries_and_the_mlp_are_split_too() {
        let batch = Batch { micro: 1, global: 8 };
        let check = |kv_heads, mlp| {
            let llama = Model { architecture: Architecture::Llama { kv_heads, mlp }, ..model() };
            spread(4, 1, 4).check(&llama, &batch)
        };
        assert!(check(4, 40).is_ok());
        let error = check(2, 40).unwrap_err().to_string();
        assert!(error.contains("--tensor-parallel 4") && error.contains("2 heads of keys"), "{error}");
        let error = check(4, 42).unwrap_err().to_string();
        assert!(error.contains("--tensor-parallel 4") && error.contains("42"), "{error}");
    }
}
