//! Chains on the CPU: libtorch's own operations, run tile by tile.

use std::time::Duration;

use ssdtrain_libtorch::{self as torch, Part, PartOrigin, Storage};

use super::joined::{Arguments, Joined, Size};
use crate::error::{Error, ErrorKind, Result};
use crate::fusion::{Chain, Tiling, Value};

/// A chain that runs in tiles.
pub(crate) struct Tiles {
    chain: Chain,
    /// What a tile's elements may take, with all that the chain reads and makes of them.
    bytes: u64,
}

impl Tiles {
    pub(crate) fn new(chain: Chain, bytes: u64) -> Tiles {
        Tiles { chain, bytes }
    }

    fn tiling(&self, size: Size) -> Option<Tiling> {
        self.chain.tiling(size.count, size.threads?.get().into(), self.bytes)
    }

    /// Calls libtorch with the tiles, and with what it is to do for each.
    fn with<R>(
        &self,
        arguments: &Arguments<'_>,
        call: impl FnOnce(torch::Tiling, &[torch::Step<'_>]) -> std::result::Result<R, torch::TorchError>,
    ) -> Result<R> {
        let Arguments { size, inputs, outputs, operations, .. } = *arguments;
        let wrong =
            || Error::new(ErrorKind::Torch, "internal error: a chain was given what it does not take");
        let tiling = self.tiling(size).ok_or_else(wrong)?;
        let mut steps = Vec::with_capacity(operations.len());
        for (number, (recorded, known)) in operations.iter().enumerate() {
            let mut parts = Vec::new();
            for (read, value) in self.chain.operands(number, known) {
                let origin = match value {
                    Value::Step(step) => PartOrigin::Step(step),
                    Value::Input(input) => PartOrigin::Storage {
                        storage: &inputs.get(input).ok_or_else(wrong)?.0,
                        offset: signed(read.offset),
                        strides: tiling.strides[input].iter().copied().map(signed).collect(),
                    },
                    Value::Number(_) => return Err(wrong()),
                };
                parts.push(Part { argument: read.argument.ok_or_else(wrong)?, origin });
            }
            let output = match self.chain.output(number) {
                Some(place) => Some(outputs.get(place).ok_or_else(wrong)?),
                None => None,
            };
            steps.push(torch::Step { operation: recorded, parts, output });
        }
        let tile = |(first, rows): &(u64, u64)| torch::Tile { first: signed(*first), rows: signed(*rows) };
        let tiling = torch::Tiling {
            sizes: tiling.sizes.iter().copied().map(signed).collect(),
            split: tiling.split,
            shares: tiling.shares.iter().map(|share| share.iter().map(tile).collect()).collect(),
            threads: size.threads.map_or(1, |threads| i32::try_from(threads.get()).unwrap_or(i32::MAX)),
        };
        call(tiling, &steps).map_err(Error::torch)
    }
}

impl Joined for Tiles {
    fn takes(&self, size: Size) -> bool {
        self.tiling(size).is_some()
    }

    fn allocate(&self, bytes: u64) -> Result<Storage> {
        Storage::allocate(bytes).map_err(Error::torch)
    }

    fn run(&self, arguments: &Arguments<'_>) -> Result<()> {
        self.with(arguments, |tiling, steps| tiling.run(steps))
    }

    fn differs(&self, arguments: &Arguments<'_>, _limit: Duration) -> Result<bool> {
        self.with(arguments, |tiling, steps| tiling.differs(steps))
    }
}

/// As libtorch counts. It refuses what is out of range as too much for any storage.
fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
