//! Tensors as bytes.

use std::fmt;

use ssdtrain_libtorch::Storage;
use tch::{Kind, TchError, Tensor};

/// Everything that is visible of a tensor: equal ones have the same bits, whether or not these are numbers.
#[derive(Clone, PartialEq)]
pub struct Bits {
    size: Vec<i64>,
    kind: Option<Kind>,
    bytes: Vec<u8>,
}

impl Bits {
    /// The bits of `tensor`.
    pub fn of(tensor: &Tensor) -> Result<Bits, TchError> {
        if !tensor.defined() {
            return Ok(Bits { size: vec![], kind: None, bytes: vec![] });
        }
        Ok(Bits { size: tensor.size(), kind: Some(tensor.kind()), bytes: bytes(tensor)? })
    }

    /// The largest difference between numbers at the same position, if the tensors have the same form.
    pub fn distance(&self, other: &Bits) -> Option<f64> {
        if self.size != other.size || self.kind != other.kind {
            return None;
        }
        let tensor = |bits: &Bits| Tensor::f_from_data_size(&bits.bytes, &bits.size, bits.kind?).ok();
        let (one, two) = (tensor(self)?.to_kind(Kind::Double), tensor(other)?.to_kind(Kind::Double));
        (one - two).abs().f_max().ok()?.f_double_value(&[]).ok()
    }
}

impl fmt::Debug for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of {:?}", self.size, self.kind)?;
        let values = self.kind.and_then(|kind| Tensor::f_from_data_size(&self.bytes, &self.size, kind).ok());
        let values = values.map(|t| t.flatten(0, -1).to_kind(Kind::Double));
        match values.and_then(|t| Vec::<f64>::try_from(t).ok()) {
            Some(values) => write!(f, ": {:?}", &values[..values.len().min(8)]),
            None => Ok(()),
        }
    }
}

fn bytes(tensor: &Tensor) -> Result<Vec<u8>, TchError> {
    let flat = tensor.f_detach()?.f_contiguous()?.f_flatten(0, -1)?.f_view_dtype(Kind::Uint8)?;
    Vec::try_from(&flat)
}

/// The bytes of all of a tensor's storage.
pub(crate) fn of_storage(tensor: &Tensor) -> Option<Vec<u8>> {
    let element = tensor.kind().elt_size_in_bytes() as u64;
    let elements = Storage::of(tensor)?.bytes() / element;
    bytes(&tensor.f_detach().ok()?.f_as_strided([elements as i64], [1], 0).ok()?).ok()
}
