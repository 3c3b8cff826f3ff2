//! The library's functions, each looked up once, by the first call that needs it.

use std::mem;
use std::path::Path;
use std::sync::OnceLock;

use crate::handle::Handle;
use crate::result::{Error, Result};
use crate::sys;

/// Declares [`Functions`]: a method for each function of C. Where a second name is given, it is looked for first.
macro_rules! functions {
    ($($method:ident: $function:ident $(, newer $newer:literal)?;)*) => {
        /// The functions of one loaded library, for what the safe layer does not cover.
        ///
        /// A function that the library lacks is an error of the method that returns it.
        pub struct Functions {
            handle: Handle,
            $($method: OnceLock<Option<sys::$function>>,)*
        }

        impl Functions {
            pub(crate) fn new(handle: Handle) -> Functions {
                Functions { handle, $($method: OnceLock::new(),)* }
            }

            $(
                #[doc = concat!("`", stringify!($function), "`, of the type [`sys::", stringify!($function), "`].")]
                pub fn $method(&self) -> Result<sys::$function> {
                    let found = self.$method.get_or_init(|| {
                        let names = [$(concat!($newer, "\0"),)? concat!(stringify!($function), "\0")];
                        let address = names.iter().find_map(|name| self.handle.symbol(name))?;
                        // SAFETY: the library's function of this name has this type; the layout test compares the
                        // types with those of the header, and the library is never unloaded.
                        Some(unsafe { mem::transmute::<std::ptr::NonNull<std::ffi::c_void>, sys::$function>(address) })
                    });
                    found.ok_or_else(|| Error::missing(stringify!($function), self.path()))
                }
            )*
        }
    };
}

functions! {
    driver_open: cuFileDriverOpen;
    driver_close: cuFileDriverClose, newer "cuFileDriverClose_v2";
    use_count: cuFileUseCount;
    driver_properties: cuFileDriverGetProperties;
    set_poll_mode: cuFileDriverSetPollMode;
    set_max_direct_io_size: cuFileDriverSetMaxDirectIOSize;
    set_max_cache_size: cuFileDriverSetMaxCacheSize;
    set_max_pinned_mem_size: cuFileDriverSetMaxPinnedMemSize;
    bar_size: cuFileGetBARSizeInKB;
    version: cuFileGetVersion;
    handle_register: cuFileHandleRegister;
    handle_deregister: cuFileHandleDeregister;
    buf_register: cuFileBufRegister;
    buf_deregister: cuFileBufDeregister;
    read: cuFileRead;
    write: cuFileWrite;
    parameter_size: cuFileGetParameterSizeT;
    parameter_bool: cuFileGetParameterBool;
    parameter_string: cuFileGetParameterString;
    parameter_range: cuFileGetParameterMinMaxValue;
    parameter_slabs: cuFileGetParameterPosixPoolSlabArray;
    set_parameter_size: cuFileSetParameterSizeT;
    set_parameter_bool: cuFileSetParameterBool;
    set_parameter_string: cuFileSetParameterString;
    set_parameter_slabs: cuFileSetParameterPosixPoolSlabArray;
    set_stats_level: cuFileSetStatsLevel;
    stats_level: cuFileGetStatsLevel;
    stats_start: cuFileStatsStart;
    stats_stop: cuFileStatsStop;
    stats_reset: cuFileStatsReset;
    stats_level1: cuFileGetStatsL1;
    stats_level2: cuFileGetStatsL2;
    stats_level3: cuFileGetStatsL3;
}

impl Functions {
    /// The name that the library was loaded by: a path, or a name that the dynamic linker found.
    pub fn path(&self) -> &Path {
        self.handle.path()
    }
}
