//! What `ffi.rs` says of the shim is what `csrc/shim.h` says: a C compiler compares the two.

use std::collections::BTreeSet;
use std::env;
use std::fmt::Write as _;
use std::io::Write as _;
use std::mem::offset_of;
use std::process::{Command, Stdio};

use super::*;

const RUST: &str = include_str!("../ffi.rs");
const HEADER: &str = include_str!("../../csrc/shim.h");

/// Assertions that a type has its size, its alignment and its fields here as in C. A field that is left out does not compile.
macro_rules! layout {
    ($out:ident, $rust:ident { $($field:ident),* $(,)? }) => {
        let _complete = |value: &$rust| {
            let $rust { $($field: _),* } = value;
        };
        let fields = [$((stringify!($field), offset_of!($rust, $field))),*];
        structure(&mut $out, stringify!($rust), size_of::<$rust>(), align_of::<$rust>(), &fields);
    };
}

fn structures() -> String {
    let mut out = String::new();
    layout!(
        out,
        StSaved {
            storage,
            storage_bytes,
            tensor_bytes,
            version,
            device_type,
            device_index,
            eligible,
            tensor,
        }
    );
    layout!(out, StSegments { was, came, goes });
    layout!(out, StCallbacks { pack, unpack, release, error });
    layout!(out, StTouched { storage, bytes, version, device_type, device_index, unwritten });
    layout!(out, StDescription { name, number, index, strand, read, made, begun, ended, on_stream, threads });
    layout!(out, StPosition { strand, index });
    layout!(out, StTile { first, rows });
    layout!(out, StTiling { sizes, dimensions, split, tiles, tiles_count, ends, shares, threads });
    layout!(out, StPart { argument, storage, step, offset, strides });
    layout!(out, StStep { operation, operands, count, output });
    layout!(out, StView { storage, scalar_type, device_type, offset, dimensions, sizes, strides });
    layout!(out, StArgument { form, integer, real, text, view });
    layout!(out, StCall { overload, arguments, results });
    layout!(out, StBlock { data, bytes, capacity, held });
    layout!(out, StMemory { allocated, peak, reserved, requests });
    out
}

fn structure(out: &mut String, rust: &str, size: usize, align: usize, fields: &[(&str, usize)]) {
    let c = c_name(rust);
    require(out, &format!("sizeof({c}) == {size}"));
    require(out, &format!("_Alignof({c}) == {align}"));
    let (_, text) = RUST.split_once(&format!("pub(crate) struct {rust} {{\n")).unwrap();
    let (text, _) = text.split_once("\n}").unwrap();
    for (field, offset) in fields {
        require(out, &format!("offsetof({c}, {field}) == {offset}"));
        let (_, declared) = text.split_once(&format!("pub(crate) {field}: ")).unwrap();
        let declared = declared.lines().next().unwrap().trim_end_matches(',');
        same_type(out, &format!("(({c} *)0)->{field}"), &c_type(declared));
    }
}

/// Assertions that functions have their types here as in C.
fn functions() -> String {
    let mut out = String::new();
    for function in declared_here() {
        let (name, signature) = function.split_once('(').unwrap();
        same_type(&mut out, &format!("&{name}"), &c_function(signature));
    }
    out
}

/// The functions of `ffi.rs`, each as `name(parameter: type, …) -> type`.
fn declared_here() -> Vec<String> {
    let (_, block) = RUST.split_once("unsafe extern \"C\" {\n").unwrap();
    let (block, _) = block.split_once("\n}").unwrap();
    block.split(';').filter_map(|item| Some(item.split_once("fn ")?.1.to_owned())).collect()
}

/// The names of the functions of the header.
fn declared_in_c() -> BTreeSet<String> {
    let code: String = HEADER.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
    let last_word =
        |text: &str| text.rsplit(|c: char| !c.is_alphanumeric() && c != '_').next().map(str::to_owned);
    code.split('(').filter_map(last_word).filter(|word| word.starts_with("st_")).collect()
}

/// A pointer to a function in the words of C, from what follows its opening bracket in Rust.
fn c_function(signature: &str) -> String {
    let (parameters, result) = at_closing_bracket(signature);
    let result = result.trim().strip_prefix("-> ").map_or_else(|| "void".to_owned(), c_type);
    let parameters: Vec<String> = parts(parameters).into_iter().map(|part| c_type(type_of(part))).collect();
    let parameters = if parameters.is_empty() { "void".to_owned() } else { parameters.join(", ") };
    // The type as an expression's: it can then be a parameter's, a field's and a result's alike.
    format!("__typeof__({result} (*)({parameters}))")
}

