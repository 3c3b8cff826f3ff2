//! The program; its code is in the library next to it.

use std::process::ExitCode;

fn main() -> ExitCode {
    ssdtrain_bench::main()
}
