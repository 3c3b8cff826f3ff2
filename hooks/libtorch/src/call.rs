//! How a recorded operation was called, as data.

use std::ffi::CStr;

use tch::Kind;

use crate::ffi::{self, StArgument, StView};
use crate::recording::Recorded;
use crate::storage::device_of;

/// A recorded operation's operator, arguments and results.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// The operator's name, such as `aten::mul`.
    pub name: &'static str,
    /// Which of the operators of that name, such as `Tensor`; may be empty.
    pub overload: String,
    /// In the order of the operator's schema.
    pub arguments: Vec<Argument>,
    /// The tensors that it returned.
    pub results: Vec<View>,
}

/// An argument of an operation.
#[derive(Clone, Debug, PartialEq)]
pub enum Argument {
    /// An optional one that was not given.
    None,
    /// A tensor.
    Tensor(View),
    /// A number, which may have been passed as a tensor that stands for one.
    Integer(i64),
    /// As above.
    Real(f64),
    /// As above.
    Truth(bool),
    /// A text.
    Text(String),
    /// Something else.
    Other,
}

/// How a tensor lies in its storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// Which of the storages that the operation [read](Recorded::read) or [made](Recorded::made).
    pub storage: usize,
    /// The type of its elements; `None` for one that tch does not have.
    pub kind: Option<Kind>,
    /// Whether it is on the CPU.
    pub is_on_cpu: bool,
    /// Its first element, in elements from the storage's beginning.
    pub offset: i64,
    /// Sizes, outermost first.
    pub sizes: Vec<i64>,
    /// Strides in elements.
    pub strides: Vec<i64>,
}

impl Recorded {
    /// How the operation was called, and what it returned.
    pub fn call(&self) -> Call {
        // SAFETY: a reference is held.
        let call = unsafe { ffi::st_recorded_call(self.0.as_ptr()) };
        // SAFETY: the shim gives a string that lives as long as the operator.
        let overload = unsafe { CStr::from_ptr(call.overload) };
        let arguments = (0..call.arguments).map(|index| {
            // SAFETY: a reference is held, and there are this many.
            argument_of(&unsafe { ffi::st_recorded_argument(self.0.as_ptr(), index) })
        });
        let results = (0..call.results).map(|index| {
            // SAFETY: a reference is held, and there are this many.
            view_of(&unsafe { ffi::st_recorded_result(self.0.as_ptr(), index) })
        });
        Call {
            name: self.name(),
            overload: overload.to_string_lossy().into_owned(),
            arguments: arguments.collect(),
            results: results.collect(),
        }
    }
}

/// Borrows what the record of `raw` holds, which must be alive.
fn argument_of(raw: &StArgument) -> Argument {
    match raw.form {
        ffi::ST_ARGUMENT_NONE => Argument::None,
        ffi::ST_ARGUMENT_TENSOR => Argument::Tensor(view_of(&raw.view)),
        ffi::ST_ARGUMENT_INTEGER => Argument::Integer(raw.integer),
        ffi::ST_ARGUMENT_REAL => Argument::Real(raw.real),
        ffi::ST_ARGUMENT_TRUTH => Argument::Truth(raw.integer != 0),
        ffi::ST_ARGUMENT_TEXT => {
            // SAFETY: the shim gives a string of the record, which the caller holds.
            let text = unsafe { CStr::from_ptr(raw.text) };
            Argument::Text(text.to_string_lossy().into_owned())
        }
        _ => Argument::Other,
    }
}

fn view_of(raw: &StView) -> View {
    let numbers = |first: *const i64| {
        if raw.dimensions == 0 {
            return Vec::new();
        }
        // SAFETY: the shim gives as many numbers as there are dimensions, of a record that the caller holds.
        unsafe { std::slice::from_raw_parts(first, raw.dimensions) }.to_vec()
    };
    View {
        storage: raw.storage,
        kind: kind_of(raw.scalar_type),
        is_on_cpu: !device_of(raw.device_type, 0).is_cuda(),
        offset: raw.offset,
        sizes: numbers(raw.sizes),
        strides: numbers(raw.strides),
    }
}

/// The kind with this `c10::ScalarType`.
fn kind_of(scalar_type: i8) -> Option<Kind> {
    const KINDS: [Kind; 16] = [
        Kind::Uint8,
        Kind::Int8,
        Kind::Int16,
        Kind::Int,
        Kind::Int64,
        Kind::Half,
        Kind::Float,
        Kind::Double,
        Kind::ComplexHalf,
        Kind::ComplexFloat,
        Kind::ComplexDouble,
        Kind::Bool,
        Kind::QInt8,
        Kind::QUInt8,
        Kind::QInt32,
        Kind::BFloat16,
    ];
    KINDS.get(usize::try_from(scalar_type).ok()?).copied()
}
