//! Mathematical functions of the CPU.

use tch::{Device, Kind, TchError, Tensor};

type Function = fn(&Tensor) -> Result<Tensor, TchError>;

/// The functions that libtorch 2.11 computes with MKL, according to its `ATen/cpu/vml.h`.
const OF_MKL: [Function; 16] = [
    Tensor::f_acos,
    Tensor::f_asin,
    Tensor::f_atan,
    Tensor::f_cos,
    Tensor::f_erf,
    Tensor::f_erfc,
    Tensor::f_erfinv,
    Tensor::f_exp,
    Tensor::f_log,
    Tensor::f_log10,
    Tensor::f_log2,
    Tensor::f_sin,
    Tensor::f_sqrt,
    Tensor::f_tan,
    Tensor::f_tanh,
    Tensor::f_trunc,
];

/// Makes MKL choose its kernels for mathematical functions in the calling thread alone. Call it before the first large tensor is computed
/// on the CPU; repeating it is harmless.
///
/// MKL chooses at the first call of a function. In version 2024.2, which libtorch 2.11 contains, several threads that make that call
/// concurrently may get a different kernel, with half the digits, for that one call. The first step of a process then has bits that no
/// other step has (<https://github.com/pytorch/pytorch/issues/188792>).
pub fn resolve_math_kernels() -> Result<(), TchError> {
    for kind in [Kind::Float, Kind::Double] {
        // A single element is computed by one thread.
        let half = Tensor::f_full([1], 0.5, (kind, Device::Cpu))?;
        for function in OF_MKL {
            let _resolved = function(&half)?;
        }
    }
    Ok(())
}
