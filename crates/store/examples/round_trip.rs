//! Writes 64 MiB to a directory's spill file and reads them back: `round_trip [DIRECTORY]`.

use std::env;
use std::error::Error;
use std::sync::Arc;
use std::sync::mpsc::channel;

use ssdtrain_store::{AlignedBuf, Completion, IoBuf, Store, StoreConfig};

const BYTES: usize = 64 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let directory = env::args_os().nth(1).map_or_else(env::temp_dir, Into::into);
    let config = StoreConfig { directories: vec![directory], checksums: true, ..StoreConfig::default() };
    let store = Store::open(config)?;
    let blob = store.reserve(BYTES as u64)?;
    for write in [true, false] {
        let buf: Arc<dyn IoBuf> = Arc::new(AlignedBuf::new(BYTES).ok_or("no memory")?);
        let (tell, told) = channel();
        let done = Completion::new(move |outcome| drop(tell.send(outcome)));
        if write {
            store.write(Arc::clone(&blob), buf, done);
        } else {
            store.read(Arc::clone(&blob), buf, done);
        }
        told.recv()??;
    }
    println!("{}: {:?}", store.path(), store.stats());
    Ok(())
}
