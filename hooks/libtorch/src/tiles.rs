//! Recorded operations of the CPU, run one after another on parts of what they read that stay in its caches.

use crate::error::{TorchError, check};
use crate::ffi::{self, StPart, StStep, StTile, StTiling};
use crate::recording::Recorded;
use crate::storage::Storage;

/// How the results of operations, all of which have as many elements, are divided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tiling {
    /// The sizes of the dimensions that what is read has, innermost first.
    pub sizes: Vec<i64>,
    /// The dimension that tiles divide. They have all of those within it.
    pub split: usize,
    /// The tiles of each thread.
    pub shares: Vec<Vec<Tile>>,
    /// How many threads operations may have.
    pub threads: i32,
}

/// Some elements of each result. They lie side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// The first of them.
    pub first: i64,
    /// How many of the dimension that tiles divide.
    pub rows: i64,
}

/// An operation that is run.
pub struct Step<'a> {
    /// It is pointwise: each element of its one result is computed from one of each tensor that it reads.
    pub operation: &'a Recorded,
    /// The tensors that it reads, in any order. Those of one element are read as they are.
    pub parts: Vec<Part<'a>>,
    /// Where its result lies from the beginning, if anyone but later steps reads it.
    pub output: Option<&'a Storage>,
}

/// A tensor that a step reads.
pub struct Part<'a> {
    /// Which argument of the operation it is.
    pub argument: usize,
    /// Where it comes from.
    pub origin: Origin<'a>,
}

/// Where the elements that a step reads come from.
pub enum Origin<'a> {
    /// A step before it made them, in the order of memory.
    Step(usize),
    /// They are in a storage.
    Storage {
        /// Which.
        storage: &'a Storage,
        /// The first of them, in elements.
        offset: i64,
        /// How far apart they are in each dimension, in elements.
        strides: Vec<i64>,
    },
}

impl Tiling {
    /// Runs the steps tile by tile, and fills their outputs.
    pub fn run(&self, steps: &[Step<'_>]) -> Result<(), TorchError> {
        self.lend(steps, |tiling, steps| {
            // SAFETY: what both hold is borrowed until the call returns. The shim checks that no tile lies beyond a storage.
            check(unsafe { ffi::st_tiles_run(tiling, steps.as_ptr(), steps.len()) })
        })
    }

    /// Whether the outputs hold something else than the steps would write.
    pub fn differs(&self, steps: &[Step<'_>]) -> Result<bool, TorchError> {
        self.lend(steps, |tiling, steps| {
            let mut differs = false;
            // SAFETY: as above, and the place for the outcome is valid.
            check(unsafe { ffi::st_tiles_compare(tiling, steps.as_ptr(), steps.len(), &raw mut differs) })?;
            Ok(differs)
        })
    }

    /// Has both in the shim's form.
    fn lend<R>(
        &self,
        steps: &[Step<'_>],
        call: impl FnOnce(&StTiling, &[StStep]) -> Result<R, TorchError>,
    ) -> Result<R, TorchError> {
        let dimensions = self.sizes.len();
        let mut parts = Vec::with_capacity(steps.len());
        for step in steps {
            let own = step.parts.iter().map(|part| part.lend(dimensions)).collect::<Result<Vec<_>, _>>()?;
            parts.push(own);
        }
        let steps: Vec<_> = steps
            .iter()
            .zip(&parts)
            .map(|(step, parts)| StStep {
                operation: step.operation.0.as_ptr(),
                operands: parts.as_ptr(),
                count: parts.len(),
                output: step.output.map_or(std::ptr::null_mut(), |output| output.0.as_ptr()),
            })
            .collect();
        let tiles: Vec<_> =
            self.shares.iter().flatten().map(|tile| StTile { first: tile.first, rows: tile.rows }).collect();
        let ends = self.shares.iter().scan(0, |end, share| {
            *end += share.len();
            Some(*end)
        });
        let ends: Vec<usize> = ends.collect();
        let tiling = StTiling {
            sizes: self.sizes.as_ptr(),
            dimensions,
            split: self.split,
            tiles: tiles.as_ptr(),
            tiles_count: tiles.len(),
            ends: ends.as_ptr(),
            shares: ends.len(),
            threads: self.threads,
        };
        call(&tiling, &steps)
    }
}

impl Part<'_> {
    fn lend(&self, dimensions: usize) -> Result<StPart, TorchError> {
        let (argument, none) = (self.argument, std::ptr::null());
        match &self.origin {
            Origin::Step(step) => {
                Ok(StPart { argument, storage: std::ptr::null(), step: *step, offset: 0, strides: none })
            }
            Origin::Storage { storage, offset, strides } if strides.len() == dimensions => {
                let storage = storage.0.as_ptr();
                Ok(StPart { argument, storage, step: 0, offset: *offset, strides: strides.as_ptr() })
            }
            Origin::Storage { strides, .. } => {
                Err(TorchError(format!("{} strides for {dimensions} dimensions", strides.len())))
            }
        }
    }
}
