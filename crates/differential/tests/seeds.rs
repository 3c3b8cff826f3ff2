//! Random programs, the same ones each time: about a minute of them.

use ssdtrain_differential::{Lab, Verdict, generate};

const PROGRAMS: u64 = 1000;

/// Runs every `of`th ten of the programs, so that the runner has something to do at once.
fn agree(part: u64, of: u64) {
    let mut lab: Option<Lab> = None;
    let mut agreed = 0;
    for seed in (0..PROGRAMS).filter(|seed| seed / 10 % of == part) {
        let program = generate(seed);
        if !lab.as_ref().is_some_and(|lab| lab.fits(&program)) {
            lab = Lab::new(&program.config).ok();
        }
        let Some(lab) = &lab else { continue };
        let verdict = lab.check(&program);
        assert!(!verdict.is_wrong(), "seed {seed}: {verdict}\n{program}");
        agreed += u64::from(verdict == Verdict::Agrees);
    }
    assert!(agreed > PROGRAMS / of / 2, "only {agreed} programs say something");
}

#[test]
fn programs_have_the_same_bits_with_a_cache_1() {
    agree(0, 4);
}

#[test]
fn programs_have_the_same_bits_with_a_cache_2() {
    agree(1, 4);
}

#[test]
fn programs_have_the_same_bits_with_a_cache_3() {
    agree(2, 4);
}

#[test]
fn programs_have_the_same_bits_with_a_cache_4() {
    agree(3, 4);
}
