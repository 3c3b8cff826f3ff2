//! One client: its request, the answer, and its end.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use super::request::Answer;

/// How long a client may take in all.
const PATIENCE: Duration = Duration::from_secs(5);
/// How much of what a client still sends after its request is read, so that it gets the answer before the connection ends.
const MOST_BESIDES: usize = 64 << 10;

/// A connection that never waits.
pub(crate) struct Connection {
    stream: TcpStream,
    /// When it ends, however far it has come.
    pub(crate) deadline: Instant,
    stage: Stage,
}

enum Stage {
    Reads(Vec<u8>),
    Writes {
        response: Vec<u8>,
        sent: usize,
    },
    /// The answer is under way; the client may still be sending.
    Ends {
        left: usize,
    },
}

impl Connection {
    /// Of a client that has just come.
    pub(crate) fn new(stream: TcpStream) -> io::Result<Connection> {
        stream.set_nonblocking(true)?;
        Ok(Connection { stream, deadline: Instant::now() + PATIENCE, stage: Stage::Reads(Vec::new()) })
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Whether it waits to write, and not to read.
    pub(crate) fn writes(&self) -> bool {
        matches!(self.stage, Stage::Writes { .. })
    }

    /// Goes as far as the client allows without waiting. False once the connection is to be closed. `respond` makes the response.
    pub(crate) fn proceed(&mut self, respond: impl Fn(Answer) -> Vec<u8>) -> bool {
        loop {
            match self.advance(&respond) {
                Ok(true) => {}
                Ok(false) => return false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
            }
        }
    }

    /// One read or write; false at the end.
    fn advance(&mut self, respond: &impl Fn(Answer) -> Vec<u8>) -> io::Result<bool> {
        let mut bytes = [0; 4 << 10];
        match &mut self.stage {
            Stage::Reads(request) => {
                let count = self.stream.read(&mut bytes)?;
                request.extend_from_slice(&bytes[..count]);
                if let Some(answer) = Answer::to(request) {
                    self.stage = Stage::Writes { response: respond(answer), sent: 0 };
                }
                Ok(count > 0)
            }
            Stage::Writes { response, sent } => {
                *sent += self.stream.write(&response[*sent..])?;
                if *sent == response.len() {
                    self.stream.shutdown(Shutdown::Write)?;
                    self.stage = Stage::Ends { left: MOST_BESIDES };
                }
                Ok(true)
            }
            Stage::Ends { left } => {
                let count = self.stream.read(&mut bytes)?;
                *left = left.saturating_sub(count);
                Ok(count > 0 && *left > 0)
            }
        }
    }
}
