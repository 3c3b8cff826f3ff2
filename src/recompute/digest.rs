//! What tells a result that was computed again from the first one.

use tch::{TchError, Tensor};

/// A checksum (CRC-32C) of a tensor's elements in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Digest(u32);

impl Digest {
    /// That of `tensor`, whose elements are copied to the host. None if it has no elements in an order: it is sparse, or undefined.
    pub(super) fn of(tensor: &Tensor) -> Result<Option<Digest>, TchError> {
        if !tensor.defined() || tensor.is_sparse() {
            return Ok(None);
        }
        let elements = tensor.numel();
        let mut bytes = vec![0; elements * tensor.f_kind()?.elt_size_in_bytes()];
        tch::no_grad(|| tensor.f_copy_data_u8(&mut bytes, elements))?;
        Ok(Some(Digest(crc32c::crc32c(&bytes))))
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    fn digest(tensor: &Tensor) -> Digest {
        Digest::of(tensor).unwrap().unwrap()
    }

    #[test]
    fn elements_and_their_order_count_and_strides_do_not() {
        let x = Tensor::arange(6, (Kind::BFloat16, Device::Cpu)).reshape([2, 3]);
        assert_eq!(digest(&x), digest(&x.tr().contiguous().tr()));
        assert_ne!(digest(&x), digest(&x.flip([1])));
        assert_ne!(digest(&x), digest(&(&x + 1)));
    }

    #[test]
    fn a_tensor_without_elements_in_an_order_has_none() {
        assert_eq!(Digest::of(&Tensor::new()).unwrap(), None);
        let one = Tensor::eye(2, (Kind::Float, Device::Cpu));
        assert_eq!(Digest::of(&one.to_sparse_sparse_dim(2)).unwrap(), None);
    }
}
