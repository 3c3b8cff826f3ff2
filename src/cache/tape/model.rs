//! A plain record of every position of a tape, and steps that are taken with it and with [`Tape`] alike.

use super::{EntryKey, Tape};

/// What a program does with a tape.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TapeStep {
    /// An entry is saved. What is gone at the end of the tape is forgotten before.
    Save,
    /// The graph releases one of the entries that are there; they are counted round.
    Release(usize),
    /// Backward asks for one of the entries that are there; they are counted round.
    Ask { which: usize, missed: bool },
    /// Backward computes again what was saved where one of the entries is that are there; they are counted round.
    ComeTo(usize),
    /// It has to wait for something there.
    Miss,
    /// One of the entries that are there has left; they are counted round.
    Left(usize),
    /// The next entry ahead is considered.
    LookAhead,
    /// The next entry that is far is brought near.
    BringNear,
}

/// What is known of a position.
#[derive(Debug)]
struct Position {
    serial: u64,
    gone: bool,
    considered: bool,
    near: bool,
}

/// All of them, and where backward is.
#[derive(Debug, Default)]
struct Positions(Vec<Position>, usize);

impl Positions {
    /// Everything is ahead again once something new is saved.
    fn save(&mut self, serial: u64) {
        while self.0.pop_if(|last| last.gone).is_some() {}
        self.0.push(Position { serial, gone: false, considered: false, near: false });
        self.1 = self.0.len();
        self.miss();
    }

    /// Everything below where backward is is ahead again.
    fn miss(&mut self) {
        let at = self.1;
        for (index, position) in self.0.iter_mut().enumerate() {
            (position.considered, position.near) = (index >= at, index >= at);
        }
    }

    fn come_to(&mut self, at: usize) {
        self.1 = at;
        self.0[at..].iter_mut().for_each(|position| (position.considered, position.near) = (true, true));
    }

    /// One of the positions whose entry is there, counted round.
    fn there(&self, which: usize) -> Option<usize> {
        let there: Vec<usize> = (0..self.0.len()).filter(|&index| !self.0[index].gone).collect();
        Some(*there.get(which.checked_rem(there.len())?)?)
    }

    fn ask(&mut self, asked: usize, missed: bool) {
        self.1 = asked;
        for (index, position) in self.0.iter_mut().enumerate() {
            position.considered = index >= asked || (position.considered && !missed);
            position.near = index >= asked || (position.near && !missed);
        }
    }

    /// What was considered above something that was brought near counts as brought near.
    fn left(&mut self, left: usize) {
        if left >= self.1 {
            return;
        }
        let near = self.0.iter().position(|position| position.near).unwrap_or(self.0.len());
        self.0[near..].iter_mut().for_each(|position| position.near = true);
        self.0[..=left].iter_mut().for_each(|position| position.considered = false);
    }

    fn ahead(&self) -> Option<usize> {
        self.0.iter().rposition(|position| !position.considered)
    }

    fn far(&self) -> Option<usize> {
        self.0.iter().rposition(|position| !position.considered && !position.near)
    }

    fn serial(&self, position: Option<usize>) -> Option<u64> {
        position.map(|position| self.0[position].serial)
    }
}

/// Takes `steps` with a tape and with a record of its positions. Panics where the two differ.
pub(crate) fn compare(steps: impl IntoIterator<Item = TapeStep>) {
    let (mut tape, mut positions) = (Tape::default(), Positions::default());
    for (serial, step) in (0..).zip(steps) {
        match step {
            TapeStep::Save => {
                positions.save(serial);
                let is_there =
                    |key: EntryKey| positions.0.iter().any(|position| position.serial == key.serial);
                tape.forget_gone(|key| !is_there(key));
                assert_eq!(tape.push(EntryKey { index: 0, serial }), positions.0.len() - 1);
            }
            TapeStep::Release(which) => {
                if let Some(released) = positions.there(which) {
                    positions.0[released].gone = true;
                }
            }
            TapeStep::Ask { which, missed } => {
                if let Some(asked) = positions.there(which) {
                    positions.ask(asked, missed);
                    tape.asked(asked, missed);
                }
            }
            TapeStep::ComeTo(which) => {
                if let Some(at) = positions.there(which) {
                    positions.come_to(at);
                    tape.comes_to(at);
                }
            }
            TapeStep::Miss => {
                positions.miss();
                tape.missed();
            }
            TapeStep::Left(which) => {
                if let Some(left) = positions.there(which) {
                    positions.left(left);
                    tape.left(left);
                }
            }
            TapeStep::LookAhead => {
                tape.advance();
                if let Some(ahead) = positions.ahead() {
                    positions.0[ahead].considered = true;
                }
            }
            TapeStep::BringNear => {
                if let Some(far) = positions.far() {
                    tape.advance_near();
                    positions.0[far].near = true;
                }
            }
        }
        assert_eq!(tape.ahead().map(|key| key.serial), positions.serial(positions.ahead()), "ahead");
        assert_eq!(tape.far().map(|key| key.serial), positions.serial(positions.far()), "far");
    }
}
