//! Kernels compiled for the CPU make the bits of libtorch's operations there, as far as both round alike: sums, products, quotients, roots
//! and conversions.

use std::ffi::{CString, c_void};
use std::fmt::Write as _;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;
use std::sync::Arc;

use ssdtrain_libtorch::{Argument, Call, Recorded, Recording, Storage};
use tch::{Device, Kind, Tensor};

use super::source::THREADS;
use super::source::tests::without_conversions;
use super::*;

/// What the device has and C++ does not.
const SHIM: &str = r#"
#include <cmath>
#include <cstring>
#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(threads)
struct uint4 { unsigned x, y, z, w; };
static struct { unsigned x; } blockIdx, threadIdx;
static float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
static unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fsqrt_rn(float x) { return sqrtf(x); }
static float rsqrtf(float x) { return 1 / sqrtf(x); }
static float from_bfloat(unsigned short x) { return __uint_as_float((unsigned)x << 16); }
static unsigned short to_bfloat(float x) {
  if (x != x) return 0x7fff;
  const unsigned y = __float_as_uint(x);
  return (y + 0x7fff + ((y >> 16) & 1)) >> 16;
}
static float from_half(unsigned short x) { _Float16 y; memcpy(&y, &x, 2); return y; }
static unsigned short to_half(float x) { const _Float16 y = x; unsigned short z; memcpy(&z, &y, 2); return z; }
static unsigned short negate_half(unsigned short x) { return x ^ 0x8000; }
struct Any {
  void* place;
  template <typename T> operator T*() const { return static_cast<T*>(place); }
};
"#;

type Drive =
    unsafe extern "C" fn(places: *const *mut c_void, numbers: *const f32, count: u64, differs: *mut u32);

/// The operations that made a result, each after those whose results it reads.
struct Made {
    operations: Vec<(Recorded, Pointwise, Vec<Option<usize>>)>,
}

impl Made {
    fn by(&mut self, recording: &Recording, recorded: Recorded) -> usize {
        if let Some(known) = self.operations.iter().position(|(known, ..)| known.id() == recorded.id()) {
            return known;
        }
        let makers = (0..recorded.read().len())
            .map(|read| Some(self.by(recording, recorded.maker(read, recording)?.0)))
            .collect();
        let known = Pointwise::of(&on_device(recorded.call())).expect("a pointwise operation");
        self.operations.push((recorded, known, makers));
        self.operations.len() - 1
    }
}

/// The same call on a device.
fn on_device(mut call: Call) -> Call {
    for argument in &mut call.arguments {
        if let Argument::Tensor(view) = argument {
            view.is_on_cpu = false;
        }
    }
    for view in &mut call.results {
        view.is_on_cpu = false;
    }
    call
}

fn drive_of(text: &str, chain: &Chain, count: u64) -> Drive {
    let mut text = format!("{SHIM}{}", without_conversions(text));
    let places = chain.reads(count).len() + chain.writes(count).len();
    let mut arguments: Vec<String> = (0..places).map(|place| format!("Any{{places[{place}]}}")).collect();
    arguments.extend((0..chain.numbers()).map(|number| format!("numbers[{number}]")));
    arguments.extend(["(position)count".to_owned(), "differs".to_owned()]);
    write!(
        text,
        "extern \"C\" void drive(void* const* places, const float* numbers, unsigned long long count, unsigned* differs) {{
           for (unsigned block = 0; block <= count / {THREADS}; ++block) {{
             for (unsigned thread = 0; thread < {THREADS}; ++thread) {{
               blockIdx.x = block;
               threadIdx.x = thread;
               {ENTRY}({});
             }}
           }}
         }}",
        arguments.join(", ")
    )
    .unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (source, library) = (folder.path().join("chain.cpp"), folder.path().join("chain.so"));
    fs::write(&source, text).unwrap();
    let options =
        ["-std=c++17", "-O0", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC", "-o"];
    let output = Command::new("c++").args(options).arg(&library).arg(&source).output();
    let output = output.expect("the test needs a C++ compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let library = CString::new(library.as_os_str().as_bytes()).unwrap();
    // SAFETY: the library has nothing to initialise.
    let library = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!library.is_null());
    // SAFETY: the library is loaded, and stays so.
    let drive = unsafe { libc::dlsym(library, c"drive".as_ptr()) };
    assert!(!drive.is_null());
    // SAFETY: the text above gives it this type.
    unsafe { std::mem::transmute::<*mut c_void, Drive>(drive) }
}

