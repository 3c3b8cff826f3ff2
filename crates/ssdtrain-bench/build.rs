include!("../../build.rs");
