//! The properties of a GPU.

use serde::Deserialize;

/// A GPU.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Gpu {
    #[serde(default)]
    pub(crate) name: String,
    /// In GiB.
    pub(crate) memory_gib: f64,
    /// 10^12 operations per second that its matrix units could reach in 16 bits, without sparsity.
    pub(crate) peak_tflops: f64,
}

impl Gpu {
    /// In bytes.
    pub(crate) fn memory_bytes(&self) -> f64 {
        self.memory_gib * (1_u64 << 30) as f64
    }
}
