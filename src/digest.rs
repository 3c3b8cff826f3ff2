//! The checksum by which a recomputed tensor is compared with the first one.

use ssdtrain_libtorch as torch;
use tch::{Kind, TchError, Tensor};

/// This many bytes are copied to the host at a time.
const PART: usize = 1 << 20;

/// A checksum (CRC-32C) of a tensor's elements in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Digest(u32);

impl Digest {
    /// The digest of `tensor`, whose elements are copied to the host. `None` if its elements have no order: it is sparse, nested or
    /// undefined.
    pub(crate) fn of(tensor: &Tensor) -> Result<Option<Digest>, TchError> {
        if torch::layout(tensor).is_none() {
            return Ok(None);
        }
        tch::no_grad(|| {
            let mut reading = Reading { checksum: 0, kind: tensor.f_kind()?, part: Vec::new() };
            reading.add(&distinct(tensor)?)?;
            Ok(Some(Digest(reading.checksum)))
        })
    }
}

/// `tensor` without the repetitions that a stride of zero makes.
fn distinct(tensor: &Tensor) -> Result<Tensor, TchError> {
    let (mut distinct, strides) = (tensor.f_detach()?, tensor.stride());
    for (dim, (size, stride)) in (0..).zip(tensor.size().into_iter().zip(strides)) {
        if stride == 0 && size > 1 {
            distinct = distinct.f_narrow(dim, 0, 1)?;
        }
    }
    Ok(distinct)
}

struct Reading {
    checksum: u32,
    kind: Kind,
    part: Vec<u8>,
}

impl Reading {
    /// Adds the elements of `tensor` part by part; each part that is not contiguous is made so.
    fn add(&mut self, tensor: &Tensor) -> Result<(), TchError> {
        let bytes = tensor.numel() * self.kind.elt_size_in_bytes();
        // Its memory may be nowhere, which libtorch's copy is not made for.
        if bytes == 0 {
            return Ok(());
        }
        if bytes <= PART {
            return self.add_part(tensor, bytes);
        }
        let tensor = if tensor.is_contiguous() { tensor.f_view([-1])? } else { tensor.shallow_clone() };
        // It is larger than a part, so it has a dimension, and elements.
        let rows = tensor.size()[0];
        let at_once = (rows * PART as i64 / bytes as i64).max(1);
        for first in (0..rows).step_by(at_once as usize) {
            let part = tensor.f_narrow(0, first, at_once.min(rows - first))?;
            self.add(&if at_once == 1 { part.f_squeeze_dim(0)? } else { part })?;
        }
        Ok(())
    }

    fn add_part(&mut self, tensor: &Tensor, bytes: usize) -> Result<(), TchError> {
        self.part.resize(bytes, 0);
        tensor.f_copy_data_u8(&mut self.part, tensor.numel())?;
        self.checksum = crc32c::crc32c_append(self.checksum, &self.part);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    const FLOATS: (Kind, Device) = (Kind::Float, Device::Cpu);

    fn digest(tensor: &Tensor) -> Digest {
        Digest::of(tensor).unwrap().unwrap()
    }

    #[test]
    fn elements_and_their_order_count_and_strides_do_not() {
        let x = Tensor::arange(6, (Kind::BFloat16, Device::Cpu)).reshape([2, 3]);
        assert_eq!(digest(&x), digest(&x.tr().contiguous().tr()));
        assert_ne!(digest(&x), digest(&x.flip([1])));
        assert_ne!(digest(&x), digest(&(&x + 1)));
        assert_ne!(digest(&Tensor::zeros([0], FLOATS)), digest(&Tensor::ones([2], FLOATS)));
    }

    #[test]
    fn all_elements_of_a_large_tensor_count_whatever_its_strides() {
        for shape in [[1 << 20, 2, 1], [3, 1, 400_000], [700, 700, 3]] {
            let x = Tensor::arange(shape.iter().product::<i64>(), FLOATS).reshape(shape);
            let turned = x.permute([2, 0, 1]).contiguous().permute([1, 2, 0]);
            assert_eq!(digest(&x), digest(&turned), "{shape:?}");
            let other = x.copy();
            drop(other.view([-1]).get(-1).f_add_scalar_(1.0).unwrap());
            assert_ne!(digest(&x), digest(&other), "{shape:?}");
        }
    }

    #[test]
    fn elements_that_are_repeated_are_read_once() {
        let x = Tensor::arange(4, FLOATS).reshape([4, 1]);
        assert_ne!(digest(&x.expand([4, 1 << 40], false)), digest(&(&x + 1).expand([4, 1 << 40], false)));
    }

    #[test]
    fn a_tensor_without_elements_in_an_order_has_none() {
        let one = Tensor::eye(2, FLOATS);
        for tensor in [Tensor::new(), one.to_sparse_sparse_dim(2), one.to_sparse_csr(None), one.to_mkldnn()] {
            assert_eq!(Digest::of(&tensor).unwrap(), None);
        }
    }
}