fn check(what: &str, f: impl Fn() -> Tensor) {
    let recording = Arc::new(Recording::new(None).unwrap());
    let thread = recording.record();
    let expected = f();
    drop(thread);
    let storage = Storage::of(&expected).unwrap();
    let mut made = Made { operations: Vec::new() };
    made.by(&recording, recording.maker(&storage).unwrap().0);
    let operations = &made.operations;
    let vertices: Vec<_> = operations
        .iter()
        .map(|(_, known, makers)| Vertex {
            reads: makers.iter().flatten().copied().collect(),
            count: Some(known.count),
            follows: makers.iter().flatten().copied().collect(),
        })
        .collect();
    assert_eq!(groups(&vertices).len(), 1, "{what}");
    let members: Vec<_> = operations
        .iter()
        .enumerate()
        .map(|(number, (recorded, operation, makers))| Member {
            operation,
            makers: makers.clone(),
            keys: recorded.read().map(|read| read.id().unwrap()).collect(),
            is_output: number + 1 == operations.len(),
        })
        .collect();
    let bound = bind(&members);
    let places = operations.iter().flat_map(|(recorded, ..)| recorded.read());
    let storages: Vec<Storage> = places.filter_map(|read| read.unwritten()).collect();
    let mut places: Vec<*mut c_void> = bound
        .inputs
        .iter()
        .map(|(id, offset)| {
            let storage = storages.iter().find(|storage| storage.id() == *id).unwrap();
            storage.data().wrapping_byte_add(usize::try_from(*offset).unwrap())
        })
        .collect();
    let output = expected.zeros_like();
    places.push(output.data_ptr());
    let drive = drive_of(&source(&bound.chain), &bound.chain, bound.count);
    let mut differs = 0;
    // SAFETY: places and numbers are what the chain takes, and the tensors live until it returns.
    unsafe { drive(places.as_ptr(), bound.numbers.as_ptr(), bound.count, std::ptr::null_mut()) };
    let bytes = |t: &Tensor| Storage::of(t).unwrap().elements().unwrap();
    assert!(bytes(&expected).equal(&bytes(&output)), "{what}: other bits");
    // SAFETY: as above; the note is a local variable.
    unsafe { drive(places.as_ptr(), bound.numbers.as_ptr(), bound.count, &raw mut differs) };
    assert_eq!(differs, 0, "{what}");
    drop(output.view(-1).narrow(0, output.numel() as i64 - 1, 1).fill_(77.0));
    // SAFETY: as above.
    unsafe { drive(places.as_ptr(), bound.numbers.as_ptr(), bound.count, &raw mut differs) };
    assert_eq!(differs, 1, "{what}: a difference goes unnoticed");
}

#[test]
fn chains_compiled_for_the_cpu_have_its_bits() {
    for (kind, shapes) in [
        (Kind::BFloat16, &[(5, 64), (3, 7), (300, 8)][..]),
        (Kind::Half, &[(300, 8)]),
        (Kind::Float, &[(300, 8)]),
    ] {
        let randn = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu)).to_kind(kind);
        // Whole pieces and remainders, one row more than fits a block.
        for &(rows, width) in shapes {
            let (x, y, w, column) =
                (randn(&[rows, width]), randn(&[width, rows]), randn(&[width]), randn(&[rows, 1]));
            let positive = w.abs() + 1.0;
            let what = |name: &str| format!("{name} of {kind:?}, {rows} by {width}");
            check(&what("sums and products"), || (&x * &w + &x) * &column - y.transpose(0, 1));
            // MKL's roots in 32 bits are not always the nearest.
            let root = |t: Tensor| if kind == Kind::Float { t } else { t.sqrt() };
            check(&what("quotients and roots"), || root((&x * 1.5).square() + 0.25) / &positive);
            check(&what("conversions"), || {
                (x.to_kind(Kind::Float) * &column).to_kind(Kind::BFloat16).neg().to_kind(Kind::Half)
            });
            check(&what("a part"), || (x.narrow(1, 1, 3).relu() - 0.5).neg().reciprocal());
        }
    }
}
