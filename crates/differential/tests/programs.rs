//! Programs that once failed, as printed by the fuzzer or as someone thought of them.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use ssdtrain_differential::{Program, Verdict, check};

/// The program agrees, or the cache refuses it.
fn agrees(program: &str) {
    let program: Program = program.parse().unwrap();
    let verdict = check(&program);
    assert!(!verdict.is_wrong(), "{verdict}");
}

#[test]
fn a_program_is_read_as_it_is_written() {
    for seed in 0..20 {
        let program = ssdtrain_differential::generate(seed);
        assert_eq!(program.to_string().parse::<Program>().unwrap(), program);
    }
}

#[test]
fn pieces_with_counters_of_their_own() {
    agrees(
        "
        cache
        seed 1
        %0 = leaf 1 4 8
        step 1 {
          %1 = shifted %0
          %2 %3 = unsafe_chunk %1 2 0
          drop %1
          sigmoid_ %2
          flush
          sigmoid_ %3
          flush
          %4 = scaled %2
          %5 = scaled %3
          drop %2 %3
          backward %4 %5 0 0 0
        }
        ",
    );
}

#[test]
fn the_cells_of_a_recurrent_net() {
    agrees(
        "
        cache
        seed 8
        %0 = leaf 478 2 4 4
        %4 = leaf 194 12 4
        %5 = leaf 233 12 4
        %6 = leaf 799 12
        %7 = leaf 775 12
        step 1 {
          %1 = sin %0
          %8 = gru %1 %4 %5 %6 %7 4 1 1
          flush
          backward %8 0 0 0
        }
        ",
    );
}

#[test]
fn a_write_through_data_between_two_saves() {
    agrees(
        "
        cache memory
        seed 1
        %0 = leaf 1 4 4
        %1 = constant 2 4 4
        step 1 {
          %2 = copy %1
          %3 = mul %0 %2
          flush
          data_fill_ %2
          %4 = mul %0 %2
          drop %2
          backward %3 %4 0 0 0
        }
        ",
    );
}

#[test]
fn a_storage_that_grows_before_it_is_stored() {
    agrees(
        "
        cache memory queue_depth=1 disk_rate=100000000
        seed 1
        %0 = leaf 1 1100 1100
        %1 = constant 1 1100 1100
        step 1 {
          %2 = copy %1
          %3 = copy %1
          %4 = copy %1
          %5 = copy %1
          %6 = mul %0 %2
          %7 = mul %6 %3
          %8 = mul %7 %4
          %9 = mul %8 %5
          resize_ %3
          resize_ %4
          resize_ %5
          drop %2 %3 %4 %5 %6 %7 %8
          flush
          backward %9 0 0 0
        }
        ",
    );
}

#[test]
fn a_segment_that_holds_what_changes() {
    agrees(
        "
        cache
        seed 1
        %0 = leaf 1 4 4
        %1 = constant 2 4 4
        step 1 {
          %2 = segment %0 {
            %3 = add %0 %1
            %4 = sin %3
          }
          zero_ %1
          backward %2 0 0 0
        }
        ",
    );
}

#[test]
fn an_operation_that_holds_what_changes() {
    agrees(
        "
        cache
        seed 1
        %0 = leaf 1 4 4
        %1 = constant 2 4 4
        step 1 {
          %2 = remat %0 {
            %3 = add %0 %1
            %4 = sin %3
          }
          %5 = square %2
          drop %2
          zero_ %1
          backward %5 0 0 0
        }
        ",
    );
}

#[test]
fn an_optimizer_between_the_runs_of_a_segment() {
    agrees(
        "
        cache
        seed 1
        %0 = leaf 1 4 4
        %1 = parameter 2 4 4
        optimizer 0
        %2 = sin %1
        backward %2 0 0 0
        step 1 {
          %3 = segment %0 {
            %4 = add %0 %1
            %5 = sin %4
          }
          optimize
          backward %3 0 0 0
        }
        ",
    );
}

#[test]
fn statistics_within_a_segment() {
    agrees(
        "
        cache
        seed 1
        %0 = leaf 1 4 4
        %1 = leaf 2 4
        %2 = leaf 3 4
        %3 = constant 4 4
        %4 = constant 5 4
        step 1 {
          %5 = segment %0 {
            %6 = batch_norm %0 %1 %2 %3 %4 1
            %7 = sin %6
          }
          backward %5 0 0 0
        }
        ",
    );
}

#[test]
fn a_segment_that_holds_what_leaves_its_graph() {
    agrees(
        "
        cache
        seed 1
        %0 = constant 1 4 4
        %1 = leaf 2 4 4
        step 1 {
          %2 = sin %1
          %3 = segment %0 {
            %4 = sigmoid %2
          }
          detach_ %2
          backward %3 0 0 0
        }
        ",
    );
}

/// Autograd refuses the first at its product; the cache refuses only at the norm, when the product's gradients exist
/// already.
#[test]
fn what_leaves_its_graph_and_statistics_that_change() {
    agrees(
        "
        cache
        seed 845
        %0 = leaf 271 8 8
        %1 = leaf 442 8 8
        %2 = leaf 509 8
        %3 = leaf 419 8
        %4 = constant 416 8
        %5 = constant 921 8
        %6 = batch_norm %0 %2 %3 %4 %5 1
        step 1 {
          %7 = leaf 175 8
          index_put_ %5 %7 1
          %8 = matmul %6 %1
          detach_ %6
          backward %8 0 0 0
        }
        ",
    );
}

/// libtorch divides by zero there, which would end the process.
#[test]
fn attention_over_nothing() {
    agrees(
        "
        cache
        seed 1
        %0 = leaf 1 1 2 4 4
        step 1 {
          %1 = narrow %0 1 0 0
          %2 = scaled_dot_product_attention %1 %1
          backward %2 0 0 0
        }
        ",
    );
}

/// tch's optimizer panics, which counts as an error like any other.
#[test]
fn an_optimizer_that_fails() {
    let program: Program = "
        cache
        seed 1
        %0 = parameter 1 8
        optimizer 0
        step 1 {
          %1 = square %0
          backward %1 0 0 0
          %2 = gradient %0
          unsqueeze_ %2
          optimize
        }
        "
    .parse()
    .unwrap();
    assert_eq!(check(&program), Verdict::Agrees);
}
