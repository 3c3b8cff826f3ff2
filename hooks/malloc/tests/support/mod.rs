//! Fake CUDA and cuFile libraries, and a program that runs on them under the hook.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// A folder with the fake libraries and the program, built by the C compiler.
pub(crate) struct Bench {
    folder: TempDir,
}

/// The output of a run.
pub(crate) struct Report {
    numbers: BTreeMap<String, i64>,
    pub(crate) errors: String,
}

impl Bench {
    pub(crate) fn new() -> Bench {
        let bench = Bench { folder: tempfile::tempdir().unwrap() };
        // Symbols of the real runtime have a version, which a preloaded library has to match.
        std::fs::write(bench.folder.path().join("versions"), "libcudart.so.13 { global: *; };").unwrap();
        bench.shared_object("ledger.c", "libledger.so", &["-pthread"]);
        bench.shared_object("cuda.c", "libcuda.so.1", &["-l:libledger.so"]);
        bench.shared_object("cudart.c", "libcudart.so.13", &["-Wl,--version-script=versions", "-ldl"]);
        bench.shared_object("cufile.c", "libcufile.so.0", &["-l:libledger.so", "-l:libcudart.so.13"]);
        let cuda = ["-l:libcudart.so.13", "-l:libcuda.so.1", "-l:libledger.so", "-pthread", "-ldl"];
        bench.shared_object("workload.c", "libworkload.so", &cuda);
        bench.cc("loader.c", "program", &[], &["-l:libworkload.so"]);
        bench.cc("loader.c", "loader", &["-DLOADS"], &["-ldl"]);
        bench.cc("held.c", "held", &["-pthread"], &cuda);
        bench
    }

    /// Runs the program in this mode, with the hook in front, and these variables.
    pub(crate) fn run(&self, mode: &str, variables: &[(&str, &str)]) -> Report {
        self.execute("program", mode, variables)
    }

    /// The same, in a program that loads the code that uses CUDA with `dlopen`, and not globally.
    pub(crate) fn run_as_module(&self, mode: &str, variables: &[(&str, &str)]) -> Report {
        self.execute("loader", mode, variables)
    }

    /// Runs the program in which registrations are held back.
    pub(crate) fn run_held(&self, mode: &str, variables: &[(&str, &str)]) -> Report {
        self.execute("held", mode, variables)
    }

    /// Runs a program that does nothing with CUDA, and returns what it printed to standard error.
    pub(crate) fn run_without_cuda(&self, variables: &[(&str, &str)]) -> String {
        self.cc("idle.c", "idle", &[], &[]);
        self.execute("idle", "", variables).errors
    }

    /// Removes cuFile.
    pub(crate) fn remove_cufile(&self) {
        std::fs::remove_file(self.folder.path().join("libcufile.so.0")).unwrap();
    }

    fn execute(&self, program: &str, mode: &str, variables: &[(&str, &str)]) -> Report {
        let output = Command::new(self.folder.path().join(program))
            .arg(mode)
            .env_clear()
            .env("LD_LIBRARY_PATH", self.folder.path())
            .env("LD_PRELOAD", hook())
            .envs(variables.iter().copied())
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{program} {mode}: {}\n{errors}", output.status);
        let lines = String::from_utf8_lossy(&output.stdout).into_owned();
        let numbers = lines
            .lines()
            .filter_map(|line| line.split_once('='))
            .map(|(name, number)| (name.to_owned(), number.parse().unwrap()))
            .collect();
        Report { numbers, errors }
    }

    fn shared_object(&self, source: &str, name: &str, libraries: &[&str]) {
        self.cc(source, name, &["-shared", "-fPIC", &format!("-Wl,-soname,{name}")], libraries);
    }

    fn cc(&self, source: &str, name: &str, flags: &[&str], libraries: &[&str]) {
        let package = Path::new(env!("CARGO_MANIFEST_DIR"));
        let output = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
            .current_dir(self.folder.path())
            .args(["-std=gnu11", "-Wall", "-Wextra", "-Wl,--no-as-needed"])
            .args(flags)
            .arg("-I")
            .arg(package.join("include"))
            .arg("-o")
            .arg(name)
            .arg(package.join("tests/stand_ins").join(source))
            .args(["-L.", "-Wl,-rpath-link,."])
            .args(libraries)
            .output()
            .expect("the tests need a C compiler: install one as `cc`, or name it in CC");
        assert!(output.status.success(), "{source}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

impl Report {
    /// A number that the program printed.
    pub(crate) fn number(&self, name: &str) -> i64 {
        *self.numbers.get(name).unwrap_or_else(|| panic!("the program did not print {name}"))
    }
}

/// The library to preload. Cargo builds it with every test of this package, and puts it next to them.
fn hook() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folder = test.parent().unwrap();
    let name = "libssdtrain_malloc_hook.so";
    let places = [folder.join(name), folder.parent().unwrap().join(name)];
    let found = places.iter().find(|place| place.exists());
    found.unwrap_or_else(|| panic!("{name} is in none of {places:?}: build the package first")).clone()
}
