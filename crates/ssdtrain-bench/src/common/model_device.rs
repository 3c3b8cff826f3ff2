//! Where a model is trained, and with which kind of numbers.

use std::fmt;

use anyhow::{Result, anyhow, ensure};
use clap::ValueEnum;
use tch::{Cuda, Device, Kind};

/// The arguments that make up a [`ModelDevice`].
#[derive(Clone, Copy, Debug, clap::Args)]
#[command(next_help_heading = "Device")]
pub(crate) struct DeviceArgs {
    /// Where to train: cpu, cuda (the first GPU) or cuda:N; default: the first GPU if there is one that libtorch can use, else cpu
    #[arg(long, value_name = "DEVICE", value_parser = parse_device)]
    device: Option<Device>,
    /// Kind of numbers of weights, gradients, optimizer state and activations; default: float on cpu, bf16 on cuda
    #[arg(long, value_name = "KIND", value_enum)]
    dtype: Option<Dtype>,
}

/// An existing device, and the kind of a model's parameters on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ModelDevice {
    pub(crate) device: Device,
    dtype: Dtype,
}

/// [`Kind`] on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Dtype {
    /// 32 bits
    Float,
    /// 16 bits, with the range of 32
    Bf16,
    /// 16 bits, with more precision and less range
    Fp16,
}

impl DeviceArgs {
    /// Loads CUDA if it was asked for, or if there is a GPU and nothing else was asked for.
    pub(crate) fn resolve(self) -> Result<ModelDevice> {
        let first = Device::Cuda(0);
        let device = match self.device {
            Some(device) => {
                ensure_there(device)?;
                device
            }
            None if ensure_there(first).is_ok() => first,
            None => Device::Cpu,
        };
        let default = if device.is_cuda() { Dtype::Bf16 } else { Dtype::Float };
        Ok(ModelDevice { device, dtype: self.dtype.unwrap_or(default) })
    }
}

impl ModelDevice {
    /// The kind of parameters.
    pub(crate) fn kind(self) -> Kind {
        match self.dtype {
            Dtype::Float => Kind::Float,
            Dtype::Bf16 => Kind::BFloat16,
            Dtype::Fp16 => Kind::Half,
        }
    }

    /// Waits until the device has finished all its work.
    pub(crate) fn synchronize(self) {
        if let Device::Cuda(index) = self.device {
            Cuda::synchronize(index as i64);
        }
    }
}

impl fmt::Display for ModelDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dtype = match self.dtype {
            Dtype::Float => "float",
            Dtype::Bf16 => "bf16",
            Dtype::Fp16 => "fp16",
        };
        match self.device {
            Device::Cuda(index) => write!(f, "{dtype} on cuda:{index}"),
            _ => write!(f, "{dtype} on cpu"),
        }
    }
}

/// Loads CUDA if the device needs it, and checks that there is such a device.
pub(crate) fn ensure_there(device: Device) -> Result<()> {
    if let Device::Cuda(index) = device {
        ssdtrain_libtorch::load_cuda().map_err(|reason| {
            anyhow!("--device cuda:{index}: CUDA cannot be loaded ({reason}); `doctor` says what is missing")
        })?;
        let devices = Cuda::device_count();
        ensure!(
            (index as i64) < devices,
            "--device cuda:{index}: this machine has {devices} CUDA device(s) to use, numbered from 0"
        );
    }
    Ok(())
}

/// For clap.
pub(crate) fn parse_device(text: &str) -> Result<Device, String> {
    let device = match text {
        "cpu" => Some(Device::Cpu),
        "cuda" => Some(Device::Cuda(0)),
        _ => text
            .strip_prefix("cuda:")
            .and_then(|index| index.parse::<u8>().ok())
            .map(|n| Device::Cuda(n.into())),
    };
    device.ok_or_else(|| "give cpu, cuda or cuda:N".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_go_by_their_names() {
        assert_eq!(parse_device("cpu"), Ok(Device::Cpu));
        assert_eq!(parse_device("cuda"), Ok(Device::Cuda(0)));
        assert_eq!(parse_device("cuda:3"), Ok(Device::Cuda(3)));
        assert!(
            ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "CUDA"].iter().all(|text| parse_device(text).is_err())
        );
    }

    #[test]
    fn the_cpu_takes_32_bits_unless_told_otherwise() {
        let kind = |dtype| DeviceArgs { device: Some(Device::Cpu), dtype }.resolve().unwrap().kind();
        assert_eq!(kind(None), Kind::Float);
        assert_eq!(kind(Some(Dtype::Bf16)), Kind::BFloat16);
    }
}
