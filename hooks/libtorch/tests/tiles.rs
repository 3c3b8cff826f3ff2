//! Recorded operations that are run tile by tile.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::sync::Arc;

use ssdtrain_libtorch::{Part, PartOrigin, Recorded, Recording, Step, Storage, Tile, Tiling};
use tch::{Device, Kind, Tensor};

const ROWS: i64 = 64;
const WIDTH: i64 = 128;

/// `(x * column).silu()`, and the operations that made it.
struct Made {
    x: Storage,
    column: Storage,
    result: Storage,
    product: Recorded,
    silu: Recorded,
}

impl Made {
    fn new() -> Made {
        let randn = |shape: [i64; 2]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
        let (x, column) = (randn([ROWS, WIDTH]), randn([ROWS, 1]));
        let recording = Arc::new(Recording::new(None).unwrap());
        let result = {
            let _recording = recording.record();
            (&x * &column).silu()
        };
        let [x, column, result] = [x, column, result].map(|tensor| Storage::of(&tensor).unwrap());
        let (silu, _) = recording.maker(&result).unwrap();
        let (product, _) = silu.maker(0, &recording).unwrap();
        Made { x, column, result, product, silu }
    }

    fn steps<'a>(&'a self, offset: i64, output: &'a Storage) -> [Step<'a>; 2] {
        let x = PartOrigin::Storage { storage: &self.x, offset, strides: vec![1, WIDTH] };
        let column = PartOrigin::Storage { storage: &self.column, offset: 0, strides: vec![0, 1] };
        let part = |argument, origin| Part { argument, origin };
        [
            Step { operation: &self.product, parts: vec![part(0, x), part(1, column)], output: None },
            Step { operation: &self.silu, parts: vec![part(0, PartOrigin::Step(0))], output: Some(output) },
        ]
    }
}

/// Tiles of ten rows, for two threads.
fn tiling() -> Tiling {
    let share = |begin: i64| {
        let rows = (begin..begin + ROWS / 2).step_by(10);
        rows.map(|row| Tile { first: row * WIDTH, rows: 10.min(begin + ROWS / 2 - row) }).collect()
    };
    Tiling { sizes: vec![WIDTH, ROWS], split: 1, shares: vec![share(0), share(ROWS / 2)], threads: 2 }
}

fn is_same(one: &Storage, other: &Storage) -> bool {
    one.elements().unwrap().equal(&other.elements().unwrap())
}

#[test]
fn tiles_make_the_bits_of_the_whole() {
    let made = Made::new();
    let output = Storage::allocate(made.result.bytes()).unwrap();
    tiling().run(&made.steps(0, &output)).unwrap();
    assert!(is_same(&output, &made.result));
}

#[test]
fn results_are_compared_and_not_written() {
    let made = Made::new();
    assert!(!tiling().differs(&made.steps(0, &made.result)).unwrap());
    let other = made.result.copy().unwrap();
    drop(other.elements().unwrap().narrow(0, other.bytes() as i64 - 1, 1).fill_(1));
    let before = other.copy().unwrap();
    assert!(tiling().differs(&made.steps(0, &other)).unwrap());
    assert!(is_same(&other, &before));
}

#[test]
fn a_failure_on_any_thread_is_an_error() {
    let made = Made::new();
    let mut steps = made.steps(0, &made.result);
    steps[1].parts.clear();
    let error = tiling().run(&steps).unwrap_err().to_string();
    assert!(error.contains("Expected Tensor"), "{error}");
}

#[test]
fn nothing_beyond_a_storage_is_read_or_written() {
    let made = Made::new();
    let refused = |tiling: Tiling, offset: i64, output: &Storage| {
        let error = tiling.run(&made.steps(offset, output)).unwrap_err().to_string();
        assert!(error.contains("internal error"), "{error}");
    };
    refused(tiling(), 1, &made.result);
    refused(tiling(), -1, &made.result);
    refused(tiling(), 0, &Storage::allocate(made.result.bytes() - 1).unwrap());
    let with = |tile: Tile| Tiling { shares: vec![vec![tile]], ..tiling() };
    refused(with(Tile { first: 0, rows: ROWS + 1 }), 0, &made.result);
    refused(with(Tile { first: (ROWS - 1) * WIDTH, rows: 2 }), 0, &made.result);
    refused(with(Tile { first: 1, rows: 1 }), 0, &made.result);
    refused(with(Tile { first: i64::MAX, rows: 1 }), 0, &made.result);
    refused(Tiling { sizes: vec![i64::MAX, ROWS], ..tiling() }, 0, &made.result);
    refused(Tiling { split: 2, ..tiling() }, 0, &made.result);
}