fn c_type(rust: &str) -> String {
    let rust = rust.trim();
    if let Some(signature) = rust.strip_prefix("extern \"C\" fn(") {
        return c_function(signature);
    }
    if let Some(target) = rust.strip_prefix("*mut ") {
        return format!("{} *", c_type(target));
    }
    if let Some(target) = rust.strip_prefix("*const ") {
        // After what it concerns: `*const *mut T` is `T * const *`.
        return format!("{} const *", c_type(target));
    }
    match rust {
        "bool" => "bool",
        "f64" => "double",
        "i8" => "int8_t",
        "i32" => "int32_t",
        "i64" => "int64_t",
        "u32" => "uint32_t",
        "u64" => "uint64_t",
        "usize" => "size_t",
        "c_char" => "char",
        "c_void" => "void",
        "C_tensor" => "st_tensor",
        other => return c_name(other),
    }
    .to_owned()
}

/// `StSaved` is `st_saved` in C.
fn c_name(rust: &str) -> String {
    let name = rust.strip_prefix("St").unwrap_or_else(|| panic!("no word of C for {rust}"));
    format!("st_{}", name.to_lowercase())
}

/// What is before and after the bracket that closes the one before `text`.
fn at_closing_bracket(text: &str) -> (&str, &str) {
    let mut open = 1;
    for (at, c) in text.char_indices() {
        open += i32::from(c == '(') - i32::from(c == ')');
        if open == 0 {
            return (&text[..at], &text[at + 1..]);
        }
    }
    panic!("no closing bracket in {text}");
}

/// The parameters between two brackets.
fn parts(text: &str) -> Vec<&str> {
    let mut open = 0;
    let parts = text.split(|c| {
        open += i32::from(c == '(') - i32::from(c == ')');
        open == 0 && c == ','
    });
    parts.map(str::trim).filter(|part| !part.is_empty()).collect()
}

/// The type of a parameter, which in the type of a pointer has no name.
fn type_of(parameter: &str) -> &str {
    match parameter.split_once(": ") {
        Some((name, declared)) if name.chars().all(|c| c.is_alphanumeric() || c == '_') => declared,
        _ => parameter,
    }
}

fn same_type(out: &mut String, expression: &str, declared: &str) {
    require(out, &format!("__builtin_types_compatible_p(__typeof__({expression}), {declared})"));
}

fn require(out: &mut String, condition: &str) {
    writeln!(out, "_Static_assert({condition}, \"{condition}\");").unwrap();
}

/// Compiles `checks` below `header`; the error is what the compiler says.
fn compile(header: &str, checks: &str) -> Result<(), String> {
    let compiler = env::var_os("CC").unwrap_or_else(|| "cc".into());
    let mut command = Command::new(compiler);
    command.args(["-std=gnu11", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-x", "c", "-"]);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the test needs a C compiler: install one, or set CC to it");
    // Where the header is no file of its own, the line would be a warning.
    let header = header.replace("#pragma once\n", "");
    let text = format!("#include <stdbool.h>\n{header}\n{checks}");
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

/// The checks fail once `from` is `to` in the header.
fn assert_seen(from: &str, to: &str) {
    let changed = HEADER.replacen(from, to, 1);
    assert_ne!(changed, HEADER, "{from} is not in the header");
    let found = compile(&changed, &(structures() + &functions()));
    assert!(found.is_err_and(|said| said.contains("assert")), "{from} became {to} unseen");
}

#[test]
fn structures_and_functions_are_those_of_the_header() {
    compile(HEADER, &(structures() + &functions())).unwrap_or_else(|said| panic!("{said}"));
}

#[test]
fn no_function_is_missing_on_either_side() {
    let here = declared_here();
    let names: BTreeSet<String> = here.iter().map(|f| f.split('(').next().unwrap().to_owned()).collect();
    assert_eq!(names.len(), here.len());
    assert_eq!(names, declared_in_c());
}

#[test]
fn no_structure_of_the_header_goes_unchecked() {
    let checks = structures();
    let names: Vec<&str> =
        HEADER.lines().filter_map(|line| line.strip_prefix("} ")?.strip_suffix(';')).collect();
    assert!(!names.is_empty());
    for name in names {
        assert!(checks.contains(&format!("sizeof({name})")), "{name} has no line in structures()");
    }
}

#[test]
fn a_change_of_the_header_is_seen() {
    assert_seen(
        "  uint64_t storage_bytes;\n  uint64_t tensor_bytes;\n",
        "  uint64_t tensor_bytes;\n  uint64_t storage_bytes;\n",
    );
    assert_seen("  int8_t device_index;\n", "  uint8_t device_index;\n");
    assert_seen("  bool held; ", "  bool held, moved; int64_t more; ");
    assert_seen("(*unpack)(const void* handle", "(*unpack)(void* handle");
    assert_seen("size_t count", "uint32_t count");
    assert_seen("bool retain_graph", "int retain_graph");
    assert_seen("const st_tensor* loss", "st_tensor* loss");
    assert_seen("void st_variable_free(", "st_status st_variable_free(");
    assert_seen("(*written)(const st_storage* storage)", "(*written)(const st_tensor* storage)");
}
